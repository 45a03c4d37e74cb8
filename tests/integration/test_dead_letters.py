"""Many dead letters on a real Postgres: found, counted, replayed, discarded, exported."""

from __future__ import annotations

import base64
import json
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from threading import Barrier
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery

from celery_durable import apply_at, dead_letters, get_timer
from celery_durable.dead_letter import CHUNK
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.store import claims, leases, runs
from celery_durable.store import dead_letters as store
from celery_durable.store.database import Database
from tests.beats import make_app, rows

NOW = timedelta(0)
HOUR = timedelta(hours=1)
#: A task that only the workers know.
DURABLE = "elsewhere.durable"
#: Legal in JSON, and in no text column.
STRANGE = "nul \x00, lone surrogate \ud800"


@pytest.fixture
def local(database_url: str) -> Iterator[Celery]:
    """An app without a broker."""
    app = make_app(database_url, "memory://")
    yield app
    Database.of(app).close()


@pytest.fixture
def each_local(each_database_url: str) -> Iterator[Celery]:
    """The same on the newest and the oldest PostgreSQL."""
    app = make_app(each_database_url, "memory://")
    yield app
    Database.of(app).close()


def bury(
    app: Celery, number: int = 1, *, task: str = DURABLE, reason: str = "exhausted", error_type: str = "ValueError",
    error: str = "no", args: tuple[Any, ...] = (), **options: Any,
) -> list[UUID]:  # fmt: skip
    """Timers that a worker has run once, in vain: their ids, in the order of their death."""
    database = Database.of(app)
    made = [apply_at(task, NOW, args or (each,), durable=True, app=app, **options).id for each in range(number)]
    failure = runs.Failure(error_type=error_type, error=error, traceback=f"Traceback: {error}")

    def operation(executor: Any) -> None:
        with executor.atomic():
            claimed, *_ = claims.claim(executor, shard=0, watermark=claims.UNBOUNDED, page=number, timeout=30)
            claims.mark(executor, claimed, redispatch_after=300, redispatch_max=3600)
            for each in made:
                lease = leases.lease(
                    executor,
                    leases.Wanted(
                        timer_id=each,
                        call_id=each,
                        token="t",
                        worker="w@host",
                        seconds=30,
                        max_attempts=1,
                        base=1,
                        cap=600,
                    ),
                )
                assert isinstance(lease, leases.Lease)
                assert runs.bury(executor, each, lease.fence, reason=reason, failure=failure)

    database.run(operation)
    return made


def died(app: Celery, timer_id: UUID, at: str) -> None:
    """Move a death to another time."""
    rows(
        app, "update {schema}.dead set died_at = %(at)s::timestamptz where id = %(id)s returning id", at=at, id=timer_id
    )


def replays(app: Celery) -> dict[UUID, int]:
    """How often each dead letter was stored again."""
    return Counter(
        each.replay_of for each in rows(app, "select replay_of from {schema}.call where replay_of is not null")
    )


def ids(found: Any) -> list[UUID]:
    return [each.id for each in found]


# find_all


def test_dead_letters_are_found_by_what_they_died_of(each_local: Celery) -> None:
    [charge] = bury(
        each_local, task="proj.charge", error_type="proj.Declined", error="Card DECLINED: 100%", key="order-1"
    )
    [mail] = bury(each_local, task="proj.mail", queue="mails", key="mail-1")
    [lost] = bury(each_local, task="proj.charge", reason="worker lost", error_type="", error="", key="order-2")
    [again] = bury(each_local, key="other")
    dead_letters.replay(again, when=HOUR, app=each_local)

    def found(**filters: Any) -> list[UUID]:
        return ids(dead_letters.find_all(app=each_local, **filters))

    assert found() == [lost, mail, charge]
    assert found(replayed=True) == [again, lost, mail, charge]
    assert found(task="proj.charge") == [lost, charge]
    assert found(task="proj.charge", reason="exhausted") == [charge]
    assert found(error_type="proj.Declined") == [charge]
    assert found(error="card declined: 100%") == [charge]
    assert found(error="1__%") == []
    assert found(key="order-") == [lost, charge]
    assert found(queue="mails") == [mail]
    assert found(task="no.such") == []

    [row] = dead_letters.find_all(task="proj.mail", app=each_local)
    assert (row.key, row.task_id, row.worker, row.attempt) == ("mail-1", str(mail), "w@host", 1)
    assert row.created_at <= row.died_at and row.due_at is not None and row.started_at is not None


