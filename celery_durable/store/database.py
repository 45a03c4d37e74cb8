"""The app's own connections to Postgres, and the one place where driver errors become ours."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import psycopg
from psycopg import errors as pg
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import PoolProxiedConnection

from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.settings import Settings
from celery_durable.store.executor import Executor, PsycopgExecutor, executor_for, place_of

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")

#: What :meth:`Database.run` may raise through no fault of whoever called it.
DATABASE_ERRORS = (DatabaseUnavailable, SchemaMismatch, psycopg.Error)

MIGRATE = "celery -A <your app> durable migrate"

#: Longest wait of a worker's statement for a lock, and longest time of the statement, as parts of the lease: another
#: try fits into the lease that the statement is about.
LOCK_SHARE, STATEMENT_SHARE = 1 / 6, 1 / 3


class Limits(NamedTuple):
    """What a session's statements are held to."""

    lock: float
    """Longest wait for a lock, in seconds."""
    statement: float
    """Longest time of a statement, in seconds."""
    plans: str = "auto"
    """``plan_cache_mode``: ``force_custom_plan`` where one statement is run over pages of very different tables."""


#: Marks a pooled connection whose statements are limited.
_BOUNDED = "celery_durable_bounded"

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
            event.listen(self._engine, "connect", lambda connection, _: self._isolate(connection))
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

    def _isolate(self, connection: psycopg.Connection[Any]) -> None:
        """READ COMMITTED, whatever the database's default is: each statement looks at the rows as they are now.

        By a statement, not by a start-up option, which poolers refuse.  A pooler in transaction mode would hand
        the session's setting on to other clients: behind one only our transactions are safe from the default,
        and a statement that meets a conflict is run again.
        """
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        if self.settings.prepared_statements:
            connection.execute("set session characteristics as transaction isolation level read committed")

    @property
    def lease_limits(self) -> Limits:
        """So that no statement of a worker waits for a lock, or runs, for as long as the lease that it is about."""
        return Limits(lock=self.settings.lease * LOCK_SHARE, statement=self.settings.lease * STATEMENT_SHARE)

    def _limit(self, connection: psycopg.Connection[Any], limits: Limits) -> None:
        if self.settings.prepared_statements:
            connection.execute(
                "select set_config('lock_timeout', %s, false), set_config('statement_timeout', %s, false),"
                # A plan that is kept was made for the tables as they were: one that reads a small table in whole would
                # read it so when it has grown, until statistics are taken.
                " set_config('enable_seqscan', 'off', false), set_config('plan_cache_mode', %s, false)",
                (_milliseconds(limits.lock), _milliseconds(limits.statement), limits.plans),
            )

    def connect(self, name: str, *, limits: Limits | None = None) -> psycopg.Connection[Any]:
        """Open a connection of one's own, in autocommit, outside the pool.

        Arguments:
            name: shown as ``application_name`` in ``pg_stat_activity``.
            limits: of its statements; none behind a pooler that hands sessions from one client to the next,
                which would limit others.

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
            connection = psycopg.connect(autocommit=True, **arguments)
            self._isolate(connection)
            if limits is not None:
                self._limit(connection, limits)
            return connection

    def run(self, operation: Callable[[Executor], T], *, bounded: bool = False) -> T:
        """Run an operation on a pooled connection, once more if the connection is dead or a conflict undid it.

        The second try is safe because operations are repeatable: a statement names
        the state it expects, and an insert carries the id it makes.

        Arguments:
            operation: what to run.
            bounded: within :attr:`lease_limits`; the connection stays so for later operations of this process.

        Raises:
            DatabaseUnavailable: when Postgres cannot be reached, or refuses for now.
            SchemaMismatch: when the tables are missing.
        """
        for last in (False, True):
            with translated(passing=True):
                pooled = self.engine.raw_connection()
                try:
                    return operation(PsycopgExecutor(self._prepared(pooled, bounded), self.schema))
                except psycopg.Error as exc:
                    if not self._dropped(pooled, exc) and not (exc.sqlstate or "").startswith("40"):
                        raise
                    if last:
                        raise
                finally:
                    pooled.close()
        raise AssertionError("unreachable")

    def _prepared(self, pooled: PoolProxiedConnection, bounded: bool) -> psycopg.Connection[Any]:
        connection = cast(psycopg.Connection[Any], pooled.driver_connection)
        if bounded and _BOUNDED not in pooled.info:
            self._limit(connection, self.lease_limits)
            pooled.info[_BOUNDED] = True
        return connection

    def _dropped(self, pooled: PoolProxiedConnection, error: psycopg.Error) -> bool:
        """Drop a connection that leads nowhere, and its siblings: they are of the same server."""
        connection = cast(psycopg.Connection[Any], pooled.driver_connection)
        if not connection.closed and not isinstance(error, pg.ReadOnlySqlTransaction):
            return False
        pooled.invalidate()
        self.engine.dispose()
        return True

    def transact(self, operation: Callable[[Executor], T]) -> T:
        """As :meth:`run`, with all statements of the operation in one transaction."""

        def in_transaction(executor: Executor) -> T:
            with executor.atomic():
                return operation(executor)

        return self.run(in_transaction)

    def perform(self, operation: Callable[[Executor], T], connection: Any = None) -> T:
        """Run on the caller's `connection` and transaction if given, else on our own.

        Raises:
            SchemaMismatch: the tables are missing where the connection leads; names the place.
        """
        if connection is None:
            return self.run(operation)
        try:
            with translated():
                return operation(executor_for(connection, self.schema))
        except SchemaMismatch as exc:
            raise SchemaMismatch(
                f"{exc} Looked for in schema {self.schema!r} of {place_of(connection)}, where connection= leads: should "
                "that be the wrong database, give a connection to the one of durable_database_url."
            ) from exc

    def close(self) -> None:
        """Close the pooled connections of this process."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()


