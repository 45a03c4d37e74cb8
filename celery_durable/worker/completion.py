"""The fenced end of a run inside the task's own transaction: its data and its completion commit together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy.engine import Connection as SqlalchemyConnection
from sqlalchemy.orm import Session, scoped_session

from celery_durable.errors import LeaseLost
from celery_durable.store.database import translated
from celery_durable.store.executor import Executor, executor_for
from celery_durable.worker.leased_run import LeasedRun
from celery_durable.worker.soft_limit import soft_limit_held


@dataclass
class Completion:
    """What the block of ``complete_in`` may say about its end."""

    result: Any = None
    """For a task with callbacks, a chain or a chord: what they get, should this worker die before they are sent.
    Return the same from the task."""


class Transaction(Protocol):
    """A transaction on one kind of connection."""

    def begin(self) -> None:
        """Begin it, or refuse where it is not ours to commit."""

    def check_open(self) -> None:
        """Refuse to go on where the block has ended it: what it did stands, or is gone, without the end of the run."""

    def executor(self) -> Executor:
        """What runs the last statement in it."""

    def commit(self) -> None:
        """Commit it."""

    def rollback(self) -> None:
        """Take it back."""


@contextmanager
def completing(run: LeasedRun | None, connection: Any, schema: str) -> Iterator[Completion]:
    """Commit `connection` at the end of the block, together with the end of the run.

    Arguments:
        run: the run; None where the task has none, and only the block's own work is committed.
        connection: a SQLAlchemy Session or Connection, a psycopg or a Django connection.
        schema: that holds the tables, in the same database.

    Raises:
        LeaseLost: the lease was lost: nothing was committed.
        UnserializableResult: the result that callbacks wait for cannot be serialized: nothing was committed.
        RuntimeError: the transaction is not ours to commit.
    """
    if run is not None and run.completed:
        raise RuntimeError("This run has been completed already: put all of its work into one complete_in block.")
    transaction = transaction_of(connection, schema)
    transaction.begin()
    completion = Completion()
    try:
        yield completion
    except BaseException:
        transaction.rollback()
        raise
    # A soft time limit in the middle of a commit would leave nobody to tell what became of it.
    with soft_limit_held(discard=True):
        if run is None:
            transaction.commit()
            return
        try:
            transaction.check_open()
            ended = run.ending_with(completion.result)
            with translated():
                ours = ended.last_statement(transaction.executor())
        except BaseException:
            transaction.rollback()
            raise
        if not ours:
            transaction.rollback()
            raise LeaseLost(
                f"The lease of {run.task.name}[{run.lease.timer_id}], fence {run.lease.fence}, is no longer ours: "
                "nothing was committed."
            )
        try:
            transaction.commit()
        except BaseException:
            # Refused, never sent, or committed with the answer lost: the run's row tells, once nothing of ours locks it.
            with suppress(Exception):
                transaction.rollback()
            if not ended.stands():
                raise
        ended.settle(completion.result)


def transaction_of(connection: Any, schema: str) -> Transaction:
    """The transaction of a connection.

    Raises:
        TypeError: it is no connection of a kind that is known.
    """
    if isinstance(connection, psycopg.Connection):
        return _Psycopg(connection, schema)
    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, (Session, SqlalchemyConnection)):
        return _Sqlalchemy(connection, schema)
    if hasattr(connection, "in_atomic_block"):
        return _Django(connection, schema)
    raise TypeError(
        "complete_in takes a SQLAlchemy Session or Connection, a psycopg Connection or a Django connection, "
        f"not {type(connection).__name__}."
    )


_NOT_OURS = (
    "complete_in commits the transaction itself, but {what} that somebody else commits. "
    "Use it instead of that, around the whole of the work."
)


_ENDED = (
    "The block of complete_in has committed or rolled back its transaction itself, so its work and the end of the run "
    "are not one. Leave that to complete_in."
)


class _Psycopg:
    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection, self._schema = connection, schema

    def begin(self) -> None:
        # A transaction() block forbids commit and rollback, and nothing tells it from a transaction begun by a query.
        if self._connection.info.transaction_status != TransactionStatus.IDLE:
            raise RuntimeError(_NOT_OURS.format(what="the connection has one open"))
        if self._connection.autocommit:
            self._connection.execute("begin")

    def check_open(self) -> None:
        if self._connection.autocommit and self._connection.info.transaction_status == TransactionStatus.IDLE:
            raise RuntimeError(_ENDED)

    def executor(self) -> Executor:
        return executor_for(self._connection, self._schema)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        if not self._connection.closed:
            self._connection.rollback()


class _Sqlalchemy:
    def __init__(self, connection: Any, schema: str) -> None:
        self._connection, self._schema = connection, schema
        self._begun: Any = None

    def begin(self) -> None:
        if self._connection.in_nested_transaction():
            raise RuntimeError(_NOT_OURS.format(what="there is a savepoint in a transaction"))
        if isinstance(self._connection, Session):
            bind = self._connection.get_bind()
            if isinstance(bind, SqlalchemyConnection) and bind.in_transaction():
                raise RuntimeError(_NOT_OURS.format(what="the session has joined one of its connection"))
        if not self._connection.in_transaction():
            self._connection.begin()
        connection = self._connection.connection() if isinstance(self._connection, Session) else self._connection
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            self._connection.rollback()
            raise RuntimeError(
                "complete_in needs a transaction, but this engine is in AUTOCOMMIT: choose another level."
            )
        self._begun = self._connection.get_transaction()

    def check_open(self) -> None:
        if self._connection.get_transaction() is not self._begun:
            raise RuntimeError(_ENDED)

    def executor(self) -> Executor:
        if not isinstance(self._connection, SqlalchemyConnection):
            self._connection.flush()
        return executor_for(self._connection, self._schema)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class _Django:
    def __init__(self, connection: Any, schema: str) -> None:
        self._connection, self._schema = connection, schema
        self._atomic: Any = None

    def begin(self) -> None:
        from django.db.transaction import Atomic

        if self._connection.in_atomic_block:
            raise RuntimeError(_NOT_OURS.format(what="the connection is in an atomic() block"))
        self._atomic = Atomic(self._connection.alias, savepoint=True, durable=True)
        self._atomic.__enter__()

    def check_open(self) -> None:
        """Django itself refuses a commit inside."""

    def executor(self) -> Executor:
        return executor_for(self._connection, self._schema)

    def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        error = RuntimeError("rolled back")
        self._atomic.__exit__(type(error), error, None)
