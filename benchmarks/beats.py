"""The beats that `schedules` compares: how each is filled with entries, started, and known to be ready."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.schedules import crontab

from benchmarks.app import make_app
from benchmarks.ready import READY
from benchmarks.servers import environment
from celery_durable.store.database import Database
from tests.servers.brokers import ValkeyServer
from tests.servers.processes import CeleryNode

TASK = "bench.plain"


class Beat:
    """One kind of beat.

    Arguments:
        database: of the private PostgreSQL.
        valkey: the broker.
    """

    module = ""
    scheduler = ""

    def __init__(self, database: Database, valkey: ValkeyServer) -> None:
        self.database = database
        self.valkey = valkey

    def clear(self) -> None:
        """Forget all entries of earlier runs."""

    def fill(self, number: int, first: int, at: datetime | None) -> None:
        """Make entries whose one argument is their number.

        Arguments:
            number: how many.
            first: the number of the first.
            at: the full minute of the day at which they are due daily; None: once a year, at its beginning.
        """
        raise NotImplementedError

    def node(self) -> CeleryNode:
        """Its process, not started; it logs what a beat logs without options."""
        arguments = ("beat", "-S", self.scheduler, "-l", "WARNING", "--pidfile=")
        return CeleryNode(self.module, arguments, environment(self.database, self.valkey))

    def ready(self, node: CeleryNode) -> bool:
        """Whether it has read what it reads at its start, and waits."""
        return READY in node.logs()


class Durable(Beat):
    """Ours."""

    module = "benchmarks.app"
    scheduler = "durable"

    # Whole tables, for the next run to begin as the first.
    CLEAR = """truncate {schema}.schedule, {schema}.occurrence, {schema}.call, {schema}.timer, {schema}.run,
        {schema}.outcome, {schema}.beat"""
    # With an edition, as the product writes them: without one all would be due now, to be computed.
    FILL = """
    insert into {schema}.schedule (name, task, kind, text, tz, args, next_at, edition)
    select 'entry ' || n, %(task)s::text, 'cron', %(text)s::text, 'UTC', json_build_array(n), %(at)s::timestamptz, 1
    from generate_series(%(first)s::integer, %(last)s::integer) n
    """
    LISTENING = """select count(*) as n from pg_stat_activity
        where datname = current_database() and application_name = 'celery-durable beat, listening'"""

    def clear(self) -> None:
        """Forget all entries and their timers."""
        self.database.run(lambda executor: executor.fetch(self.CLEAR))

    def fill(self, number: int, first: int, at: datetime | None) -> None:
        """One statement."""
        text = "0 0 1 1 *" if at is None else f"{at.minute} {at.hour} * * *"
        when = at or datetime(datetime.now(timezone.utc).year + 1, 1, 1, tzinfo=timezone.utc)
        parameters = {"task": TASK, "text": text, "at": when, "first": first, "last": first + number - 1}
        self.database.run(lambda executor: executor.fetch(self.FILL, parameters))
        self.database.run(lambda executor: executor.fetch("vacuum analyze {schema}.schedule"))

    def ready(self, node: CeleryNode) -> bool:
        """It listens from its first sleep on, which is after its first round."""
        return bool(self.database.run(lambda executor: executor.fetch(self.LISTENING))[0].n)


class RedBeat(Beat):
    """celery-redbeat; its entries are in the broker's Valkey."""

    module = "benchmarks.redbeat_app"
    scheduler = "benchmarks.redbeat_app:Scheduler"

    def fill(self, number: int, first: int, at: datetime | None) -> None:
        """By its own API."""
        from redbeat import RedBeatSchedulerEntry

        app = make_app(self.valkey.url, redbeat_redis_url=self.valkey.url)
        schedule = crontab(**_fields(at), app=app)
        for each in range(first, first + number):
            RedBeatSchedulerEntry(f"entry {each}", TASK, schedule, args=[each], app=app).save()


class SQLAlchemyBeat(Beat):
    """sqlalchemy-celery-beat; its entries are in the same PostgreSQL, in a schema of its own."""

    module = "benchmarks.sqlalchemy_app"
    scheduler = "benchmarks.sqlalchemy_app:Scheduler"

    SCHEMA = "peer"

    def clear(self) -> None:
        """Forget all entries of earlier runs."""
        self.database.run(lambda executor: executor.fetch(f"drop schema if exists {self.SCHEMA} cascade"))

    def fill(self, number: int, first: int, at: datetime | None) -> None:
        """Into its tables at once: its API needs four statements for each."""
        from sqlalchemy import insert
        from sqlalchemy_celery_beat.models import CrontabSchedule, PeriodicTask
        from sqlalchemy_celery_beat.session import SessionManager

        manager = SessionManager()
        url = self.database.url.render_as_string(hide_password=False)
        engine, _ = manager.create_session(url, schema=self.SCHEMA)
        manager.prepare_models(engine, schema=self.SCHEMA)
        with engine.begin() as connection:
            fields = {name: str(value) for name, value in _fields(at).items()}
            crontabs = CrontabSchedule.__table__
            schedule = connection.execute(insert(crontabs).values(**fields).returning(crontabs.c.id)).scalar_one()
            connection.execute(
                insert(PeriodicTask.__table__),
                [
                    {"name": f"entry {each}", "task": TASK, "args": f"[{each}]", "schedule_id": schedule,
                     "discriminator": "crontabschedule"}
                    for each in range(first, first + number)
                ],
            )  # fmt: skip
        engine.dispose()


def _fields(at: datetime | None) -> Mapping[str, Any]:
    if at is None:
        return {"minute": 0, "hour": 0, "day_of_month": 1, "month_of_year": 1}
    return {"minute": at.minute, "hour": at.hour}


def full_minute(after: float) -> datetime:
    """The first full minute at or after an instant, in epoch seconds."""
    return datetime.fromtimestamp(math.ceil(after / 60) * 60, timezone.utc)
