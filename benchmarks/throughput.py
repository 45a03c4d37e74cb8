"""How many bodies of a DurableTask one worker runs in a second, beside a plain task that does as little."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from celery import Celery

from benchmarks import throughput_app
from benchmarks.dispatch import dispatch_all
from benchmarks.servers import environment, servers
from celery_durable import apply_many
from celery_durable.beat import DurableScheduler
from celery_durable.store.database import Database
from tests.servers.brokers import ValkeyServer
from tests.servers.processes import CeleryNode
from tests.servers.waiting import eventually

ROUNDS = 3
#: Of the messages: what runs before is the worker's start, what runs after its end.
BEGIN, END = 0.1, 0.9

WORKER = ("worker", "-c", "2", "-l", "WARNING", "--without-gossip", "--without-mingle", "-Q", "bench")
ENDED = "select count(*) as n from {schema}.outcome"


def run(number: int = 4_000) -> dict[str, Any]:
    """Alternate workers (`-c 2`, prefork) that find `number` messages of the one kind or the other; compare medians."""
    rates: dict[str, list[float]] = {"leased": [], "nothing": []}
    with servers() as (_, database, valkey):
        app = throughput_app.app
        app.conf.update(broker_url=valkey.url, durable_database_url=database.url.render_as_string(hide_password=False))
        try:
            for _ in range(ROUNDS):
                valkey.client().flushall()
                _publish(app, number)
                rates["nothing"].append(_rate(database, valkey, number, lambda: _consumed(valkey, number)))
                valkey.client().flushall()
                _dispatch(app, database, number)
                rates["leased"].append(_rate(database, valkey, number, lambda: _ended(database)))
        finally:
            Database.of(app).close()
            app.close()
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "name": "throughput", "unit": "bodies/s", "ours": medians["leased"], "anchor": medians["nothing"],
        "anchor_is": "a plain task on the same worker, results ignored in both", "goal": 0.9,
        "ratio": medians["leased"] / medians["nothing"], "samples": rates,
    }  # fmt: skip


def _publish(app: Celery, number: int) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for each in range(number):
            app.tasks["bench.nothing"].apply_async((each,), producer=producer)


def _dispatch(app: Celery, database: Database, number: int) -> None:
    database.run(
        lambda executor: executor.fetch("truncate {schema}.outcome, {schema}.call, {schema}.timer, {schema}.run")
    )
    scheduler = DurableScheduler(app, lazy=True)
    apply_many(app.tasks["bench.leased"], [(0, (each,)) for each in range(number)])
    dispatch_all(database, scheduler)
    scheduler.close()
    database.run(lambda executor: executor.fetch("analyze"))


def _rate(database: Database, valkey: ValkeyServer, number: int, done: Callable[[], int]) -> float:
    assert valkey.client().llen("bench") == number
    worker = CeleryNode("benchmarks.throughput_app", WORKER, environment(database, valkey))
    worker.start(wait=False)
    try:
        eventually(lambda: done() >= number * BEGIN, timeout=60, every=0.005)
        first, began = done(), time.perf_counter()
        eventually(lambda: done() >= number * END, timeout=120, every=0.01)
        return (done() - first) / (time.perf_counter() - began)
    finally:
        worker.kill()  # what is left in the queue is not measured
        worker.teardown()


def _consumed(valkey: ValkeyServer, number: int) -> int:
    client = valkey.client()
    return number - int(client.llen("bench")) - int(client.hlen("unacked"))


def _ended(database: Database) -> int:
    ended: int = database.run(lambda executor: executor.fetch(ENDED))[0].n
    return ended
