"""The app's own connections to Postgres, and the one place where driver errors become ours."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
from psycopg import errors as pg
from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.settings import Settings
from celery_durable.store.executor import Executor, PsycopgExecutor, executor_for

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")

MIGRATE = "celery -A <your app> durable migrate"

_databases: weakref.WeakKeyDictionary[Celery, Database] = weakref.WeakKeyDictionary()


class Database:
    """Connections in autocommit, pooled per process; safe to keep over a fork.

    Own connections are in autocommit because every state change is one statement.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.schema = settings.schema
        self._engine: Engine | None = None
        self._pid = 0

    @classmethod
    def of(cls, app: Celery) -> Database:
        """The database of `app`, made at first use.

        Raises:
            celery.exceptions.ImproperlyConfigured: when a ``durable_*`` setting is wrong.
        """
        database = _databases.get(app)
        if database is None:
            database = _databases[app] = cls(Settings.from_app(app))
        return database

    @property
    def url(self) -> URL:
        """The SQLAlchemy URL; starts or joins the private server of an ``embedded:`` one."""
        text = self.settings.database_url
        if text.startswith("embedded:"):
            from celery_durable.store.embedded import resolve

            text = resolve(text)
        url = make_url(text)
        return url.set(drivername="postgresql+psycopg")

    @property
    def engine(self) -> Engine:
        """SQLAlchemy's engine over our pool (autocommit)."""
        if self._engine is None or self._pid != os.getpid():
            if self._engine is not None:
                # Sockets of the parent process: forget them, closing them would end its sessions.
                self._engine.dispose(close=False)
            self._engine = create_engine(
                self.url, isolation_level="AUTOCOMMIT", pool_size=2, max_overflow=30,
                pool_timeout=self.settings.connect_timeout, connect_args=self._connect_args("celery-durable"),
            )  # fmt: skip
            self._pid = os.getpid()
        return self._engine

    def _connect_args(self, name: str) -> dict[str, Any]:
        return {
            "connect_timeout": max(1, round(self.settings.connect_timeout)),
            "application_name": name,
            # A server that vanished without a word is noticed within this time, not after the system's two hours.
            "keepalives_idle": 10,
            "keepalives_interval": 3,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            "prepare_threshold": 5 if self.settings.prepared_statements else None,
        }

    def connect(self, name: str) -> psycopg.Connection[Any]:
        """Open a connection of one's own, in autocommit, outside the pool.

        Arguments:
            name: shown as ``application_name`` in ``pg_stat_activity``.

        Raises:
            DatabaseUnavailable: when Postgres cannot be reached.
        """
        url = self.url
        named = {
            "host": url.host, "port": url.port, "user": url.username, "password": url.password, "dbname": url.database,
        }  # fmt: skip
        # The query's word counts: postgresql+psycopg://user@/db?host=/var/run/postgresql is SQLAlchemy's form for sockets.
        arguments: dict[str, Any] = {**named, **url.query, **self._connect_args(name)}
        with translated():
            return psycopg.connect(autocommit=True, **arguments)

    def run(self, operation: Callable[[Executor], T]) -> T:
        """Run an operation on a pooled connection, once more if the connection turns out to be dead.

        The second try is safe because operations are repeatable: a statement names
        the state it expects, and an insert carries the id it makes.

        Raises:
            DatabaseUnavailable: when Postgres cannot be reached.
            SchemaMismatch: when the tables are missing.
        """
        for last in (False, True):
            with translated():
                pooled = self.engine.raw_connection()
                connection = cast(psycopg.Connection[Any], pooled.driver_connection)
                try:
                    return operation(PsycopgExecutor(connection, self.schema))
                except psycopg.OperationalError:
                    if not connection.closed:
                        raise
                    # One dead connection means a restart: its siblings in the pool are dead as well.
                    pooled.invalidate()
                    self.engine.dispose()
                    if last:
                        raise
                finally:
                    pooled.close()
        raise AssertionError("unreachable")

    def transact(self, operation: Callable[[Executor], T]) -> T:
        """As :meth:`run`, with all statements of the operation in one transaction."""

        def in_transaction(executor: Executor) -> T:
            with executor.atomic():
                return operation(executor)

        return self.run(in_transaction)

    def perform(self, operation: Callable[[Executor], T], connection: Any = None) -> T:
        """Run on the caller's `connection` and transaction if given, else on our own."""
        if connection is None:
            return self.run(operation)
        with translated():
            return operation(executor_for(connection, self.schema))

    def close(self) -> None:
        """Close the pooled connections of this process."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's errors that have a cure into ours; leave the others as they are."""
    try:
        yield
    except (psycopg.Error, DBAPIError, PoolTimeout, NoSuchModuleError) as exc:
        cause = exc.orig if isinstance(exc, DBAPIError) else exc
        if isinstance(cause, (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedFunction, pg.UndefinedColumn)):
            raise SchemaMismatch(
                f"The tables of celery-durable are missing or of another version ({_line(cause)}). Run: {MIGRATE}"
            ) from exc
        if isinstance(cause, PoolTimeout) or (isinstance(cause, psycopg.Error) and unreachable(cause)):
            raise DatabaseUnavailable(f"Postgres cannot be reached: {_line(cause)}") from exc
        raise


def unreachable(error: psycopg.Error) -> bool:
    """True when the server or the connection to it is gone; a deadlock or a serialisation failure is not that."""
    if not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return False
    # Class 08 connection, 53 resources, 57P shutdown; no code at all: libpq itself gave up.
    return error.sqlstate is None or error.sqlstate.startswith(("08", "53", "57P"))


def _line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
