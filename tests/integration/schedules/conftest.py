"""A beat whose database clock is in the test's hand, and what it publishes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from celery import Celery

from celery_durable.store.database import Database
from tests.beats import InlineBeat, Published, Start, inline_beat, make_app, set_clock
from tests.servers.brokers import ValkeyServer


@pytest.fixture
def app(database_url: str, valkey: ValkeyServer) -> Iterator[Celery]:
    valkey.client().flushall()
    app = make_app(database_url, valkey.url, timezone="Europe/Berlin")
    app.set_current()
    yield app
    app.close()
    Database.of(app).close()


@pytest.fixture
def published(valkey: ValkeyServer) -> Published:
    return Published(valkey.url)


@pytest.fixture
def start(app: Celery) -> Iterator[Start]:
    """Begin a beat at an instant, with entries of code."""
    beats = []

    def begin(at: datetime | None = None, **entries: Any) -> InlineBeat:
        if at is not None:
            set_clock(app, at)
        beat = inline_beat(app, entries)
        beats.append(beat)
        inline = beat.__enter__()
        inline.turn()
        return inline

    yield begin
    for each in beats:
        each.__exit__(None, None, None)
