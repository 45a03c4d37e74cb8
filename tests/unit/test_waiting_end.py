"""Late ends in one process: what waits is stored by somebody, whoever else has tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_durable.store import leases, runs
from celery_durable.worker import late_ends
from celery_durable.worker.late_ends import LateEnds
from tests.servers.waiting import eventually


class Answering:
    """An executor whose every statement finds its row."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Any:
        self.said.append(sql)
        return [SimpleNamespace(id=None, ended=uuid4(), reason="duplicate")]

    def run(self, operation: Callable[[Any], Any], *, bounded: bool) -> Any:
        """As a database does."""
        return operation(self)


def a_run(database: Any) -> Any:
    database.settings = SimpleNamespace(lease=1.0)
    return SimpleNamespace(
        lease=SimpleNamespace(timer_id=uuid4(), fence=1), delivery=SimpleNamespace(token="1-b"), database=database,
        confirmed=lambda executor, done, ending: done,
    )  # fmt: skip


WANTED = leases.Wanted(
    timer_id=uuid4(), call_id=uuid4(), token="1-a", worker="w", seconds=30, max_attempts=3, base=1, cap=60
)  # fmt: skip


def test_an_end_is_stored_alone_when_no_lease_follows() -> None:
    database, ends = Answering(), LateEnds()
    ends.add(a_run(database))
    eventually(lambda: database.said == [runs.FINISH])


def test_an_end_that_was_given_back_after_the_thread_had_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread saw nothing wait, because a lease had taken the end along; the lease failed."""
    monkeypatch.setattr(late_ends, "DELAY", 0.5)  # the lease comes before the thread
    database, ends = Answering(), LateEnds()

    class Refusing:
        def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Any:
            assert sql == leases.FINISH_AND_LEASE
            eventually(lambda: not ends._some.is_set(), message="the thread has looked")
            raise psycopg.OperationalError("refused")

    ends.add(a_run(database))
    with pytest.raises(psycopg.OperationalError):
        ends.lease(Refusing(), WANTED)  # type: ignore[arg-type]  # it has what is needed
    eventually(lambda: database.said == [runs.FINISH])
