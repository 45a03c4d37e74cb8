"""apply_at and its family on a real Postgres, with broker and result backend that nobody could reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import dateutil.tz
import psycopg
import pytest
import pytz
from celery import Celery, chain, chord
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from celery_durable import (
    DurableTask,
    InvalidTimer,
    KeyConflict,
    apply_at,
    apply_many,
    cancel,
    dead_letters,
    get_timer,
    reschedule,
)
from celery_durable.store import migrations, timers
from celery_durable.store.database import Database
from tests.options import HEADERS, JUNK, OPTIONS

NOWHERE = "127.0.0.1:1"
HOUR = timedelta(hours=1)


def make_app(database_url: str, **settings: Any) -> Celery:
    app = Celery("proj", broker=f"redis://{NOWHERE}/0", backend=f"redis://{NOWHERE}/1", set_as_current=False)
    app.conf.update(durable_database_url=database_url, **settings)

    @app.task(name="proj.add", shared=False)
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    app.finalize()
    return app


@pytest.fixture
def database_url(each_database_url: str) -> str:
    return each_database_url


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    app = make_app(database_url)
    migrations.upgrade(Database.of(app), app_name=app.main)
    yield app
    Database.of(app).close()


@pytest.fixture
def add(app: Celery) -> Any:
    return app.tasks["proj.add"]


@pytest.fixture
def outside(app: Celery) -> Iterator[psycopg.Connection[Any]]:
    """A connection that sees only what has been committed."""
    connection = Database.of(app).connect("test")
    yield connection
    connection.close()


def stored(outside: psycopg.Connection[Any]) -> int:
    row = outside.execute("select count(*) from celery_durable.timer").fetchone()
    assert row is not None
    return int(row[0])


def test_a_timer_is_stored_without_broker_or_backend(app: Celery, add: Any) -> None:
    timer = apply_at(add, HOUR, (1,), {"y": 2}, key="one", queue="billing", priority=3)
    assert timer.created and timer.key == "one" and timer.state == "waiting"
    assert timer.task_id == str(timer.id) == timer.result.id
    details = timer.details
    assert details is not None and details.queue == "billing" and details.attempt == 0 and not details.leased


def test_countdown_under_a_named_zone(database_url: str) -> None:
    """C36: the zone of the app, in whatever form, has no part in a delay."""
    for zone in ("Asia/Shanghai", ZoneInfo("Asia/Shanghai"), pytz.timezone("Asia/Shanghai")):
        app = make_app(database_url, timezone=zone)
        migrations.upgrade(Database.of(app), app_name="proj")
        before = datetime.now(timezone.utc)
        timer = apply_at(app.tasks["proj.add"], 60, (1,))
        assert timer.due_at is not None
        assert abs((timer.due_at - before).total_seconds() - 60) < 1
        assert timer.due_at.astimezone(ZoneInfo("Asia/Shanghai")).utcoffset() == timedelta(hours=8)
        Database.of(app).close()


def test_naive_datetimes_are_refused(add: Any, outside: psycopg.Connection[Any]) -> None:
    """C37: without a zone an instant is not said; the error tells how to say it."""
    with pytest.raises(InvalidTimer, match="durable_naive_datetimes"):
        apply_at(add, datetime(2026, 12, 24, 9, 0), (1,))
    assert stored(outside) == 0


def test_naive_datetimes_may_be_given_a_meaning(database_url: str) -> None:
    """C37: opted in, they are meant in the app's zone, pytz zones included."""
    for zone in ("Europe/Berlin", pytz.timezone("Europe/Berlin")):
        app = make_app(database_url, timezone=zone, durable_naive_datetimes=True)
        migrations.upgrade(Database.of(app), app_name="proj")
        timer = apply_at(app.tasks["proj.add"], datetime(2027, 7, 1, 9, 0), (1,))
        assert timer.due_at == datetime(2027, 7, 1, 7, 0, tzinfo=timezone.utc)
        Database.of(app).close()


def test_every_kind_of_aware_datetime(add: Any) -> None:
    """C39: one instant, five ways to write it."""
    instant = datetime(2027, 7, 1, 7, 0, tzinfo=timezone.utc)
    forms = (
        instant,
        instant.astimezone(ZoneInfo("Europe/Berlin")),
        instant.astimezone(pytz.timezone("Europe/Berlin")),
        instant.astimezone(dateutil.tz.gettz("Europe/Berlin")),
        instant.astimezone(timezone(timedelta(hours=5, minutes=30))),
    )
    assert {apply_at(add, form, (1,)).due_at for form in forms} == {instant}


