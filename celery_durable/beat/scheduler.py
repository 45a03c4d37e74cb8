"""The beat scheduler that takes its timers from Postgres."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from celery.beat import Scheduler
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger
from sqlalchemy.engine import make_url

from celery_durable.beat.loop import Loop
from celery_durable.errors import SchemaMismatch
from celery_durable.messages.publishers import Publisher, publisher_for
from celery_durable.settings import Settings

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)


class DurableScheduler(Scheduler):
    """Dispatches due timers; run as many of them as you like, as ``celery beat -S durable`` or in ``celery worker -B``.

    Making one connects to nothing: the banner makes one too, and an embedded
    beat is made before its process closes all inherited sockets.  All waiting
    happens in :meth:`tick`.

    Arguments:
        app: the app.
        kwargs: Celery's; a file name for the schedule is not used, no file is written.

    Raises:
        SystemExit: a ``durable_*`` setting is wrong; the log says which, and the cure.
    """

    #: Longest sleep in one tick; remote control takes a beat without ticks for dead.
    max_interval = 5

    def __init__(self, app: Celery, **kwargs: Any) -> None:
        self._loop: Loop | None = None
        self._inherited: list[Loop | None] = []
        self._failed = False
        self._ticking = False
        try:
            self._settings = Settings.from_app(app)
        except ImproperlyConfigured as exc:
            self._give_up(exc)
        super().__init__(app, **kwargs)

    def setup_schedule(self) -> None:
        """Nothing yet: the entries are written when the first tick has connected."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, then sleep until more is, for at most :attr:`max_interval` seconds.

        Returns:
            0: call it again at once.

        Raises:
            SystemExit: the schema is missing or of another version, or a setting is wrong; the log names the cure.
        """
        if self._loop is None or self._loop.pid != os.getpid():
            # What a parent process opened is left to it; collected as garbage it would end the parent's sessions.
            self._inherited.append(self._loop)
            self._loop = Loop(self.app, self.make_publisher(), self.code_entries)
        self._ticking = True
        try:
            self._loop.turn(float(self.max_interval))
        except (SchemaMismatch, ImproperlyConfigured) as exc:
            self._failed = True
            self._give_up(exc)
        finally:
            self._ticking = False
        return 0

    def _give_up(self, error: Exception) -> NoReturn:
        """End with one line: Celery would add its own traceback to an error."""
        text = f"This beat stops: {error}"
        logger.critical(text)
        # Celery makes the first scheduler for its banner, before there is a log: then the interpreter says it.
        raise SystemExit(1 if logging.getLogger().handlers else text) from error

    def make_publisher(self) -> Publisher:
        """The publisher for the app's broker."""
        return publisher_for(self.app, timeout=self._settings.publish_timeout)

    def code_entries(self) -> Mapping[str, Any]:
        """The program's entries: ``beat_schedule``, ``add_periodic_task``, and Celery's clean-up of results."""
        self.data = dict(self.app.conf.beat_schedule or {})
        self.install_default_entries(self.data)
        entries: Mapping[str, Any] = self.data
        return entries

    def sync(self) -> None:
        """Nothing is kept in memory that would have to be written."""

    def close(self) -> None:
        """End: no statement, no lock, nothing that waits for an answer.

        Celery calls this in its signal handler, in the middle of a tick, and
        again after it.  In the handler sockets are shut down and no more: a
        statement or a lock would wait for the tick that it has interrupted.

        Raises:
            SystemExit: once, after a tick that raised it: Celery swallows that one, and the
                process would end as if all were well.
        """
        if self._loop is not None and self._loop.pid == os.getpid():
            self._loop.cut()
            if not self._ticking:
                self._loop.close()
        super().close()
        if self._failed:
            self._failed = False
            raise SystemExit(1)

    @property
    def info(self) -> str:
        """Lines for the banner, without the password."""
        url = self._settings.database_url
        shown = url if url.startswith("embedded:") else make_url(url).render_as_string(hide_password=True)
        return f"    . db -> {shown}\n    . schema -> {self._settings.schema}"