def test_dead_letters_are_found_by_the_time_of_their_death(local: Celery) -> None:
    """Not by that of their call: what was stored long ago may have died just now."""
    first, second, third = bury(local, 3)
    for timer_id, at in ((first, "2026-03-03T00:00Z"), (second, "2026-01-01T00:00Z"), (third, "2026-02-02T00:00Z")):
        died(local, timer_id, at)
    [fresh] = bury(local)

    def found(**filters: Any) -> list[UUID]:
        return ids(dead_letters.find_all(app=local, **filters))

    assert found() == [fresh, first, third, second]
    assert found(since=datetime(2026, 2, 2, tzinfo=timezone.utc)) == [fresh, first, third]
    assert found(until=datetime(2026, 2, 2, tzinfo=timezone.utc)) == [second]
    assert found(since=-HOUR) == [fresh]
    assert found(since=-3600, until=HOUR) == [fresh]
    assert found(until=-HOUR) == [first, third, second]


@pytest.mark.parametrize("filters", [{}, {"replayed": True}, {"task": DURABLE}], ids=str)
def test_dead_letters_are_paged_without_gaps_or_repeats(local: Celery, filters: dict[str, Any]) -> None:
    made = bury(local, 7)
    # Many die within one statement: at the same time.
    rows(local, "update {schema}.dead set died_at = '2026-01-01' returning id")
    died(local, made[0], "infinity")
    died(local, made[1], "-infinity")
    died(local, made[2], "0300-01-01 BC")
    seen: list[UUID] = []
    page = dead_letters.find_all(limit=2, app=local, **filters)
    while True:
        seen += ids(page)
        if page.cursor is None:
            break
        # What was shown may be gone: the list goes on behind it all the same.
        dead_letters.discard(page[-1].id, app=local)
        page = dead_letters.find_all(limit=2, before=page.cursor, app=local, **filters)
    assert seen == [made[0], *sorted(made[3:], reverse=True), made[2], made[1]]


def test_a_page_looks_at_a_bounded_number_and_says_where_to_go_on(
    local: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STRIDE", 4)
    monkeypatch.setattr(store, "MOST_LOOKED_AT", 8)
    [needle] = bury(local, error="needle")
    bury(local, 20)
    found: list[UUID] = []
    lengths: list[int] = []
    cursor: str | None = None
    while True:
        page = dead_letters.find_all(error="needle", limit=3, before=cursor, app=local)
        found += ids(page)
        lengths.append(len(page))
        cursor = page.cursor
        if cursor is None:
            break
    assert found == [needle]
    assert lengths == [0, 0, 1]
    assert dead_letters.replay_all(error="needle", app=local).done == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda app: dead_letters.find_all(limit=0, app=app), "limit = 0"),
        (lambda app: dead_letters.find_all(before="x", app=app), "'x' is no cursor"),
        (
            lambda app: dead_letters.find_all(before=f"2026-19-39_00:00:00_UTC,{UUID(int=0)}", app=app),
            "2026-19-39.* is no cursor",
        ),
        (lambda app: dead_letters.find_all(since=datetime(2026, 1, 1), app=app), "since: .* has no time zone"),
        (lambda app: dead_letters.find_all(until="yesterday", app=app), "until: 'yesterday' is no due time"),
        (lambda app: dead_letters.find_all(tasks="t", app=app), "no filter 'tasks'"),
        (lambda app: dead_letters.find_all(task=5, app=app), "task = 5"),
        (lambda app: dead_letters.find_all(replayed=None, app=app), "replayed = None"),
        (lambda app: dead_letters.groups(limit=True, app=app), "limit = True"),
        (lambda app: dead_letters.replay_all(when="soon", app=app), "'soon' is no due time"),
        (lambda app: dead_letters.replay_all(replayed=True, app=app), "replayed once"),
        (lambda app: dead_letters.discard_all(error=b"x", app=app), "error = b'x'"),
        (lambda app: dead_letters.export(since="x", app=app), "since: 'x'"),
    ],
)
def test_what_says_nothing_is_refused_and_changes_nothing(
    local: Celery, call: Callable[[Celery], object], words: str
) -> None:
    made = bury(local)
    with pytest.raises(InvalidTimer, match=words):
        call(local)
    assert ids(dead_letters.find_all(app=local)) == made


