"""The answer to a statement that has committed may be lost, and the whole operation is then run again: no harm is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, cancel, dead_letters, reschedule, schedules
from celery_durable.errors import InvalidTimer
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from tests.beats import Scripted, inline_beat, make_app, rows, states

NOW = timedelta(0)
LATER = timedelta(hours=1)


@pytest.fixture
def local(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app with one timer that holds the key ``old``, and each operation of it committed twice."""
    app = make_app(database_url, "memory://")
    apply_at("beating.plain", LATER, ("old",), key="old", app=app)
    once = Database.run

    def twice(self: Database, operation: Callable[[Executor], Any]) -> Any:
        once(self, operation)
        return once(self, operation)

    monkeypatch.setattr(Database, "run", twice)
    yield app
    monkeypatch.undo()
    Database.of(app).close()


def number(app: Celery) -> int:
    """How many timers there are."""
    return sum(states(app).values())


@pytest.mark.parametrize("key", [None, "new"])
@pytest.mark.parametrize("on_conflict", ["keep", "replace", "error"])
def test_apply_at(local: Celery, key: str | None, on_conflict: Any) -> None:
    timer = apply_at("beating.plain", LATER, key=key, on_conflict=on_conflict, app=local)
    assert timer.created and timer.state == "waiting"
    assert number(local) == 2


def test_replace(local: Celery) -> None:
    timer = apply_at("beating.plain", 60, ("new",), key="old", on_conflict="replace", app=local)
    assert not timer.created and number(local) == 1
    [row] = rows(local, "select c.body from {schema}.timer t join {schema}.call c on c.id = t.call_id")
    assert b'"new"' in bytes(row.body)


def test_apply_many(local: Celery) -> None:
    made = apply_many("beating.plain", [(LATER, (each,), {}, f"key {each}") for each in range(5)], app=local)
    assert all(each.created for each in made) and number(local) == 6


def test_cancel_and_reschedule(local: Celery) -> None:
    assert reschedule(key="old", when=60, app=local) == "rescheduled"
    assert cancel(key="old", app=local) == "cancelled"


def test_schedules(local: Celery) -> None:
    schedules.upsert("s", task="beating.plain", when=LATER, app=local)
    timer = schedules.trigger("s", app=local)
    assert timer.state == "waiting" and number(local) == 2


def test_replay(local: Celery) -> None:
    """C94: a dead letter is replayed once, also where the first answer was lost."""
    rows(local, "update {schema}.call set properties = '[]' where true returning id")
    rows(local, "update {schema}.timer set wake_at = {schema}.clock() returning id")
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: states(local) == {"dead": 1})
    [dead] = dead_letters.find_all(app=local)
    with pytest.raises(InvalidTimer, match="properties"):
        dead_letters.replay(dead.id, app=local)
    rows(local, "update {schema}.call set properties = '{}' where true returning id")
    timer = dead_letters.replay(dead.id, when=LATER, app=local)
    assert timer.state == "waiting" and number(local) == 2
    [letter] = dead_letters.find_all(replayed=True, app=local)
    assert letter.replayed_as == timer.id
