"""An app whose bodies change an account in the transaction that ends their run, on every kind of connection."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from celery_durable import DurableTask

URL = os.environ.get("CELERY_DURABLE_DATABASE_URL", "")
DSN = URL.replace("+psycopg", "")

app = Celery("ledger", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BACKEND"))
app.conf.update(
    beat_scheduler="durable",
    task_default_queue="ledger",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    durable_lease=3,
    durable_heartbeat=1,
    durable_claim_timeout=2,
    durable_publish_timeout=1,
    durable_sweep_interval=0.3,
    durable_poll_interval=1,
    durable_redispatch_after=2,
    durable_redispatch_max=4,
)

TABLES = """
create table if not exists account (id int primary key, balance int not null);
create table if not exists entry (account int, timer_id uuid, attempt int);
"""
#: One to a statement: drivers differ in what they make of several.
STEPS = (
    "update account set balance = balance + 1 where id = %s",
    "insert into entry (account, timer_id, attempt) values (%s, '{timer}', {attempt})",
)
OPTIONS = {
    "base": DurableTask, "bind": True, "shared": False, "max_retries": None, "retry_backoff": 0.1, "retry_backoff_max": 1,
}  # fmt: skip


def engine_for(isolation: str) -> Any:
    """An engine without a pool: each body is a client of its own."""
    return create_engine(URL, isolation_level=isolation, poolclass=NullPool)


def steps(task: Any, account: int) -> list[str]:
    """The statements of one body."""
    durable = task.durable
    return [each.replace("%s", str(account)).format(timer=durable.timer_id, attempt=durable.attempt) for each in STEPS]


@app.task(**OPTIONS, name="ledger.session")
def in_session(self: Any, account: int, isolation: str = "READ COMMITTED") -> int:
    """With SQLAlchemy's ORM."""
    with Session(engine_for(isolation)) as session, self.complete_in(session):
        for each in steps(self, account):
            session.execute(text(each))
    return account


@app.task(**OPTIONS, name="ledger.connection")
def in_connection(self: Any, account: int, isolation: str = "READ COMMITTED") -> int:
    """With SQLAlchemy's core."""
    with engine_for(isolation).connect() as connection, self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(text(each))
    return account


@app.task(**OPTIONS, name="ledger.psycopg")
def in_psycopg(self: Any, account: int, isolation: str = "READ COMMITTED", autocommit: bool = False) -> int:
    """With psycopg."""
    with psycopg.connect(DSN, autocommit=autocommit) as connection:
        connection.isolation_level = getattr(psycopg.IsolationLevel, isolation.replace(" ", "_"))
        with self.complete_in(connection):
            for each in steps(self, account):
                connection.execute(each)
    return account


@app.task(**OPTIONS, name="ledger.django")
def in_django(self: Any, account: int) -> int:
    """With Django's own connection."""
    import django
    from django.conf import settings
    from django.db import connection

    if not settings.configured:
        parts = psycopg.conninfo.conninfo_to_dict(DSN)
        settings.configure(
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.postgresql", "NAME": parts["dbname"], "USER": parts["user"],
                    "PASSWORD": parts.get("password", ""), "HOST": parts["host"], "PORT": parts["port"],
                }
            },
            USE_TZ=True,
        )  # fmt: skip
        django.setup()
    with self.complete_in(connection), connection.cursor() as cursor:
        for each in steps(self, account):
            cursor.execute(each)
    connection.close()
    return account


@app.task(**OPTIONS, name="ledger.late")
def late(self: Any, account: int, go: str) -> int:
    """Holds its transaction open until it is told to go on."""
    with psycopg.connect(DSN) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        with self.complete_in(connection):
            for each in steps(self, account):
                connection.execute(each)
            Path(go + ".in").touch()
            from tests.apps.working import wait_for

            wait_for(go)
    return account


@app.task(**{**OPTIONS, "max_retries": 0}, name="ledger.failing")
def failing(self: Any, account: int) -> None:
    """Raises at the end of its work."""
    with psycopg.connect(DSN) as connection, self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(each)
        raise ValueError("no")


