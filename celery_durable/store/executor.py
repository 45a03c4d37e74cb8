"""One way to run a statement on whatever connection the caller has.

Statements are text with ``%(name)s`` parameters and ``{schema}`` where the
schema goes; psycopg, SQLAlchemy and Django all take that form.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy.engine import Connection as SqlalchemyConnection
from sqlalchemy.orm import Session, scoped_session

Row = Any
"""A row with its columns as attributes."""


@lru_cache(maxsize=512)
def qualified(sql: str, schema: str) -> str:
    """Put the schema name into a statement."""
    return sql.replace("{schema}", f'"{schema}"')


class Executor(Protocol):
    """Runs statements in one connection's present transaction, or each in its own."""

    def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Sequence[Row]:
        """Run one statement and return all its rows (none for a statement without rows)."""

    def atomic(self) -> AbstractContextManager[object]:
        """All or nothing: a transaction, or a savepoint within the one that is open."""


class PsycopgExecutor:
    """On a psycopg 3 connection; the caller's transaction, if one is open, is used as it stands."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self.connection = connection
        self._schema = schema

    def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Sequence[Row]:
        """See :meth:`Executor.fetch`."""
        cursor = self.connection.cursor(row_factory=namedtuple_row)
        cursor.execute(qualified(sql, self._schema), params or {})
        # Not by the cursor's description, which describes every column.
        return cursor.fetchall() if cursor.pgresult and cursor.pgresult.nfields else ()

    def atomic(self) -> AbstractContextManager[object]:
        """See :meth:`Executor.atomic`."""
        return self.connection.transaction()


class SqlalchemyExecutor:
    """On a SQLAlchemy connection, in its transaction (begun by SQLAlchemy if none is)."""

    def __init__(self, connection: SqlalchemyConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Sequence[Row]:
        """See :meth:`Executor.fetch`."""
        result = self._connection.exec_driver_sql(qualified(sql, self._schema), dict(params or {}))
        return result.fetchall() if result.returns_rows else ()

    def atomic(self) -> AbstractContextManager[object]:
        """See :meth:`Executor.atomic`."""
        return self._connection.begin_nested()


class CursorExecutor:
    """On anything else with DB-API cursors and ``%(name)s`` parameters: Django, psycopg 2."""

    def __init__(self, connection: Any, schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Sequence[Row]:
        """See :meth:`Executor.fetch`."""
        with self._connection.cursor() as cursor:
            cursor.execute(qualified(sql, self._schema), dict(params or {}))
            if not cursor.description:
                return ()
            row = namedtuple("row", [column[0] for column in cursor.description], rename=True)  # type: ignore[misc]  # columns known at run time only
            return [row(*values) for values in cursor.fetchall()]

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """See :meth:`Executor.atomic`."""
        begin, undo, end = (
            ("begin", "rollback", "commit") if self._autocommit()
            else (f"{word} celery_durable" for word in ("savepoint", "rollback to savepoint", "release savepoint"))
        )  # fmt: skip
        self.fetch(begin)
        try:
            yield
        except BaseException:
            self.fetch(undo)
            raise
        self.fetch(end)

    def _autocommit(self) -> bool:
        """Whether no transaction is open, as outside Django's ``atomic()``."""
        told = getattr(self._connection, "get_autocommit", None)
        return bool(told() if callable(told) else getattr(self._connection, "autocommit", False))


def place_of(connection: Any) -> str:
    """Which database a caller's connection leads to, for messages; it may stand in a transaction that has failed."""
    # From a Session, a Connection or Django's wrapper down to the driver's own.
    for _ in range(4):
        info: Any = getattr(connection, "info", None)
        if hasattr(info, "dbname"):
            return f"database {info.dbname!r} at {info.host}:{info.port}"
        connection = getattr(connection, "driver_connection", None) or getattr(connection, "connection", None)
        if callable(connection):
            connection = connection()
    return "its database"


def executor_for(connection: Any, schema: str) -> Executor:
    """Wrap a caller's connection.

    Arguments:
        connection: a SQLAlchemy Session, scoped_session or Connection, a psycopg
            connection, a Django database connection.
        schema: the schema that holds the tables.

    Raises:
        TypeError: for anything else, an async connection among them.
    """
    if isinstance(connection, psycopg.Connection):
        return PsycopgExecutor(connection, schema)
    if isinstance(connection, (Session, scoped_session)):
        connection = connection.connection()
    if isinstance(connection, SqlalchemyConnection):
        return SqlalchemyExecutor(connection, schema)
    if isinstance(connection, psycopg.AsyncConnection) or not callable(getattr(connection, "cursor", None)):
        raise TypeError(
            f"connection= takes a SQLAlchemy Session or Connection, a psycopg Connection or a Django "
            f"connection, not {type(connection).__name__}."
        )
    return CursorExecutor(connection, schema)