@pytest.mark.parametrize(
    "when",
    [float("nan"), float("inf"), 10**18, -54_000_000_000, timedelta.max, "tomorrow", True, None, date(2027, 1, 1)],
    ids=repr,
)
def test_absurd_times_are_refused(add: Any, outside: psycopg.Connection[Any], when: Any) -> None:
    """C40: an absurd delay is refused at the call, and nothing is stored."""
    with pytest.raises(InvalidTimer):
        apply_at(add, when, (1,))
    assert stored(outside) == 0


def test_the_past_means_at_once(add: Any) -> None:
    """C40: a few seconds ago is due now, and keeps its due time for the lateness."""
    timer = apply_at(add, -5, (1,))
    assert timer.due_at is not None and timer.due_at < datetime.now(timezone.utc)
    assert timer.state == "waiting"


class Model:
    """Stands for an ORM object."""


@pytest.mark.parametrize("argument", [{1}, lambda: 0, Model(), object()], ids=["set", "lambda", "model", "object"])
def test_unserialisable_arguments(add: Any, outside: psycopg.Connection[Any], app: Celery, argument: Any) -> None:
    """C98: refused at the call; the surrounding transaction goes on as if nothing had been asked."""
    engine = create_engine(Database.of(app).url)
    with Session(engine) as session, session.begin():
        apply_at(add, HOUR, ("before",), connection=session)
        with pytest.raises(InvalidTimer):
            apply_at(add, HOUR, (argument,), connection=session)
        apply_at(add, HOUR, ("after",), connection=session)
    assert stored(outside) == 2
    engine.dispose()


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((), {}, TypeError),
        (("x" * 1_000_000,), {}, InvalidTimer),
        ((1,), {"eta": datetime.now(timezone.utc)}, InvalidTimer),
        ((1,), {"expires": 60}, InvalidTimer),
        ((1,), {"key": ""}, InvalidTimer),
        ((1,), {"key": "a\x00b"}, InvalidTimer),
        ((1,), {"key": "\udc80"}, InvalidTimer),
        ((1,), {"key": "k" * 5000}, InvalidTimer),
        ((1,), {"on_conflict": "merge"}, InvalidTimer),
        ((1,), {"durable": True}, InvalidTimer),
        ((1,), {"connection": object()}, TypeError),
    ],
    ids=[
        "signature",
        "size",
        "eta",
        "expires",
        "empty",
        "nul",
        "surrogate",
        "long",
        "conflict",
        "durable",
        "connection",
    ],
)
def test_bad_input_stores_nothing(
    add: Any,
    outside: psycopg.Connection[Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        apply_at(add, HOUR, arguments, **options)
    assert stored(outside) == 0


def test_an_unknown_name_and_many_of_a_canvas_are_refused(app: Celery, add: Any) -> None:
    with pytest.raises(InvalidTimer, match="chain"):
        apply_many(chain(add.s(1), add.s(2)), [(HOUR,)])
    with pytest.raises(InvalidTimer, match="chord cannot be stored as JSON"):
        apply_at(chord([add.s(object())], add.s()), HOUR)
    with pytest.raises(InvalidTimer, match="durable=True"):
        apply_at("elsewhere.task", HOUR, app=app)
    timer = apply_at("elsewhere.task", HOUR, app=app, durable=True)
    assert timer.details is not None and timer.details.leased


def test_text_in_every_script(app: Celery, add: Any) -> None:
    """C101: keys and arguments come back as they were, and two normal forms are two keys."""
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    texts = ["定时器", "مؤقت", "👩\u200d🚀", nfc, nfd]
    made = {text: apply_at(add, HOUR, (text,), key=text) for text in texts}
    assert len({timer.id for timer in made.values()}) == len(texts)
    for text_, timer in made.items():
        found = get_timer(timer.id, app=app)
        assert found is not None and found.key == text_


# --- the caller's transaction -------------------------------------------------------------------------------


def test_session_commit_and_rollback(app: Celery, add: Any, outside: psycopg.Connection[Any]) -> None:
    """C105: the timer exists exactly if the transaction committed; a savepoint counts too."""
    engine = create_engine(Database.of(app).url)
    with Session(engine) as session:
        apply_at(add, 0, (1,), connection=session)
        assert stored(outside) == 0
        session.rollback()
        assert stored(outside) == 0
        apply_at(add, 0, (2,), connection=session)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            apply_at(add, 0, (3,), connection=session)
            raise ZeroDivisionError
        session.commit()
    assert stored(outside) == 1
    with engine.begin() as connection:
        apply_at(add, 0, (4,), connection=connection)
        connection.execute(text("select 1"))
    assert stored(outside) == 2
    engine.dispose()


def test_psycopg_commit_and_rollback(app: Celery, add: Any, outside: psycopg.Connection[Any]) -> None:
    """C105: on a psycopg connection, within its transaction or, in autocommit, at once."""
    with Database.of(app).connect("caller") as caller:
        with pytest.raises(ZeroDivisionError), caller.transaction():
            apply_at(add, 0, (1,), connection=caller)
            raise ZeroDivisionError
        assert stored(outside) == 0
        with caller.transaction():
            apply_at(add, 0, (1,), connection=caller)
            apply_many(add, [(0, (each,)) for each in range(3)], connection=caller)
            assert stored(outside) == 0
        assert stored(outside) == 4
        apply_at(add, 0, (2,), connection=caller)
        assert stored(outside) == 5


def test_cancel_within_a_transaction_that_rolls_back(app: Celery, add: Any) -> None:
    timer = apply_at(add, HOUR, (1,))
    with Database.of(app).connect("caller") as caller, pytest.raises(ZeroDivisionError), caller.transaction():
        assert timer.cancel(connection=caller) == "cancelled"
        raise ZeroDivisionError
    assert timer.state == "waiting"


# --- keys ----------------------------------------------------------------------------------------------------


def test_keep_replace_error(app: Celery, add: Any) -> None:
    first = apply_at(add, HOUR, (1,), key="k")
    kept = apply_at(add, 2 * HOUR, (2,), key="k")
    assert kept == first and not kept.created and kept.due_at == first.due_at
    replaced = apply_at(add, 3 * HOUR, (3,), key="k", on_conflict="replace")
    assert replaced == first and not replaced.created
    assert replaced.due_at is not None and first.due_at is not None and replaced.due_at > first.due_at
    details = first.details
    assert details is not None and details.call_id != first.id and details.key == "k"
    with pytest.raises(KeyConflict, match=str(first.id)):
        apply_at(add, HOUR, (4,), key="k", on_conflict="error")
    assert first.cancel() == "cancelled"
    with pytest.raises(KeyConflict, match="no longer waits"):
        apply_at(add, HOUR, (5,), key="k", on_conflict="replace")
    assert apply_at(add, HOUR, (6,), key="k") == first


@pytest.mark.parametrize("policy", ["keep", "replace", "error"])
def test_fifty_callers_one_key(app: Celery, add: Any, outside: psycopg.Connection[Any], policy: Any) -> None:
    """C107: of many callers at once, some of which roll back, at most one stores; the others get its word."""
    barrier = threading.Barrier(50)
    answers: list[str] = []

    def call(number: int) -> None:
        with Database.of(app).connect(f"caller {number}") as caller:
            barrier.wait()
            try:
                with caller.transaction():
                    timer = apply_at(
                        add, timedelta(hours=1 + number), (number,), key="U", on_conflict=policy, connection=caller
                    )
                    if number % 7 == 0:
                        raise ZeroDivisionError
                answers.append("created" if timer.created else "shared")
            except ZeroDivisionError:
                answers.append("rolled back")
            except KeyConflict:
                caller.execute("select 1")
                answers.append("refused")

    callers = [threading.Thread(target=call, args=(number,)) for number in range(50)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert len(answers) == 50
    assert stored(outside) == 1
    if policy == "error":
        assert answers.count("created") == 1 and "shared" not in answers
    else:
        assert "refused" not in answers and answers.count("created") == 1


def test_apply_many_tells_which_are_new(app: Celery, add: Any, outside: psycopg.Connection[Any]) -> None:
    older = apply_at(add, HOUR, (0,), key="a")
    made = apply_many(add, [(HOUR, (1,), None, "a"), (HOUR, (2,), {"y": 1}, "b"), (HOUR, (3,))])
    assert [each.created for each in made] == [False, True, True]
    assert made[0] == older and made[1].key == "b"
    with pytest.raises(KeyConflict, match="nothing was stored"):
        apply_many(add, [(HOUR, (4,)), (HOUR, (5,), None, "b")], on_conflict="error")
    with pytest.raises(InvalidTimer, match="Item 1"):
        apply_many(add, [(HOUR, (4,)), (float("nan"), (5,))])
    assert stored(outside) == 3
    assert apply_many(add, []) == []
    assert len(apply_many(add, [(HOUR, (each,)) for each in range(2500)])) == 2500
    assert stored(outside) == 2503


# --- cancel, reschedule, find --------------------------------------------------------------------------------


def test_cancel_is_definite_without_workers(app: Celery, add: Any) -> None:
    """C65: cancelled by handle, id, task id or key, while neither worker nor broker is there."""
    by_handle, by_id, by_key = (apply_at(add, 30, (1,), key=key) for key in (None, None, "order"))
    by_task_id = apply_at(add, 30, (1,), task_id="chosen")
    assert by_handle.cancel() == "cancelled"
    assert cancel(by_id.id, app=app) == "cancelled"
    assert cancel(key="order", app=app, reason="changed my mind") == "cancelled"
    assert cancel("chosen", app=app) == "cancelled"
    assert {each.state for each in (by_handle, by_id, by_key, by_task_id)} == {"cancelled"}
    assert by_key.details is not None and by_key.details.reason == "changed my mind"
    assert by_handle.cancel() == "cancelled"
    assert cancel(uuid4(), app=app) == "unknown"
    assert cancel(key="nobody", app=app) == "unknown"
    assert by_handle.reschedule(5) == "too_late"
    with pytest.raises(InvalidTimer):
        cancel(app=app)


def test_reschedule(app: Celery, add: Any) -> None:
    timer = apply_at(add, HOUR, (1,), expires=7200)
    assert timer.reschedule(timedelta(minutes=5)) == "rescheduled"
    assert timer.due_at is not None and timer.details is not None and timer.details.due_at == timer.due_at
    assert reschedule(str(timer.id), 10, app=app) == "rescheduled"
    assert reschedule(uuid4(), 10, app=app) == "unknown"
    with pytest.raises(InvalidTimer, match="expire"):
        timer.reschedule(3 * HOUR)


def test_of_several_timers_of_a_task_id_the_live_one_is_found(app: Celery, add: Any) -> None:
    ended = apply_at(add, HOUR, (1,), task_id="shared")
    ended.cancel()
    live = apply_at(add, HOUR, (2,), task_id="shared")
    assert get_timer("shared", app=app) == live
    assert get_timer("never", app=app) is None


# --- dead letters --------------------------------------------------------------------------------------------


def test_no_dead_letter(app: Celery, add: Any) -> None:
    assert dead_letters.get(uuid4(), app=app) is None
    assert not dead_letters.discard(uuid4(), app=app)
    with pytest.raises(InvalidTimer, match="no dead letter"):
        dead_letters.replay(apply_at(add, HOUR, (1,)).id, app=app)


def test_argument_types_survive(app: Celery, add: Any) -> None:
    """C97: what the JSON serialiser knows how to carry is stored by the same serialiser."""
    import json

    from kombu.utils import json as kombu_json

    values = [
        datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc), datetime(2026, 1, 2), date(2026, 1, 2), time(3, 4), uuid4(),
        Decimal("1.50"),
    ]  # fmt: skip
    timer = apply_at(add, HOUR, (values,))
    body = (
        Database.of(app)
        .run(
            lambda executor: executor.fetch(
                "select body from {schema}.call where id = %(id)s::uuid", {"id": str(timer.id)}
            )
        )[0]
        .body
    )
    assert kombu_json.loads(bytes(body).decode())[0] == json_round_trip([values])
    assert json.loads(bytes(body).decode())[1] == {}


def json_round_trip(value: Any) -> Any:
    from kombu.utils import json as kombu_json

    return kombu_json.loads(kombu_json.dumps(value))


def test_find_sees_one_place_only(app: Celery, add: Any) -> None:
    timer = apply_at(add, HOUR, (1,))
    found = Database.of(app).run(lambda executor: timers.find(executor, timer.id))
    assert found is not None and found.id == timer.id and not found.state.ended


def test_a_host_in_the_query_of_the_url(app: Celery, database_url: str) -> None:
    """SQLAlchemy's form for Unix sockets: beats and heartbeats connect by it too."""
    from sqlalchemy.engine import make_url

    url = make_url(database_url)
    query = {"host": str(url.host), "port": str(url.port)}
    text_ = url.set(host=None, port=None).update_query_dict(query).render_as_string(hide_password=False)
    database = Database(Database.of(app).settings.__class__(database_url=text_))
    with database.connect("test") as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_apply_many_with_a_router_that_looks_at_the_arguments(app: Celery, add: Any) -> None:
    """Each goes where a direct call would have gone, with its key, due time and tenant."""

    def route(name: str, args: Any, kwargs: Any, options: Any, **rest: Any) -> dict[str, Any]:
        return {"queue": f"queue-{args[0] % 3}"}

    app.conf.task_routes = (route,)
    app.conf.task_create_missing_queues = True
    made = apply_many(add, [(HOUR, (each,), None, f"k{9 - each}") for each in range(9)], tenant="t", expires=7200)
    assert [each.details.queue for each in made if each.details] == [f"queue-{each % 3}" for each in range(9)]
    assert [each.key for each in made] == [f"k{9 - each}" for each in range(9)]
    found = Database.of(app).run(
        lambda executor: executor.fetch("select count(distinct queue) as queues, count(tenant) as n from {schema}.call")
    )
    assert (found[0].queues, found[0].n) == (3, 9)
    again = apply_many(add, [(HOUR, (each,), None, f"k{9 - each}") for each in range(10)])
    assert [each.created for each in again] == [False] * 9 + [True]


NUL, SURROGATE = "a\x00b", "a\ud800b"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delivery_mode": "x"}, "delivery_mode"), ({"delivery_mode": 7}, "delivery_mode"),
        ({"headers": {"task": None}}, "task"), ({"headers": {"id": [1]}}, "id"), ({"headers": {"retries": "x"}}, "retries"),
        ({"headers": {"timelimit": 5}}, "timelimit"), ({"headers": {"lang": 3}}, "lang"), ({"headers": [1]}, "headers"),
        ({"headers": {"root_id": 5}}, "root_id"), ({"headers": {1: 2}}, "headers"), ({"headers": "x"}, "headers"),
        ({"headers": {"stamps": 1}}, "stamps"), ({"headers": {"expires": 7}}, "expires"),
        ({"headers": {"group": ["x"]}}, "group"), ({"headers": {"compression": 1}}, "compression"),
        ({"queue": NUL}, "queue|routing_key"), ({"queue": SURROGATE}, "queue|routing_key"),
        ({"exchange": NUL, "routing_key": "x"}, "exchange"), ({"exchange": "x", "routing_key": NUL}, "routing_key"),
        ({"expires": "tomorrow"}, "expires"), ({"expires": float("nan")}, "expires"), ({"expires": [1]}, "expires"),
        ({"expires": timedelta(1)}, "expires"), ({"stamped_headers": 5}, "stamped_headers"),
        ({"stamped_headers": ["x", 1]}, "stamped_headers"), ({"time_limit": "x"}, "time_limit"),
        ({"soft_time_limit": -1}, "soft_time_limit"), ({"priority": "high"}, "priority"), ({"priority": 300}, "priority"),
        ({"delivery_info": 5}, "delivery_info"), ({"correlation_id": 5}, "correlation_id"), ({"reply_to": NUL}, "reply_to"),
        ({"key": NUL}, "key"), ({"key": SURROGATE}, "key"), ({"key": ""}, "key"), ({"key": 5}, "key"),
        ({"tenant": NUL}, "tenant"), ({"task_id": NUL}, "task_id"), ({"task_id": SURROGATE}, "task_id"),
        ({"args": 42}, "args"), ({"args": "ab"}, "args"), ({"kwargs": [1]}, "kwargs"), ({"kwargs": {1: 2}}, "kwargs"),
        ({"serializer": "none"}, "serialized"), ({"compression": "none"}, "compression"),
        ({"countdown": 5}, "countdown"), ({"shadow": 5}, "shadow"), ({"queue": ["x"]}, "queue"), ({"router": 5}, "router"),
        ({"stamped_headers": ["x"]}, "stamped_headers"), ({"declare": 5}, "declare"), ({"task_type": 5}, "task_type"),
        ({"content_type": "x"}, "content_type"), ({"time_limit": 2**40}, "time_limit"),
        ({"headers": {"eta": "2090-01-01"}}, "eta"), ({"headers": {"expires": ""}}, "expires"),
        ({"headers": {"headers": 5}}, "headers"), ({"headers": {"compression": "gzip"}}, "compression"),
    ],
)  # fmt: skip
def test_an_option_that_would_fail_later_is_refused_now(
    app: Celery, add: Any, outside: psycopg.Connection[Any], options: dict[str, Any], said: str
) -> None:
    """By its name, with nothing stored and the caller's transaction as it was; in one call and in many."""
    options = dict(options)
    args = options.pop("args", (1,))
    kwargs = options.pop("kwargs", None)
    with Database.of(app).connect("caller") as caller, caller.transaction():
        with pytest.raises(InvalidTimer, match=said):
            apply_at(add, HOUR, args, kwargs, connection=caller, **options)
        key = options.pop("key", None)
        many = {name: value for name, value in options.items() if name != "task_id"}
        if many or key is not None or args != (1,) or kwargs is not None:
            with pytest.raises(InvalidTimer, match=said):
                apply_many(add, [(HOUR, args, kwargs, key)], connection=caller, **many)
        caller.execute("select 1")
    assert stored(outside) == 0


