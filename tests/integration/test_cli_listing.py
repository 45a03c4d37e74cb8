"""The lists of the commands cost what they show, with many timers waiting."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_durable.core.states import State
from celery_durable.settings import Settings
from celery_durable.store import listing, migrations
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor

WAITING = 30_000

FILL = """
with new_call as (
    insert into {schema}.call (id, timer_id, leased, task, exchange, routing_key, content_type, content_encoding,
                               headers, properties, body)
    select id, id, true, 'proj.task' || i %% 10, '', 'celery', 'application/json', 'utf-8', '{}', '{}', 'x'
    from (select i, gen_random_uuid() as id from generate_series(1, %(number)s) i) n returning id)
insert into {schema}.timer (id, call_id, due_at, wake_at)
select id, id, at, at from (select id, clock_timestamp() + random() * interval '30 days' as at from new_call) n
"""


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(Settings(database_url=database_url))
    migrations.upgrade(database)
    database.run(lambda executor: executor.fetch(FILL, {"number": WAITING}))
    database.run(lambda executor: executor.fetch("analyze {schema}.timer, {schema}.call"))
    yield database
    database.close()


def scanned(executor: Executor, wanted: listing.Filter, at: object, last_id: str, page: int) -> dict[str, Any]:
    """Rows that each scan of a table returned, by the index or table used."""
    (walk,) = (each for each in listing._WALKS if each.name == "waiting")
    parameters = {**wanted.parameters(), "at": at, "id": last_id}
    rows = executor.fetch(f"explain (analyze, format json) {walk.statement(page)}", parameters)
    found: dict[str, Any] = {}

    def visit(node: dict[str, Any]) -> None:
        name = node.get("Index Name") or node.get("Relation Name")
        if name:
            number = node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0)
            found[name] = found.get(name, 0) + number
        for each in node.get("Plans", ()):
            visit(each)

    visit(rows[0][0][0]["Plan"])
    return found


def test_a_page_walks_one_range_of_the_index(database: Database) -> None:
    first = database.run(lambda executor: listing.page_of_timers(executor, listing.Filter(), limit=50))
    last = first.timers[-1]
    for at, last_id in (("-infinity", "0" * 32), (last.due_at, str(last.id))):
        found = database.run(
            lambda executor, at=at, last_id=last_id: scanned(executor, listing.Filter(), at, last_id, 51)
        )
        assert set(found) == {"timer_wake", "call_pkey", "meta_pkey"} or set(found) == {
            "timer_wake",
            "call_pkey",
            "meta",
        }
        assert found["timer_wake"] <= 60
        assert found["call_pkey"] <= 2 * 51


def test_a_range_of_due_times_is_a_range_of_the_index(database: Database) -> None:
    start = datetime.now(timezone.utc) + timedelta(days=29)
    wanted = listing.Filter(due_after=start, due_before=start + timedelta(minutes=10))
    found = database.run(lambda executor: scanned(executor, wanted, "-infinity", "0" * 32, 51))
    assert found["timer_wake"] <= 52
    page = database.run(lambda executor: listing.page_of_timers(executor, wanted))
    assert all(wanted.due_after <= each.due_at < wanted.due_before for each in page.timers)  # type: ignore[operator]  # both are set


def test_pages_meet_every_timer_once(database: Database) -> None:
    seen: list[Any] = []
    cursor: str | None = None
    while True:
        page = database.run(
            lambda executor, cursor=cursor: listing.page_of_timers(
                executor, listing.Filter(states=[State.WAITING]), limit=7_000, cursor=cursor
            )
        )
        seen += page.timers
        cursor = page.cursor
        if cursor is None:
            break
    assert len(seen) == len({each.id for each in seen}) == WAITING
    assert [each.due_at for each in seen] == sorted(each.due_at for each in seen)


def test_a_schema_with_several_shards_is_listed_in_one_order(database: Database) -> None:
    database.run(lambda executor: executor.fetch("update {schema}.meta set value = '3' where name = 'shards'"))
    database.run(
        lambda executor: executor.fetch("update {schema}.timer set shard = abs(hashtext(id::text)) %% 3", {"": ""})
    )
    whole = database.run(lambda executor: listing.page_of_timers(executor, listing.Filter(), limit=10_000))
    due = [each.due_at for each in whole.timers]
    assert due == sorted(due)  # type: ignore[type-var]  # waiting timers have a due time
    rest = database.run(
        lambda executor: listing.page_of_timers(executor, listing.Filter(), limit=WAITING, cursor=whole.cursor)
    )
    assert len(rest.timers) == WAITING - 10_000
