"""What a beat says about its work."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from celery import Celery

from celery_durable import apply_at
from celery_durable.beat import sweeps
from celery_durable.store.database import Database
from tests.beats import Scripted, inline_beat, make_app, states

NOW = timedelta(0)


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    app = make_app(database_url, "memory://")
    yield app
    app.close()
    Database.of(app).close()


def test_it_says_how_many_it_has_dispatched_but_not_at_every_look(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "ALIVE", 0.0)
    caplog.set_level(logging.DEBUG, "celery_durable.beat")

    def told() -> list[int]:
        found = (re.fullmatch(r"Dispatched (\d+) timers[.]", each.getMessage()) for each in caplog.records)
        return [int(each[1]) for each in found if each]

    with inline_beat(app, publisher=Scripted()) as beat:
        beat.turn(3)
        assert told() == [], "nothing was due"
        ids = [str(apply_at("beating.plain", NOW, app=app).id) for _ in range(3)]
        beat.until(lambda: states(app) == {"sent": 3})
        beat.until(lambda: sum(told()) == 3)
        for number in range(5):
            apply_at("beating.plain", NOW, app=app)
            beat.until(lambda number=number: states(app) == {"sent": 4 + number})  # type: ignore[misc]  # bound now
        beat.turn(3)
        assert len(told()) == 1, "one line a minute at most"
        monkeypatch.setattr(sweeps, "QUIET", 0.0)
        beat.turn()
        assert told() == [3, 5]
    sent = [each.getMessage() for each in caplog.records if each.levelno == logging.DEBUG]
    for timer_id in ids:
        assert f"beating.plain sent. id->{timer_id}" in sent