# groups


def test_dead_letters_are_counted_by_what_they_died_of(each_local: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    declined = bury(each_local, 3, task="proj.charge", error_type="proj.Declined")
    lost = bury(each_local, 2, task="proj.charge", reason="worker lost", error_type="", error="")
    [mail] = bury(each_local, task="proj.mail")
    died(each_local, declined[0], "infinity")
    found = dead_letters.groups(app=each_local)
    assert (found.looked_at, found.complete) == (6, True)
    assert [(each.task, each.error_type, each.reason, each.number, each.example) for each in found.groups] == [
        ("proj.charge", "proj.Declined", "exhausted", 3, declined[0]),
        ("proj.charge", None, "worker lost", 2, lost[1]),
        ("proj.mail", "ValueError", "exhausted", 1, mail),
    ]
    assert found.groups[1].oldest <= found.groups[1].newest
    assert [each.number for each in dead_letters.groups(task="proj.charge", limit=1, app=each_local).groups] == [3]
    assert dead_letters.groups(until=-HOUR, app=each_local).groups == []
    monkeypatch.setattr(store, "MOST_LOOKED_AT", 2)
    some = dead_letters.groups(app=each_local)
    assert (some.looked_at, some.complete, sum(each.number for each in some.groups)) == (2, False, 2)


# replay_all


def test_all_are_replayed_once_and_in_the_order_of_their_death(each_local: Celery) -> None:
    number = CHUNK + 20
    made = bury(each_local, number, tenant="acme")
    [other] = bury(each_local, task="proj.other")
    dry = dead_letters.replay_all(task=DURABLE, dry_run=True, app=each_local)
    assert (dry.done, dry.refused, replays(each_local)) == (number, 0, {})

    told: list[int] = []
    done = dead_letters.replay_all(task=DURABLE, when=HOUR, progress=told.append, app=each_local)
    assert (done.done, done.elsewhere, done.refused) == (number, 0, 0)
    assert told == [CHUNK, number]
    assert replays(each_local) == dict.fromkeys(made, 1)
    stored = rows(
        each_local,
        "select c.replay_of, c.tenant, t.due_at from {schema}.timer t join {schema}.call c on c.id = t.call_id "
        "order by t.wake_at, t.id",
    )
    assert [each.replay_of for each in stored] == made
    assert {each.tenant for each in stored} == {"acme"}
    assert ids(dead_letters.find_all(app=each_local)) == [other]
    [row] = [each for each in dead_letters.find_all(replayed=True, app=each_local, limit=1000) if each.id == made[5]]
    again = get_timer(row.replayed_as, app=each_local)
    assert again is not None and again.key == str(made[5]) and again.state == "waiting"
    assert dead_letters.replay_all(task=DURABLE, app=each_local).done == 0


def test_what_dies_meanwhile_is_left_alone(local: Celery) -> None:
    """A replay that fails again at once would be replayed for ever."""
    bury(local, CHUNK + 1)
    later: list[UUID] = []
    done = dead_letters.replay_all(when=HOUR, progress=lambda _: later.extend(bury(local)), app=local)
    assert done.done == CHUNK + 1
    assert len(later) == 2
    assert sorted(ids(dead_letters.find_all(app=local))) == sorted(later)


def test_two_replays_of_all_at_once_replay_each_once(each_local: Celery) -> None:
    made = bury(each_local, 3 * CHUNK)
    together = Barrier(2)

    def replay() -> dead_letters.Tally:
        together.wait()
        return dead_letters.replay_all(when=HOUR, app=each_local)

    with ThreadPoolExecutor(2) as pool:
        one, two = (each.result() for each in [pool.submit(replay), pool.submit(replay)])
    assert one.done + two.done == len(made)
    assert one.refused == two.refused == 0
    assert replays(each_local) == dict.fromkeys(made, 1)


def test_a_letter_is_either_replayed_or_discarded(local: Celery) -> None:
    made = bury(local, 3 * CHUNK)
    together = Barrier(2)

    def act(do: Callable[..., dead_letters.Tally]) -> dead_letters.Tally:
        together.wait()
        return do(app=local)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(act, dead_letters.discard_all), pool.submit(act, dead_letters.replay_all)]
        discarded, replayed = (each.result() for each in futures)
    assert discarded.done + replayed.done == len(made)
    left = ids(dead_letters.find_all(replayed=True, limit=1000, app=local))
    assert len(left) == replayed.done
    assert replays(local) == dict.fromkeys(left, 1)


