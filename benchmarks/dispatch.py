"""How fast one beat takes due timers to Valkey, beside the fastest that Kombu can publish the same messages."""

from __future__ import annotations

import statistics
import time
from typing import Any

from celery import Celery
from kombu import Connection, Exchange, Producer

from benchmarks.servers import servers
from celery_durable import apply_many
from celery_durable.beat import DurableScheduler
from celery_durable.messages.rendering import render
from celery_durable.store.database import Database

ROUNDS = 3


def run(number: int = 20_000) -> dict[str, Any]:
    """Alternate the three ways of publishing `number` messages, and compare their medians."""
    with servers() as (app, database, valkey):
        scheduler = DurableScheduler(app, lazy=True)
        rates: dict[str, list[float]] = {"beat": [], "batch": [], "apply_async": []}
        for _ in range(ROUNDS):
            rates["beat"].append(_beat(app, database, scheduler, number))
            _emptied(valkey, number)
            rates["batch"].append(_batch(app, valkey.url, number))
            _emptied(valkey, number)
            rates["apply_async"].append(_apply_async(app, number // 10))
            _emptied(valkey, number // 10)
        scheduler.close()
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "name": "dispatch-redis", "unit": "messages/s", "ours": medians["beat"], "anchor": medians["batch"],
        "ratio": medians["beat"] / medians["batch"], "goal": 0.8, "apply_async": medians["apply_async"],
        "times_apply_async": medians["beat"] / medians["apply_async"], "samples": rates,
    }  # fmt: skip


def _beat(app: Celery, database: Database, scheduler: DurableScheduler, number: int) -> float:
    timers = apply_many(app.tasks["bench.durable"], [(0, (each,)) for each in range(number)])
    database.run(lambda executor: executor.fetch("vacuum analyze {schema}.timer"))
    assert len(timers) == number
    started = time.perf_counter()
    dispatch_all(database, scheduler)
    took = time.perf_counter() - started
    database.run(lambda executor: executor.fetch("truncate {schema}.run"))
    return number / took


def dispatch_all(database: Database, scheduler: DurableScheduler) -> None:
    """Tick until no timer waits and every claim is marked."""
    sql = "select exists (select from {schema}.timer) or exists (select from {schema}.run where state = 'claimed') as left"
    while database.run(lambda executor: executor.fetch(sql))[0].left:
        scheduler.tick()


def _batch(app: Celery, url: str, number: int) -> float:
    messages = [render(app, app.tasks["bench.durable"], (each,), {}, {}).message for each in range(number)]
    with Connection(url) as connection:
        producer = Producer(connection.channel(), exchange=Exchange(""), auto_declare=False)
        app.amqp.queues["bench"](connection.channel()).declare()
        started = time.perf_counter()
        with producer.batch(max_size=500):
            for message in messages:
                producer.publish(
                    message.body, routing_key=message.routing_key, exchange=message.exchange, headers=message.headers,
                    content_type=message.content_type, content_encoding=message.content_encoding, retry=False,
                    **message.properties,
                )  # fmt: skip
        return number / (time.perf_counter() - started)


def _apply_async(app: Celery, number: int) -> float:
    task = app.tasks["bench.durable"]
    started = time.perf_counter()
    for each in range(number):
        task.apply_async((each,))
    return number / (time.perf_counter() - started)


def _emptied(valkey: Any, expected: int) -> None:
    """What is measured was really published: count it, then remove it."""
    client = valkey.client()
    found = client.llen("bench")
    assert found == expected, f"{found} messages in the queue, not {expected}"
    client.flushall()
