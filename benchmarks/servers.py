"""The servers a benchmark measures against: as in production, so with fsync and synchronous commit on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery

from celery_durable.store import migrations
from celery_durable.store.database import Database
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer

_SETTINGS = ("shared_buffers=1GB", "max_wal_size=8GB", "max_connections=50", "log_min_messages=warning")


@contextmanager
def servers() -> Iterator[tuple[Celery, Database, ValkeyServer]]:
    """A PostgreSQL 18 and a Valkey of one's own, with the app's schema in place."""
    postgres, valkey = PostgresServer("18", _SETTINGS).start(), ValkeyServer().start()
    app = Celery("bench", broker=valkey.url, set_as_current=False)
    app.conf.update(durable_database_url=postgres.url("postgres"), task_default_queue="bench")

    @app.task(name="bench.durable", shared=False)
    def durable(number: int) -> int:
        return number

    # Stored as leased, so that claim, publish and mark are what they are for a DurableTask; no worker runs here.
    durable.takes_lease = True
    app.finalize()
    database = Database.of(app)
    migrations.upgrade(database, app_name=app.main)
    try:
        yield app, database, valkey
    finally:
        database.close()
        valkey.teardown()
        postgres.teardown()


def environment(database: Database, valkey: ValkeyServer) -> dict[str, str]:
    """What the app modules of the benchmarks are told by."""
    return {
        "BENCH_BROKER": valkey.url,
        "CELERY_DURABLE_DATABASE_URL": database.url.render_as_string(hide_password=False),
    }
