"""A beat's own connection to Postgres, opened again when it has broken."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg

from celery_durable.errors import DatabaseUnavailable
from celery_durable.store.database import Database, Limits, translated
from celery_durable.store.executor import Executor, PsycopgExecutor

T = TypeVar("T")

#: Longest time for one statement of a beat, in seconds; all of them are bounded by pages.
STATEMENT_LIMIT = 30.0


class Link:
    """One connection in autocommit, for the main thread and one other that takes turns with it.

    Arguments:
        database: where to.
        name: shown as ``application_name`` in ``pg_stat_activity``.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name
        self._connection: psycopg.Connection[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as known."""
        return self._connection is not None and not self._connection.closed

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, opened if there is none.

        Raises:
            DatabaseUnavailable: when Postgres cannot be reached.
        """
        if self._connection is None or self._connection.closed:
            # No statement waits for a lock for longer than a page may take to publish.
            limits = Limits(
                lock=self._database.settings.publish_timeout, statement=STATEMENT_LIMIT, plans="force_custom_plan"
            )
            self._connection = self._database.connect(self._name, limits=limits)
        return self._connection

    def run(self, operation: Callable[[Executor], T]) -> T:
        """Run an operation, each of its statements in a transaction of its own.

        Raises:
            DatabaseUnavailable: Postgres went away; what the operation did is unknown.
            SchemaMismatch: the tables are gone.
        """
        try:
            with translated():
                return operation(PsycopgExecutor(self.connection, self._database.schema))
        except DatabaseUnavailable:
            self.drop()
            raise

    def transact(self, operation: Callable[[Executor], T]) -> T:
        """As :meth:`run`, with all statements in one transaction."""

        def in_transaction(executor: Executor) -> T:
            with executor.atomic():
                return operation(executor)

        return self.run(in_transaction)

    def start(self, operation: Callable[[Executor], T]) -> Future[T]:
        """As :meth:`run`, while the caller does something else; one after the other, in order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="durable-claims")
        return self._thread.submit(self.run, operation)

    def drop(self) -> None:
        """Close the connection; the next operation opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the other thread, once it is done with what it does, and close the connection."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.drop()

    def cut(self) -> None:
        """Shut the socket down, for signal handlers: no statement, no lock; whoever waits on it gets an error.

        Closing the connection here could free it under the other thread.
        """
        if self._connection is not None:
            cut(self._connection)


def cut(connection: psycopg.Connection[Any]) -> None:
    """Shut down the socket of a connection, whoever is using it."""
    try:
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    except (psycopg.Error, OSError):
        return  # closed already
    try:
        duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the server was faster
    finally:
        duplicate.close()
