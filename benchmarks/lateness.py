"""How late timers are dispatched at a steady rate, with many others waiting."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.servers import environment, servers
from celery_durable import apply_at
from tests.servers.processes import CeleryTestBeat
from tests.servers.waiting import eventually

# Rows as apply_many would store them, made by the server: a million of them in seconds.
FILL = """
with made as (
    insert into {schema}.call (id, timer_id, leased, task, queue, exchange, routing_key, content_type, content_encoding,
                               headers, properties, body)
    select u.id, u.id, c.leased, c.task, c.queue, c.exchange, c.routing_key, c.content_type, c.content_encoding,
           c.headers, c.properties, c.body
    from {schema}.call c, lateral (select gen_random_uuid() as id from generate_series(1, %(number)s)) u
    where c.id = %(model)s::uuid
    returning id)
insert into {schema}.timer (id, call_id, due_at, wake_at)
select id, id, d.at, d.at
from made, lateral (select {schema}.clock() + interval '10 days' + random() * interval '30 days' as at) d
"""

# In `run`, not in `outcome`: the timers are leased, and no worker ends them.
LATENESS = """
select count(*) as number, percentile_cont(array[0.5, 0.99]) within group
       (order by extract(epoch from dispatched_at - due_at)::float8) as seconds
from {schema}.run where dispatched_at is not null
"""


def run(waiting: int = 1_000_000, rate: int = 50, seconds: int = 30) -> dict[str, Any]:
    """Dispatch `rate` timers a second for `seconds` seconds by one beat process, first with few waiting, then with many."""
    found: dict[int, Any] = {}
    with servers() as (app, database, valkey):
        beat = CeleryTestBeat("benchmarks.app", env=environment(database, valkey))
        beat.start()
        try:
            for number in (10_000, waiting):
                _fill(app, database, number)
                database.run(lambda executor: executor.fetch("truncate {schema}.outcome, {schema}.run"))
                _steady(app, rate, seconds)
                eventually(lambda: _dispatched(database) == rate * seconds, message="all are dispatched")
                found[number] = database.run(lambda executor: executor.fetch(LATENESS))[0]
        finally:
            beat.teardown()
    few, many = ([each * 1000 for each in found[number].seconds] for number in (10_000, waiting))
    return {
        "name": "lateness", "unit": "ms", "rate": rate, "waiting": waiting, "ours": many[0], "p99": many[1],
        "anchor": few[0], "anchor_p99": few[1], "anchor_is": "the same with 10,000 waiting",
        "ratio": many[0] / few[0], "goal": 1.2, "number": found[waiting].number,
    }  # fmt: skip


def _dispatched(database: Any) -> int:
    sql = "select count(*) as n from {schema}.run where dispatched_at is not null"
    return int(database.run(lambda executor: executor.fetch(sql))[0].n)


def _fill(app: Any, database: Any, number: int) -> None:
    standing = database.run(lambda executor: executor.fetch("select count(*) as n from {schema}.timer"))[0].n
    model = apply_at(app.tasks["bench.durable"], 20 * 86400, (0,))
    if number > standing:
        parameters = {"number": number - standing, "model": str(model.id)}
        database.run(lambda executor: executor.fetch(FILL, parameters))
    database.run(lambda executor: executor.fetch("vacuum analyze {schema}.timer"))
    database.run(lambda executor: executor.fetch("checkpoint"))


def _steady(app: Any, rate: int, seconds: int) -> None:
    task = app.tasks["bench.durable"]
    started = time.monotonic()
    for number in range(rate * seconds):
        ahead = started + number / rate - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        # Due a second and a fraction ahead: stored earlier than due, as timers are, and spread between the ticks.
        apply_at(task, 1.0 + (number % 7) / 70, (number,))