@pytest.mark.parametrize(
    "items",
    [
        [(HOUR, (1,)), (HOUR, 42)], [(HOUR, (1,)), (HOUR, (1,), [2])], [(HOUR, (1,)), (HOUR, (object(),))],
        [(HOUR, (1,)), (float("nan"), (1,))], [(HOUR, (1,)), (HOUR, (1,), None, NUL)], [(HOUR, (1,)), (HOUR, ("x" * 2_000_000,))],
        [(HOUR, (1,)), (HOUR, (1, 2, 3))], [(HOUR, (1,)), 5],
    ],
)  # fmt: skip
def test_what_is_wrong_with_one_of_many_is_said_with_its_number(
    app: Celery, add: Any, outside: psycopg.Connection[Any], items: list[Any]
) -> None:
    with pytest.raises((InvalidTimer, TypeError), match=r"^Item 1\b"):
        apply_many(add, items)
    assert stored(outside) == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.dictionaries(st.sampled_from([*OPTIONS, "key", "tenant", "when"]), st.sampled_from(JUNK), max_size=3),
    headers=st.dictionaries(st.sampled_from(HEADERS), st.sampled_from(JUNK), max_size=2),
    args=st.sampled_from([(1,), (NUL, SURROGATE), *JUNK]),
)
def test_whatever_is_refused_leaves_no_row_and_whatever_is_stored_can_be_found(
    app: Celery, add: Any, options: dict[str, Any], headers: dict[Any, Any], args: Any
) -> None:
    """With our error or Celery's for arguments that do not fit, in a transaction that can be used afterwards."""
    options = {"headers": headers, **options} if headers else dict(options)
    when = options.pop("when", HOUR)
    options.pop("connection", None)
    kwargs = options.pop("kwargs", None)
    if "args" in options:
        args = options.pop("args")
    with Database.of(app).connect("caller") as caller, caller.transaction(force_rollback=True):
        timer, unfit = None, "arguments"
        try:
            timer = apply_at(add, when, args, kwargs, connection=caller, **options)
        except InvalidTimer:
            pass
        except TypeError as exc:
            unfit = str(exc)
        assert "argument" in unfit
        assert stored(caller) == (timer is not None)
        if timer is not None:
            assert get_timer(timer.id, connection=caller, app=app) == timer
            assert get_timer(key=timer.key, connection=caller, app=app) == timer
            assert cancel(key=timer.key, connection=caller, app=app) == "cancelled"


