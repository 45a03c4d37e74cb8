"""What tests of beats share: reading what was published, moving the database's clock, a beat without a process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from celery import Celery
from kombu import Connection, Queue

from celery_durable.beat.loop import Loop
from celery_durable.messages.delivery import BrokerUnavailable, Delivery, Outcome, Outgoing
from celery_durable.messages.publishers import Publisher, publisher_for
from celery_durable.store import migrations
from celery_durable.store.database import Database
from tests.servers.waiting import eventually


class Scripted:
    """A publisher that answers as told, and confirms when nothing is left to tell."""

    def __init__(self, *answers: Outcome | BrokerUnavailable | Callable[[], None]) -> None:
        self._answers = list(answers)
        self.pages: list[list[UUID]] = []

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        self.pages.append([UUID(str(each.timer_id)) for each in outgoing])
        answer = self._answers.pop(0) if self._answers else Outcome.CONFIRMED
        if isinstance(answer, BrokerUnavailable):
            raise answer
        if not isinstance(answer, Outcome):
            answer()
            answer = Outcome.CONFIRMED
        return [Delivery(each.timer_id, answer, "as told") for each in outgoing]

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Published:
    """Takes messages out of a queue and keeps them."""

    def __init__(self, url: str, queue: str = "celery") -> None:
        self.messages: list[Any] = []
        #: Of the queue, should it have any.
        self.arguments: dict[str, Any] | None = None
        self._url = url
        self._queue = queue

    def collect(self) -> int:
        """Take what is there; returns how many were taken so far."""
        with Connection(self._url) as connection:
            # As Celery declares it, so that a beat and a test may come in any order.
            queue = Queue(self._queue, exchange=self._queue, routing_key=self._queue, queue_arguments=self.arguments)(
                connection.channel()
            )
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                self.messages.append(message)
        return len(self.messages)

    def until(self, number: int, timeout: float = 30.0) -> None:
        """Wait until at least so many have been published."""
        eventually(lambda: self.collect() >= number, timeout=timeout, message=f"{number} published", every=0.1)

    @property
    def headers(self) -> list[dict[str, Any]]:
        """The headers of all."""
        return [each.headers for each in self.messages]

    @property
    def ids(self) -> Counter[str]:
        """How often each timer was published."""
        return Counter(each["durable_timer"] for each in self.headers)

    @property
    def nominals(self) -> list[tuple[str, str]]:
        """Schedule and nominal time of each occurrence, in the order of publishing."""
        return [(each["durable_schedule"], each["durable_nominal"]) for each in self.headers]


def make_app(database_url: str, broker_url: str, **settings: Any) -> Celery:
    """An app of this process with a migrated database."""
    app = Celery("beating", broker=broker_url, set_as_current=False)
    fast: dict[str, Any] = {
        "durable_claim_timeout": 2, "durable_publish_timeout": 1, "durable_sweep_interval": 0.1,
        "durable_poll_interval": 0.2, "result_expires": None,
    }  # fmt: skip
    app.conf.update({"durable_database_url": database_url, **fast, **settings})

    @app.task(name="beating.plain", shared=False)
    def plain(number: int = 0) -> int:
        return number

    app.finalize()
    migrate(app)
    return app


def migrate(app: Celery) -> None:
    """Make the schema."""
    migrations.upgrade(Database.of(app), app_name=app.main)


def rows(app: Celery, sql: str, **parameters: object) -> list[Any]:
    """Run a statement on the app's database; ``{schema}`` stands for its schema."""
    return list(Database.of(app).run(lambda executor: executor.fetch(sql, parameters)))


def states(app: Celery) -> dict[str, int]:
    """How many timers stand in which state."""
    counted = rows(
        app,
        """select state, count(*) as n from (select 'waiting' as state from {schema}.timer
           union all select state from {schema}.run union all select state from {schema}.outcome) s group by state""",
    )
    return {each.state: each.n for each in counted}


def set_clock(app: Celery, instant: datetime | None) -> None:
    """Freeze the database's clock at an instant, or let it go again."""
    body = "pg_catalog.clock_timestamp()" if instant is None else f"timestamptz ''{instant.isoformat()}''"
    rows(
        app,
        f"create or replace function {{schema}}.clock() returns timestamptz language sql stable parallel safe "
        f"as 'select {body}'",
    )


class InlineBeat:
    """The loop of a beat, turned by the test."""

    def __init__(
        self, app: Celery, entries: Mapping[str, Any] | None = None, publisher: Publisher | None = None
    ) -> None:
        self.app = app
        self.loop = Loop(app, publisher or publisher_for(app, timeout=1.0), lambda: entries or {})

    def turn(self, times: int = 1) -> None:
        """So many turns, without long sleeps; schedules are looked at in each."""
        for _ in range(times):
            self.loop.look_again()
            self.loop.turn(0.01)

    def until(self, condition: Any, timeout: float = 10.0) -> None:
        """Turn until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "not within the time"
            self.turn()

    def at(self, instant: datetime) -> None:
        """Freeze the database's clock there, and do what is due."""
        set_clock(self.app, instant)
        self.turn(2)


#: Begins a beat at an instant, with the program's entries.
Start = Callable[..., InlineBeat]


def entry(when: Any, **rest: Any) -> dict[str, Any]:
    """An entry of ``beat_schedule``."""
    return {"task": "beating.plain", "schedule": when, **rest}


def nominals(published: Published) -> list[str]:
    """The nominal times published so far."""
    published.collect()
    return [at for _, at in published.nominals]


@contextmanager
def inline_beat(
    app: Celery, entries: Mapping[str, Any] | None = None, publisher: Publisher | None = None
) -> Iterator[InlineBeat]:
    """A beat in this process, closed afterwards."""
    beat = InlineBeat(app, entries, publisher)
    try:
        yield beat
    finally:
        beat.loop.close()


def utc(text: str) -> datetime:
    """An instant from ISO text, in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
