"""Many schedules that come due together."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_durable.beat import occurrences
from celery_durable.recurrence import Recurrence, Spec, from_spec
from tests.beats import Published, Start, entry, rows, utc

FILL = """
insert into {schema}.schedule (name, task, kind, text, tz, args, policy, cursor, next_at, edition)
select 'many ' || n, 'beating.plain', 'cron', %(text)s::text, 'UTC', json_build_array(n), %(policy)s::json,
       {schema}.clock(), {schema}.clock(), 1
from generate_series(1, %(number)s::integer) n
"""


def test_schedules_that_say_the_same_are_parsed_once(
    app: Celery, start: Start, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon)
    rows(app, FILL, text="1 12 * * *", policy="{}", number=120)
    parsed: list[Spec] = []

    def counted(spec: Spec) -> Recurrence:
        parsed.append(spec)
        return from_spec(spec)

    monkeypatch.setattr(occurrences, "from_spec", counted)
    beat.at(utc("2026-03-02T12:01:00"))
    beat.until(lambda: published.collect() >= 120)
    assert sorted(published.nominals) == sorted((f"many {n}", "2026-03-02T12:01:00Z") for n in range(1, 121))
    assert [each.text for each in parsed] == ["1 12 * * *"]


def test_a_page_of_schedules_that_catch_up_is_stored_in_parts(app: Celery, start: Start, published: Published) -> None:
    start(utc("2026-03-02T12:00:00"))
    rows(app, FILL, text="* * * * *", policy='{"catchup": "all"}', number=6)
    later = start(utc("2026-03-02T18:40:00"))  # 400 minutes
    later.until(lambda: published.collect() >= 6 * 400, timeout=30)
    assert len(set(published.nominals)) == len(published.nominals) == 6 * 400
    sizes = rows(app, "select count(*) as n from {schema}.call group by xmin order by n")
    assert [each.n for each in sizes] == [1200, 1200], "three schedules at a time make more than enough"


def test_each_of_a_page_keeps_its_own_headers(app: Celery, start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    odd = ['"', "\\", "{}, [", "é\u2028", "\ud800", "%(headers)s", "null"]
    beat = start(noon, **{str(n): entry(10, options={"headers": {"odd": each}}) for n, each in enumerate(odd)})
    beat.at(utc("2026-03-02T12:00:10"))
    beat.until(lambda: published.collect() >= len(odd))
    assert {each["durable_schedule"]: each["odd"] for each in published.headers} == {
        str(n): each for n, each in enumerate(odd)
    }