@pytest.mark.parametrize("identity", [NUL, SURROGATE, "", "x" * 5000])
def test_nobody_is_called_that(app: Celery, identity: str) -> None:
    assert get_timer(identity, app=app) is None and get_timer(key=identity, app=app) is None
    assert cancel(identity, app=app) == "unknown" and cancel(key=identity, app=app) == "unknown"
    assert reschedule(identity, 5, app=app) == "unknown"


def test_a_timer_is_found_by_its_key(app: Celery, add: Any) -> None:
    timer = apply_at(add, HOUR, (1,), key="k")
    assert get_timer(key="k", app=app) == timer and get_timer(key="l", app=app) is None
    for wrong in ({}, {"identity": timer, "key": "k"}):
        with pytest.raises(InvalidTimer, match="not by both"):
            get_timer(app=app, **wrong)  # type: ignore[arg-type]  # the wrong call is the point


def test_legal_oddities_are_stored(app: Celery, add: Any) -> None:
    """What Celery takes and workers read: a Queue object, datetimes, empty headers, a limit of either kind."""
    from kombu import Queue

    app.amqp.queues.add(Queue("odd"))
    for options in (
        {"queue": app.amqp.queues["odd"]}, {"expires": datetime(2090, 1, 1)}, {"headers": {}}, {"time_limit": 5},
        {"soft_time_limit": 0.5}, {"priority": 0}, {"delivery_mode": "transient"}, {"x-anything": 1},
        {"headers": {"mine": {"nested": [1, NUL]}}}, {"shadow": "other"}, {"stamped_headers": ["a"], "a": 1},
        {"expires": "2090-01-01T00:00:00"}, {"delivery_mode": 2}, {"correlation_id": "c"},
    ):  # fmt: skip
        assert apply_at(add, HOUR, (1,), **options).state == "waiting"