def test_a_connection_that_breaks_on_the_way_repeats_nothing(local: Celery) -> None:
    made = bury(local, 2 * CHUNK + 1)
    cut: list[int] = []

    def break_all(_: int) -> None:
        with Database.of(local).connect("cutter") as cutter:
            gone = cutter.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = current_database() "
                "and application_name = 'celery-durable'"
            ).fetchall()
        cut.append(len(gone))

    done = dead_letters.replay_all(when=HOUR, progress=break_all, app=local)
    assert all(cut) and len(cut) == 3
    assert (done.done, done.elsewhere) == (len(made), 0)
    assert replays(local) == dict.fromkeys(made, 1)


def test_a_commit_whose_answer_was_lost_counts_as_our_own(local: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bury(local, 3)
    database = Database.of(local)
    ran = database.transact
    twice: list[Any] = []

    def lost(operation: Any) -> Any:
        # As run() does after a commit of which it did not hear.
        twice.append(ran(operation))
        return ran(operation)

    monkeypatch.setattr(database, "transact", lost)
    done = dead_letters.replay_all(when=HOUR, app=local)
    assert twice
    assert (done.done, done.elsewhere) == (3, 0)
    assert replays(local) == dict.fromkeys(made, 1)


BROKEN = {
    "headers are no JSON object": "update {schema}.call set headers = '[]' where id = %(id)s returning id",
    "headers cannot be read": "update {schema}.call set headers = ('{\"n\": ' || repeat('1', 5000) || '}')::json "
    "where id = %(id)s returning id",
    "properties cannot be read": "update {schema}.call set properties = '{\"n\": 1e999}' where id = %(id)s returning id",
    "holds no message: headers": "update {schema}.call set headers = '{}' where id = %(id)s returning id",
    "its row in call is gone": "delete from {schema}.call where id = %(id)s returning id",
}


def test_letters_that_hold_no_message_are_named_and_stop_no_other(each_local: Celery) -> None:
    first, *broken, last = bury(each_local, len(BROKEN) + 2)
    for timer_id, sql in zip(broken, BROKEN.values(), strict=True):
        rows(each_local, sql, id=timer_id)
    for timer_id, words in zip(broken, BROKEN, strict=True):
        with pytest.raises(InvalidTimer, match=f"{timer_id}.*{words}.*iscard it"):
            dead_letters.replay(timer_id, app=each_local)
    dry = dead_letters.replay_all(dry_run=True, app=each_local)
    done = dead_letters.replay_all(app=each_local)
    for tally in (dry, done):
        assert (tally.done, tally.elsewhere, tally.refused) == (2, 0, len(BROKEN))
        assert list(tally.refusals) == broken
        assert all(words in why for words, why in zip(BROKEN, tally.refusals.values(), strict=True))
    assert replays(each_local) == {first: 1, last: 1}
    # They are still there to be seen, and can be let go.
    assert ids(dead_letters.find_all(app=each_local)) == list(reversed(broken))
    assert [each["id"] for each in dead_letters.export(show_args=True, app=each_local)] == [
        str(each) for each in broken
    ]
    assert dead_letters.groups(app=each_local).looked_at == len(BROKEN) + 2
    assert dead_letters.discard_all(app=each_local).done == len(BROKEN)


def test_a_dry_run_of_one_says_what_the_replay_would(local: Celery) -> None:
    [one, two] = bury(local, 2)
    assert not dead_letters.replay(one, dry_run=True, app=local).created
    assert dead_letters.discard(one, dry_run=True, app=local)
    assert replays(local) == {}
    dead_letters.replay(two, when=HOUR, app=local)
    with pytest.raises(KeyConflict, match="replayed already"):
        dead_letters.replay(two, dry_run=True, app=local)
    assert not dead_letters.discard(uuid4(), dry_run=True, app=local)
    assert sorted(ids(dead_letters.find_all(replayed=True, app=local))) == sorted([one, two])


# discard_all


def test_all_are_discarded_but_what_was_replayed(local: Celery) -> None:
    made = bury(local, CHUNK + 5)
    [other] = bury(local, task="proj.other")
    dead_letters.replay(made[0], when=HOUR, app=local)
    assert dead_letters.discard_all(task=DURABLE, dry_run=True, app=local).done == CHUNK + 4
    told: list[int] = []
    assert dead_letters.discard_all(task=DURABLE, progress=told.append, app=local).done == CHUNK + 4
    assert told == [CHUNK, CHUNK + 4]
    assert ids(dead_letters.find_all(replayed=True, app=local)) == [other, made[0]]
    assert dead_letters.discard_all(task=DURABLE, replayed=True, app=local).done == 1
    assert rows(local, "select count(*) as n from {schema}.outcome")[0].n == CHUNK + 6


# export


def test_an_export_tells_everything_and_arguments_only_where_asked_for(local: Celery) -> None:
    [plain] = bury(local, args=("secret", float("nan")), key="k", queue="mails", error="x\ny")
    [pickled] = bury(local, args=("secret",), serializer="pickle")
    hidden = list(dead_letters.export(app=local))
    assert "secret" not in json.dumps(hidden) and base64.b64encode(b"secret").decode()[:-2] not in json.dumps(hidden)
    first, second = dead_letters.export(show_args=True, app=local)
    assert (first["id"], first["key"], first["queue"], first["reason"]) == (str(plain), "k", "mails", "exhausted")
    for name in ("created_at", "due_at", "started_at", "died_at"):
        assert datetime.fromisoformat(first[name].replace("Z", "+00:00")).tzinfo is not None
    assert first["message"]["arguments"] == {"args": ["secret", "nan"], "kwargs": {}}
    assert first["message"]["headers"]["task"] == DURABLE
    [attempt] = first["attempts"]
    assert (attempt["error_type"], attempt["error"], attempt["traceback"]) == ("ValueError", "x\ny", "Traceback: x\ny")
    assert second["id"] == str(pickled) and second["message"]["arguments"] is None
    assert pickle.loads(base64.b64decode(second["message"]["body_base64"]))[0] == ("secret",)
    assert "body_base64" not in first["message"]
    assert [each["id"] for each in dead_letters.export(key="k", app=local)] == [str(plain)]
    json.dumps([hidden, first, second], allow_nan=False)


def test_an_export_streams(local: Celery) -> None:
    """What it holds does not grow with their number; what is discarded meanwhile is left out."""
    made = bury(local, CHUNK + 10, args=("x" * 300_000,))
    letters = dead_letters.export(show_args=True, app=local)
    assert next(letters)["id"] == str(made[0])
    dead_letters.discard(made[1], app=local)
    tracemalloc.start()
    try:
        rest = [each["id"] for each in letters]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rest == [str(each) for each in made[2:]]
    # All of them are 33 MB.
    assert peak < 8_000_000


# any text


def test_any_text_is_found_replayed_and_exported(each_local: Celery) -> None:
    long = "e" * 1_000_000 + " the end"
    [strange] = bury(each_local, args=(STRANGE,), error_type=STRANGE, error=STRANGE, headers={"x": STRANGE})
    [wordy] = bury(each_local, error=long)
    for text in (STRANGE, "\x00", "\ud800"):
        assert ids(dead_letters.find_all(error=text, app=each_local)) == [strange]
        assert ids(dead_letters.find_all(task=text, key=text, reason=text, queue=text, app=each_local)) == []
    assert ids(dead_letters.find_all(error_type=STRANGE, app=each_local)) == [strange]
    assert ids(dead_letters.find_all(error="THE END", app=each_local)) == [wordy]
    kinds = {each.error_type for each in dead_letters.groups(app=each_local).groups}
    assert dead_letters.find_all(error_type=(kinds - {"ValueError"}).pop(), app=each_local)
    first, second = (json.loads(json.dumps(each)) for each in dead_letters.export(show_args=True, app=each_local))
    assert first["message"]["arguments"]["args"] == [STRANGE]
    assert second["error"].endswith("the end") and len(second["error"]) < 25_000
    done = dead_letters.replay_all(when=HOUR, app=each_local)
    assert (done.done, done.refused) == (2, 0)
    kept = rows(
        each_local,
        "select headers::text as headers from {schema}.call where replay_of = %(id)s",
        id=strange,
    )
    assert json.loads(kept[0].headers)["x"] == STRANGE