class Swallowed(psycopg.Connection[Any]):
    """A connection whose server gets the COMMIT, and whose client never hears of it."""

    def commit(self) -> None:
        """Commit, and lose the answer."""
        super().commit()
        self.close()
        raise psycopg.OperationalError("the connection was cut")


@app.task(**OPTIONS, name="ledger.swallowed")
def swallowed(self: Any, account: int) -> int:
    """The answer to COMMIT is lost."""
    connection = Swallowed.connect(DSN)
    with self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(each)
    return account


class Refused(psycopg.Connection[Any]):
    """A connection that breaks before its COMMIT is sent."""

    def commit(self) -> None:
        """Break."""
        self.close()
        raise psycopg.OperationalError("the connection was cut")


@app.task(**OPTIONS, name="ledger.refused")
def refused(self: Any, account: int) -> int:
    """COMMIT is not sent in the first attempt."""
    connection = (Refused if self.durable.attempt == 1 else psycopg.Connection[Any]).connect(DSN)
    with self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(each)
    return account


class Unsent(psycopg.Connection[Any]):
    """A connection whose COMMIT is never sent, and whose transaction stays open."""

    def commit(self) -> None:
        """Raise before anything is sent, as a signal's handler may."""
        raise KeyError("interrupted")


@app.task(**OPTIONS, name="ledger.unsent")
def unsent(self: Any, account: int) -> int:
    """COMMIT is interrupted before it is sent in the first attempt."""
    connection = (Unsent if self.durable.attempt == 1 else psycopg.Connection[Any]).connect(DSN)
    with self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(each)
    return account


@app.task(**{**OPTIONS, "max_retries": 0}, name="ledger.shapeless")
def shapeless(self: Any, account: int) -> None:
    """With a result that nobody can send."""
    with psycopg.connect(DSN) as connection, self.complete_in(connection) as completion:
        for each in steps(self, account):
            connection.execute(each)
        completion.result = object()


@app.task(**OPTIONS, name="ledger.wavering")
def wavering(self: Any, account: int) -> int:
    """Asks for a retry, and completes all the same."""
    with psycopg.connect(DSN) as connection, self.complete_in(connection):
        for each in steps(self, account):
            connection.execute(each)
        self.retry(countdown=0, throw=False)
    return account


@app.task(**OPTIONS, name="ledger.twice")
def twice(self: Any, account: int, result: int) -> int:
    """Completes, and means to do so again."""
    for _ in range(2):
        with psycopg.connect(DSN) as connection, self.complete_in(connection) as completion:
            for each in steps(self, account):
                connection.execute(each)
            completion.result = result
    return result


@app.task(**OPTIONS, name="ledger.raising")
def raising(self: Any, account: int, result: int) -> int:
    """Raises when all is done."""
    with psycopg.connect(DSN) as connection, self.complete_in(connection) as completion:
        for each in steps(self, account):
            connection.execute(each)
        completion.result = result
    raise ValueError("too late")


@app.task(**OPTIONS, name="ledger.scoped")
def scoped(self: Any, account: int) -> int:
    """With SQLAlchemy's session of a thread."""
    session = scoped_session(sessionmaker(engine_for("READ COMMITTED")))
    with self.complete_in(session):
        for each in steps(self, account):
            session.execute(text(each))
    session.remove()
    return account


@app.task(**{**OPTIONS, "max_retries": 0}, name="ledger.hasty")
def hasty(self: Any, account: int, how: str) -> None:
    """Commits by itself."""
    if how == "session":
        with Session(engine_for("READ COMMITTED")) as session, self.complete_in(session):
            session.execute(text(steps(self, account)[0]))
            session.commit()
    else:
        with psycopg.connect(DSN, autocommit=True) as connection, self.complete_in(connection):
            connection.execute(steps(self, account)[0])
            connection.commit()


@app.task(**OPTIONS, name="ledger.chained")
def chained(self: Any, account: int) -> int:
    """With a result for what follows."""
    with psycopg.connect(DSN) as connection, self.complete_in(connection) as completion:
        for each in steps(self, account):
            connection.execute(each)
        completion.result = account + 1000
    return account + 1000