class Wrapped:
    """A DB-API connection that is neither psycopg's nor SQLAlchemy's, as Django's is."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def cursor(self) -> Any:
        return self._connection.cursor()

    def get_autocommit(self) -> bool:
        return self._connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_many_on_a_connection_in_autocommit(app: Celery, add: Any, outside: psycopg.Connection[Any]) -> None:
    """Outside Django's atomic() all or none are stored all the same; inside it they go with the transaction."""
    with Database.of(app).connect("caller") as caller:
        wrapped = Wrapped(caller)
        apply_many(add, [(HOUR, (each,)) for each in range(3)], connection=wrapped)
        assert stored(outside) == 3
        with pytest.raises(KeyConflict):
            apply_many(add, [(HOUR, (1,), None, "k"), (HOUR, (1,), None, "k")], connection=wrapped, on_conflict="error")
        assert stored(outside) == 3
        with pytest.raises(ZeroDivisionError), caller.transaction():
            apply_many(add, [(HOUR, (1,))], connection=wrapped)
            raise ZeroDivisionError
        assert stored(outside) == 3


def test_a_deferred_call_may_expire_before_it_is_due(app: Celery) -> None:
    """As Celery takes it: the call expires; apply_at, which is ours, says that it makes no sense."""

    @app.task(base=DurableTask, name="proj.durable", shared=False)
    def durable() -> None: ...

    result = durable.apply_async(countdown=60, expires=30)
    timer = get_timer(result.id, app=app)
    assert timer is not None and timer.state == "waiting"
    assert timer.details is not None and timer.details.expires_at is not None and timer.due_at is not None
    assert timer.details.expires_at < timer.due_at
    with pytest.raises(InvalidTimer, match="before it is due"):
        durable.apply_at(60, expires=30)


