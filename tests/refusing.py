"""A Postgres that answers a worker and refuses: what tests of it share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
import pytest

from tests.servers.waiting import eventually
from tests.workers import Bench

READ_ONLY = "default_transaction_read_only"


@contextmanager
def session(bench: Bench) -> Iterator[psycopg.Connection[Any]]:
    """The administrator's, in autocommit."""
    with psycopg.connect(bench.env["CELERY_DURABLE_DATABASE_URL"].replace("+psycopg", ""), autocommit=True) as own:
        own.execute(f"set {READ_ONLY} = off")
        yield own


def alter(bench: Bench, setting: str) -> None:
    """Change a default of the database for everybody: the sessions of before are ended."""
    with session(bench) as own:
        own.execute(f"alter database {own.info.dbname} {setting}")
        own.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


@pytest.fixture
def only_reads(bench: Bench) -> Iterator[Callable[[bool], None]]:
    """Makes the database read-only, as a primary that was demoted is, and writable again."""

    def switch(on: bool) -> None:
        alter(bench, f"set {READ_ONLY} = on" if on else f"reset {READ_ONLY}")

    yield switch
    switch(False)


def until_kept(bench: Bench, since: datetime) -> None:
    """Wait until a lease of 3 s is renewed beyond 9 s: without its renewals it would be over."""
    eventually(
        lambda: bench.rows("select 1 as one from {schema}.renewal where until > %(then)s + interval '9 s'", then=since),
        timeout=30, message="three leases long",
    )  # fmt: skip
