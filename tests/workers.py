"""What tests of workers share: one setup of database, broker, beat and worker, and what ran there."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from celery import Celery

from celery_durable.messages.delivery import Outgoing
from celery_durable.messages.message import Message
from celery_durable.messages.publishers import publisher_for
from celery_durable.store import history, migrations, timers
from celery_durable.store.database import Database
from celery_durable.timer import Timer
from tests.apps import working
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestBeat, CeleryTestWorker
from tests.servers.waiting import eventually

MODULE = "tests.apps.working"


class Bench:
    """One setup; this process is the application, with the same app as the workers."""

    def __init__(self, database_url: str, broker_url: str, backend_url: str, folder: Path) -> None:
        self.env = {
            "CELERY_DURABLE_DATABASE_URL": database_url, "TEST_BROKER": broker_url, "TEST_BACKEND": backend_url,
        }  # fmt: skip
        self.folder = folder
        # This process is the application. A fresh copy of the module: an app keeps what it has connected to.
        with patch.dict("os.environ", self.env):
            self.app: Celery = runpy.run_path(working.__file__, run_name=MODULE)["app"]
        self.app.conf.durable_database_url = database_url
        self.app.finalize()
        self.database = Database.of(self.app)
        migrations.upgrade(self.database, app_name=self.app.main)
        self.rows(working.TABLE)
        self.workers: list[CeleryTestWorker] = []
        self.beats: list[CeleryTestBeat] = []

    def task(self, name: str) -> Any:
        """A task of the app."""
        return self.app.tasks[f"working.{name}"]

    def rows(self, sql: str, **parameters: object) -> list[Any]:
        """Run a statement; ``{schema}`` stands for the schema."""
        return list(self.database.run(lambda executor: executor.fetch(sql, parameters)))

    def worker(self, *arguments: str, concurrency: int = 2, **env: str) -> CeleryTestWorker:
        """Start another worker, a prefork one unless told otherwise."""
        node = CeleryTestWorker(MODULE, *arguments, env={**self.env, **env}, concurrency=concurrency)
        self.workers.append(node)
        node.start()
        return node

    def beat(self, **env: str) -> CeleryTestBeat:
        """Start another beat."""
        node = CeleryTestBeat(MODULE, env={**self.env, **env})
        self.beats.append(node)
        node.start()
        return node

    def file(self, name: str) -> str:
        """A path that no file has yet."""
        return str(self.folder / name)

    def let_go(self, name: str) -> None:
        """Make the file that a body waits for."""
        (self.folder / name).touch()

    def bodies(self, name: str) -> list[Any]:
        """The bodies of this name, in order."""
        return self.rows("select * from body where name = %(name)s order by at", name=name)

    def until_begun(self, name: str, number: int = 1, timeout: float = 30.0) -> list[Any]:
        """Wait until so many bodies of this name have begun."""
        eventually(lambda: len(self.bodies(name)) >= number, timeout=timeout, message=f"{number} bodies of {name}")
        return self.bodies(name)

    def until(self, timer: Timer, state: str, timeout: float = 30.0) -> timers.Found:
        """Wait until a timer stands in a state."""

        def there() -> bool:
            assert timer.state == state, timer.details
            return True

        eventually(there, timeout=timeout, message=f"{timer} is {state}")
        details = timer.details
        assert details is not None
        return details

    def attempts(self, timer: Timer) -> list[Any]:
        """The recorded ends of its attempts, oldest first."""
        found = self.database.run(lambda executor: history.attempts(executor, timer.id))
        return sorted(found, key=lambda row: row.ended_at)

    def publish_again(self, timer: Timer, times: int) -> None:
        """Publish a timer's stored message again, as a broker or a re-dispatch would."""
        [row] = self.rows(
            "select c.* from {schema}.call c where c.timer_id = %(id)s::uuid order by created_at desc limit 1",
            id=str(timer.id),
        )
        message = Message(
            body=bytes(row.body), content_type=row.content_type, content_encoding=row.content_encoding, headers=row.headers,
            properties=row.properties, exchange=row.exchange, routing_key=row.routing_key, queue=row.queue,
        )  # fmt: skip
        publisher = publisher_for(self.app, timeout=5)
        try:
            publisher.publish([Outgoing(timer.id, message)] * times)
        finally:
            publisher.close()

    def messages(self) -> int:
        """Messages in the queue or with a worker (Valkey only)."""
        with self.app.connection_for_read() as connection:
            client = connection.default_channel.client
            return int(client.llen("working")) + int(client.hlen("unacked"))

    def close(self) -> None:
        """End everything that was started here."""
        for node in (*self.beats, *self.workers):
            node.teardown()
        self.database.close()
        self.app.close()


@contextmanager
def bench_on(postgres: PostgresServer, broker_url: str, backend_url: str) -> Iterator[Bench]:
    """A setup with a database of its own."""
    name = postgres.create_database()
    with TemporaryDirectory() as folder:
        bench = Bench(postgres.url(name), broker_url, backend_url, Path(folder))
        try:
            yield bench
        finally:
            bench.close()
            postgres.drop_database(name)


@pytest.fixture
def bench(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Bench]:
    """On Valkey; nothing is started yet."""
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        yield bench
