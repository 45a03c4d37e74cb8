"""Sweeps: what nobody followed up is found and put right, a slice at a time.

A slice is one bounded statement of each kind.  While there is more to look at,
slices follow each other at a fifth of the time, so that dispatching never
waits long; when all has been seen, the next round begins after
``durable_sweep_interval``.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from random import random
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

import psycopg
from celery.utils.log import get_logger

from celery_durable import signals
from celery_durable.beat.dispatch import Dispatcher
from celery_durable.beat.link import Link
from celery_durable.core.identity import new_id
from celery_durable.core.pacing import Outage, jittered
from celery_durable.messages.delivery import BrokerUnavailable
from celery_durable.settings import Settings
from celery_durable.store import beats, expiry, history
from celery_durable.store.executor import Executor, Row

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")

logger = get_logger(__name__)

#: Seconds between two signs of life.
ALIVE = 4.0
#: Share of the time that sweeping may take while there is more to look at: one part in this many.
SHARE = 5
#: Longest time between two looks for what is to be pruned, in seconds.
PRUNE_EVERY = 60.0
#: Seconds after which the pruning looks again at what it has passed by.
PRUNE_ANEW = 600.0
#: Least seconds between two errors about the same sweep, and between two lines about what was dispatched.
QUIET = 60.0


class Sweeper:
    """The sweeps of one beat.

    Arguments:
        app: sends the signals.
        link: the beat's connection.
        dispatcher: publishes again what was forgotten.
        outage: the broker's: nothing is published again while it is away.
        settings: page size and intervals.
    """

    def __init__(self, app: Celery, link: Link, dispatcher: Dispatcher, outage: Outage, settings: Settings) -> None:
        self._app = app
        self._link = link
        self._dispatcher = dispatcher
        self._outage = outage
        self._settings = settings
        self._after = expiry.FIRST
        self._pruned = history.Position()
        self._prune_anew_at = self._prune_at = float("-inf")
        self._more_to_prune = False
        self._said_at: dict[str, float] = {}
        self._untold = 0
        self._told_at = float("-inf")
        self._next_at = float("-inf")
        self._alive_at = float("-inf")
        self.beat_id = new_id()
        #: The version of the program's recurring entries.
        self.code: str | None = None

    def remaining(self, now: float) -> float:
        """Seconds until the next slice, at the monotonic instant `now`."""
        return self._next_at - now

    def soon(self) -> None:
        """Begin again at the next turn: Postgres or the broker is back."""
        self._next_at = float("-inf")
        self._prune_anew_at = self._prune_at = float("-inf")

    def turn(self, ending: Sequence[int] = ()) -> None:
        """Do a slice if it is time.

        Arguments:
            ending: leave the rest of the slice when this is no longer empty.

        Raises:
            DatabaseUnavailable: Postgres is away.
            BrokerUnavailable: the broker is away; the sweeps that do not need it have been done.
        """
        started = time.monotonic()
        if started < self._next_at:
            return
        # Should anything below raise, the next slice comes no sooner.
        self._next_at = started + jittered(self._settings.sweep_interval, random)
        broker_error = self._look(ending)
        if not ending:
            self._try("renewals", lambda executor: expiry.clear_renewals(executor, page=self._settings.page))
        if not ending:
            self._prune()
        if started >= self._alive_at and not ending:
            self._alive_at = started + ALIVE
            self._try("signs of life", self.say_alive)
        ended = time.monotonic()
        if self._after != expiry.FIRST or self._more_to_prune:
            self._next_at = min(self._next_at, ended + (SHARE - 1) * (ended - started))
        if broker_error is not None:
            raise broker_error

    def _look(self, ending: Sequence[int]) -> BrokerUnavailable | None:
        page, grace = self._settings.page, self._settings.undelivered_grace
        found = self._try("runs", lambda executor: expiry.look(executor, after=self._after, page=page, grace=grace))
        if found is None:
            return None
        kinds: tuple[tuple[str, Sequence[UUID], Callable[..., object]], ...] = (
            ("lost runs", found.silent, self._settle_lost),
            ("expired timers", found.expired, expiry.settle_expired),
            ("unwanted timers", found.unwanted, self._settle_unwanted),
        )
        for what, ids, settle in kinds:
            if ids and not ending:
                self._each(what, ids, settle, ending)
        error = None
        # Claims of a dead beat are late already; what workers leave lying may be many, and only probably lost.
        for ids in (found.unmarked, found.untaken):
            if not ids or ending or error is not None or self._outage.remaining(time.monotonic()):
                continue
            try:
                self._dispatcher.again(ids)
            except BrokerUnavailable as exc:
                error = exc
            except psycopg.Error as exc:
                self._say_failed("forgotten timers", exc)
        self._after = found.last or expiry.FIRST
        return error

    def _settle_lost(self, executor: Executor, ids: Sequence[UUID]) -> None:
        rows = expiry.settle_lost(executor, ids)
        dead = [row for row in rows if row.over]
        if rows:
            logger.warning(
                "%d runs lost their worker: %d run again, %d are dead letters.",
                len(rows),
                len(rows) - len(dead),
                len(dead),
            )
        for row in rows:
            if row.over:
                tell_dead(self._app, row)
            else:
                told = {"timer_id": row.id, "task": row.task, "attempt": row.attempt, "error": row.error}
                signals.timer_retried.send(self._app, **told)

    def _settle_unwanted(self, executor: Executor, ids: Sequence[UUID]) -> None:
        rows = expiry.settle_unwanted(executor, ids, grace=self._settings.undelivered_grace)
        if rows:
            logger.error("%d timers were never taken by a worker: they are dead letters now.", len(rows))
        for row in rows:
            tell_dead(self._app, row)

    def _prune(self) -> None:
        now = time.monotonic()
        if now >= self._prune_anew_at:
            # A dead letter that was kept may have been replayed or discarded since.
            self._prune_anew_at = now + PRUNE_ANEW
            self._pruned = history.Position()
        if not self._more_to_prune and now < self._prune_at:
            return
        self._prune_at = now + min(PRUNE_EVERY, self._settings.retention / 2)
        retention, page = self._settings.retention, self._settings.page
        self._more_to_prune = False
        for what, statement in (("history", history.prune), ("attempts", history.prune_left_over)):
            done = self._try(what, partial(statement, position=self._pruned, retention=retention, page=page))
            if done is not None:
                self._pruned, more = done
                self._more_to_prune |= more
        more_notes = self._try("occurrences", partial(history.prune_notes, retention=retention, page=page))
        self._more_to_prune |= bool(more_notes)

    def say_alive(self, executor: Executor) -> None:
        """Note that this beat is alive, and which entries it has."""
        beats.forget_silent(executor)
        dispatched, self._dispatcher.dispatched = self._dispatcher.dispatched, 0
        self._tell(dispatched)
        beats.seen(
            executor, self.beat_id, node=socket.gethostname(), pid=os.getpid(), version=version("celery-durable"),
            dispatched=dispatched, code=self.code,
        )  # fmt: skip

    def _tell(self, dispatched: int) -> None:
        """Say how many timers were dispatched; a line for each would drown all others."""
        self._untold += dispatched
        now = time.monotonic()
        if self._untold and now >= self._told_at + QUIET:
            logger.info("Dispatched %d timers.", self._untold)
            self._untold, self._told_at = 0, now

    def _try(self, what: str, operation: Callable[[Executor], T]) -> T | None:
        """Run one sweep; an error of its statement is said and stops no other sweep."""
        try:
            return self._link.run(operation)
        except psycopg.Error as exc:
            self._say_failed(what, exc)
            return None

    def _say_failed(self, what: str, exc: psycopg.Error) -> None:
        now = time.monotonic()
        quiet = now < self._said_at.get(what, float("-inf")) + QUIET
        if not quiet:
            self._said_at[what] = now
        logger.log(
            logging.DEBUG if quiet else logging.ERROR, "Sweep of %s failed, the next one tries again: %s", what, exc
        )

    def _each(self, what: str, ids: Sequence[UUID], settle: Callable[..., object], ending: Sequence[int]) -> None:
        """Settle a page at once; if that fails one by one, so that one bad row does not keep the others."""
        try:
            self._link.run(partial(settle, ids=ids))
        except psycopg.OperationalError as exc:
            self._say_failed(what, exc)  # a lock or a limit: no row's fault
        except psycopg.Error as exc:
            self._say_failed(what, exc)
            for each in ids:
                if ending:
                    return
                self._try(f"{what} one by one", partial(settle, ids=[each]))


def tell_dead(app: Celery, row: Row) -> None:
    """Send the signal of a dead letter."""
    signals.timer_dead.send(app, timer_id=row.id, task=row.task, reason=row.reason, error=row.error)