class Trouble(Enum):
    """What an error of the driver means for whoever wants the statement done."""

    AWAY = "away"
    """The server is gone, ends, has no room, or only reads: another connection, in a while."""
    PASSING = "passing"
    """A lock, a limit, a conflict: nothing was changed, and the same statement may work in a moment."""
    LASTING = "lasting"
    """A wrong statement, a missing right, a broken rule: trying again changes nothing."""

    @classmethod
    def of(cls, error: BaseException | None) -> Trouble:
        """Classify an error by its SQLSTATE."""
        if not isinstance(error, psycopg.Error):
            return cls.LASTING
        code = error.sqlstate
        if code is None:  # libpq itself gave up
            away = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
            return cls.AWAY if away else cls.LASTING
        if code.startswith(_AWAY):
            return cls.AWAY
        return cls.PASSING if code.startswith(_PASSING) else cls.LASTING


# 08 connection, 53 resources, 57P shutdown, 58 system; 25006: a standby, or a primary that has become one;
# 25P03, 25P04: the session or its transaction was ended for its age.
_AWAY = ("08", "53", "57P", "58", "25006", "25P03", "25P04")
# 40 deadlock and serialisation, 55P03 lock timeout, 57014 statement timeout or an operator's cancel.
_PASSING = ("40", "55P03", "57014")


@contextmanager
def translated(*, passing: bool = False) -> Iterator[None]:
    """Turn the driver's errors that have a cure into ours; leave the others as they are.

    Arguments:
        passing: what may work in a moment, too.  Not where a transaction is the caller's: he alone can run it again.
    """
    try:
        yield
    except (psycopg.Error, DBAPIError, PoolTimeout, NoSuchModuleError) as exc:
        cause = exc.orig if isinstance(exc, DBAPIError) else exc
        if isinstance(cause, (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedFunction, pg.UndefinedColumn)):
            raise SchemaMismatch(
                f"The tables of celery-durable are missing or of another version ({_line(cause)}). Run: {MIGRATE}"
            ) from exc
        trouble = Trouble.AWAY if isinstance(cause, PoolTimeout) else Trouble.of(cause)
        if isinstance(cause, pg.ReadOnlySqlTransaction):
            raise DatabaseUnavailable(f"Postgres takes no changes here: {_line(cause)}") from exc
        if trouble is Trouble.AWAY:
            raise DatabaseUnavailable(f"Postgres cannot be reached: {_line(cause)}") from exc
        if trouble is Trouble.PASSING and passing:
            raise DatabaseUnavailable(f"Postgres refuses for now: {_line(cause)}") from exc
        raise


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
