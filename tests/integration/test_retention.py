"""What is forgotten, and when: finished timers, what they leave over, and what is kept for somebody."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, dead_letters
from celery_durable.store import history, runs
from celery_durable.store.database import Database
from tests.beats import Scripted, inline_beat, make_app, rows, states

NOW = timedelta(0)
LATER = timedelta(hours=1)
TABLES = ("call", "timer", "run", "outcome", "dead", "attempt", "held_result", "renewal", "occurrence")


@pytest.fixture
def local(database_url: str) -> Iterator[Celery]:
    """An app whose broker is a script, which forgets at once."""
    app = make_app(database_url, "memory://", durable_retention=0.2)
    yield app
    Database.of(app).close()


def left(app: Celery) -> dict[str, int]:
    """How many rows there are in the tables that have any."""
    sql = " union all ".join(f"select '{name}' as name, count(*) as n from {{schema}}.{name}" for name in TABLES)
    return {row.name: row.n for row in rows(app, sql) if row.n}


def bury(app: Celery, number: int) -> list[Any]:
    """So many dead letters."""
    made = apply_many("elsewhere.durable", [(NOW, (each,)) for each in range(number)], durable=True, app=app)
    with inline_beat(app, publisher=Scripted()) as beat:
        beat.until(lambda: states(app).get("dispatched") == number)
    rows(app, "update {schema}.run set state = 'running', token = 'x' where state = 'dispatched' returning id")
    for each in rows(app, "select id, fence from {schema}.run where token = 'x'"):
        failure = runs.Failure(error_type="E", error="e")
        Database.of(app).run(
            lambda executor, each=each, failure=failure: runs.bury(
                executor, each.id, each.fence, reason="failed", failure=failure
            )
        )
    return made


def test_dead_letters_are_kept_and_stand_in_nobodys_way(local: Celery) -> None:
    dead = bury(local, 3)
    apply_many("beating.plain", [(NOW, (each,)) for each in range(30)], app=local)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: left(local) == {"call": 3, "outcome": 3, "dead": 3, "attempt": 3})
        assert dead_letters.discard(dead[0].id, app=local)
        again = dead_letters.replay(dead[1].id, when=LATER, app=local)
        beat.until(lambda: left(local) == {"call": 2, "timer": 1, "outcome": 1, "dead": 1, "attempt": 1})
    assert again.state == "waiting" and dead[2].state == "dead"


def test_the_pruning_goes_on_from_where_it_was(local: Celery) -> None:
    """Letters that are kept are walked once, not at every sweep."""
    bury(local, 7)
    database = Database.of(local)

    def prune(position: history.Position) -> tuple[history.Position, bool]:
        return database.run(lambda executor: history.prune(executor, position, retention=0.001, page=3))

    position, seen = history.Position(), []
    for _ in range(4):
        position, more = prune(position)
        seen.append(more)
    assert seen == [True, True, False, False]
    assert left(local)["dead"] == 7


def test_what_came_after_a_timer_was_forgotten_is_forgotten_too(local: Celery) -> None:
    """A holder that was refused days later, a note of a missed occurrence, a value that was kept."""
    apply_at("beating.plain", NOW, app=local)
    rows(
        local,
        "insert into {schema}.attempt (timer_id, fence, attempt, ending) values (%(id)s, 1, 1, 'refused') returning id",
        id=uuid4(),
    )
    rows(
        local,
        "insert into {schema}.occurrence (schedule, nominal, reason) values ('s', now(), 'missed') returning nominal",
    )
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: left(local) == {})


def test_a_message_that_was_replaced_is_forgotten_at_once(local: Celery) -> None:
    """A key that is replaced again and again (debouncing) holds two messages: the first, for the key, and the last."""
    for number in range(20):
        timer = apply_at("beating.plain", LATER, (number,), key="k", on_conflict="replace", app=local)
    assert left(local) == {"call": 2, "timer": 1}
    timer.reschedule(NOW)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: left(local) == {})
