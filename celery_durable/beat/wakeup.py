"""Sleeping until the next due time, unless an earlier timer is announced.

NOTIFY is a hint: without it (a pooler in between, a broken connection) a beat
finds the same timers by polling.
"""

from __future__ import annotations

import select
import selectors
import time
from collections.abc import Callable
from typing import Any

import psycopg
from celery.utils.log import get_logger
from psycopg import sql

from celery_durable.beat.link import cut
from celery_durable.errors import DatabaseUnavailable
from celery_durable.store.database import Database

logger = get_logger(__name__)

#: Seconds between two tries to listen.
RETRY = 30.0
#: ``FD_SETSIZE``: larger descriptors are beyond ``select``.
SELECTABLE = 1024


class Wakeup:
    """Listens on a connection of its own.

    Arguments:
        database: where to.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.Connection[Any] | None = None
        self._retry_at = float("-inf")

    def sleep(self, until: float, heard: Callable[[str], float]) -> None:
        """Sleep until the monotonic instant `until`.

        Arguments:
            until: monotonic seconds.
            heard: is given each announcement, and says until when to sleep because of it;
                what is later than `until` changes nothing.
        """
        while True:
            for payload in self._announcements():
                until = min(until, heard(payload))
            remaining = until - time.monotonic()
            if remaining <= 0:
                return
            if self._connection is None:
                time.sleep(remaining)
                continue
            wait_readable(self._connection.fileno(), remaining)

    def _announcements(self) -> list[str]:
        self._listen()
        if self._connection is None:
            return []
        try:
            return [each.payload for each in self._connection.notifies(timeout=0)]
        except psycopg.Error as exc:
            self._lost(exc)
            return []

    def _listen(self) -> None:
        if self._connection is not None or time.monotonic() < self._retry_at:
            return
        try:
            self._connection = self._database.connect("celery-durable beat, listening")
            self._connection.execute(sql.SQL("listen {}").format(sql.Identifier(self._database.schema)))
        except (DatabaseUnavailable, psycopg.Error) as exc:
            self._lost(exc)

    def _lost(self, exc: Exception) -> None:
        self._retry_at = time.monotonic() + RETRY
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        logger.info("Not listening for earlier timers for now, polling instead: %s", exc)

    def again(self) -> None:
        """Listen again at the next sleep: Postgres is back."""
        self._retry_at = float("-inf")

    def cut(self) -> None:
        """Shut the socket down: for signal handlers."""
        if self._connection is not None:
            cut(self._connection)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def wait_readable(descriptor: int, seconds: float) -> None:
    """Wait until there is something to read, or a signal, or the time is over.

    Not psycopg's own wait, which looks for signals every 0.1 s only; and
    ``select`` where it can be used, because ``poll`` and ``epoll`` round up to
    the next millisecond, which each timer would be late.
    """
    if descriptor < SELECTABLE:
        select.select([descriptor], [], [], seconds)
        return
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        selector.select(seconds)