def test_large_calls_with_the_same_keys_do_not_wait_for_each_other(
    app: Celery, add: Any, outside: psycopg.Connection[Any]
) -> None:
    """Of several pages, in opposite orders, with keys that languages sort otherwise than computers."""
    keys = [f"{letter}{number:04}" for number in range(500) for letter in "aBä"]
    start = threading.Barrier(2)
    made: list[list[str]] = []

    def call(order: list[str]) -> None:
        with Database.of(app).connect("caller") as caller, caller.transaction():
            start.wait()
            timers = apply_many(add, [(HOUR, (each,), None, each) for each in order], connection=caller)
            made.append([each.key for each in timers])

    callers = [threading.Thread(target=call, args=(order,)) for order in (keys, keys[::-1])]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert sorted(made) == sorted([keys, keys[::-1]])
    assert stored(outside) == len(keys)


def test_of_many_with_one_key_the_first_is_stored(app: Celery, add: Any) -> None:
    """And the handles come in the order of the items, with and without keys."""
    items: list[Any] = [(HOUR, (each,), None, None if each % 3 else "k") for each in range(1200)]
    made = apply_many(add, items)
    assert [each.created for each in made] == [bool(number % 3) or number == 0 for number in range(1200)]
    assert {each.id for each in made[::3]} == {made[0].id}
    assert [each.key == "k" for each in made] == [number % 3 == 0 for number in range(1200)]
