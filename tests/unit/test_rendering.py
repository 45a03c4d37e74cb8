"""A rendered and later published message equals the one a direct call sends."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, chain, group, signals
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured
from celery.utils.saferepr import saferepr
from celery.worker.request import Request
from hypothesis import given
from hypothesis import strategies as st
from kombu import Queue
from kombu.transport import memory
from kombu.utils import json as kombu_json

from celery_durable.errors import InvalidTimer
from celery_durable.messages.amqp_confirms import Content
from celery_durable.messages.delivery import Outcome, Outgoing
from celery_durable.messages.message import Message, revive, storable
from celery_durable.messages.publishers import publisher_for
from celery_durable.messages.rendering import render, render_many, shown
from tests.options import HEADERS, JUNK, OPTIONS

#: Differ between any two messages of Celery.
INCIDENTAL = ("delivery_tag", "delivery_info", "body_encoding")


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("calls", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.accept_content = ["json", "pickle", "msgpack", "yaml"]

    @app.task(name="calls.add", shared=False)
    def add(x: Any, y: Any = None) -> Any:
        return x

    @app.task(
        name="calls.ignored",
        shared=False,
        ignore_result=True,
        time_limit=90,
        serializer="yaml",
        compression="zlib",
    )
    def ignored(*args: Any, **kwargs: Any) -> None:
        return None

    memory.Channel.queues.clear()
    yield app
    memory.Channel.queues.clear()
    app.close()


def waiting(app: Celery, queue: str) -> list[dict[str, Any]]:
    """Take what lies in a queue of the memory broker, as the transport keeps it."""
    taken = []
    lying = memory.Channel.queues.get(queue)
    while lying is not None and not lying.empty():
        taken.append(lying.get_nowait())
    return taken


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out what differs between any two messages; values as a worker reads them from Redis."""
    message = kombu_json.loads(kombu_json.dumps(message))
    properties = {key: value for key, value in message["properties"].items() if key not in INCIDENTAL}
    headers = {key: value for key, value in message["headers"].items() if key != "origin"}
    info = message["properties"]["delivery_info"]
    return {
        **message,
        "properties": properties,
        "headers": headers,
        "to": (info["exchange"], info["routing_key"]),
    }


def direct_and_stored(
    app: Celery, task: Any, args: Any, kwargs: Any, options: dict[str, Any], queue: str = "celery"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message that a direct call sends, and the one that is rendered, kept as JSON, and published."""
    if isinstance(task, str) and task not in app.tasks:
        app.send_task(task, args, kwargs, **options)
    else:
        app.tasks[getattr(task, "name", task)].apply_async(args, kwargs, **options)
    (direct,) = waiting(app, queue)

    rendered = render(app, task, args, kwargs, options)
    message = rendered.message
    kept = Message(
        **{
            **message.__dict__,
            "headers": json.loads(json.dumps(message.headers, allow_nan=False)),
            "properties": json.loads(json.dumps(message.properties, allow_nan=False)),
        }
    )
    # A beat: another process, which knows neither the task nor the caller's settings.
    beat = Celery("calls", broker="memory://", set_as_current=False)
    publisher = publisher_for(beat, timeout=5)
    (delivery,) = publisher.publish([Outgoing("t", kept, direct_expiration(direct))])
    assert delivery.outcome is Outcome.CONFIRMED, delivery
    publisher.close()
    (stored,) = waiting(app, queue)
    return comparable(direct), comparable(stored)


def direct_expiration(direct: dict[str, Any]) -> float | None:
    expiration = direct["properties"].get("expiration")
    return None if expiration is None else int(expiration) / 1000


SIGNATURES: dict[str, Callable[[Celery], dict[str, Any]]] = {
    "plain": lambda app: {},
    "link": lambda app: {"link": app.signature("calls.add", args=(1,)), "link_error": app.signature("other.handler")},
    "links": lambda app: {"link": [app.signature("calls.add"), app.signature("other.task", queue="q2")]},
    "chain": lambda app: {"chain": [app.signature("third.task"), app.signature("second.task")]},
    "headers": lambda app: {"headers": {"x-tenant": 7, "nested": {"a": [1, None, {"b": 2}]}}},
    "typed headers": lambda app: {
        "headers": {
            "when": datetime(2030, 1, 1, tzinfo=timezone.utc),
            "deep": {"id": [uuid.UUID(int=7), Decimal("1.10")], "raw": b"\xff\x00"},
        }
    },
    "text headers": lambda app: {
        "headers": {"nul": "a\x00b", "日本": "é e\u0301 👩\u200d👩\u200d👧", "half": "\ud800"}
    },
    "priority": lambda app: {"priority": 7},
    "no priority": lambda app: {"priority": None},
    "expires in": lambda app: {"expires": datetime.now(timezone.utc) + timedelta(hours=1)},
    "limits": lambda app: {"time_limit": 60, "soft_time_limit": 30},
    "stamps": lambda app: {"stamped_headers": ["batch"], "batch": ["b1", "b2"]},
    "canvas ids": lambda app: {
        "root_id": "r", "parent_id": "p", "group_id": "g", "group_index": 3, "chord": {"task": "x", "args": []}
    },
    "shadow": lambda app: {"shadow": "billing.charge", "retries": 2, "replaced_task_nesting": 1},
    "zlib": lambda app: {"compression": "zlib"},
    "pickle": lambda app: {"serializer": "pickle"},
    "yaml": lambda app: {"serializer": "yaml"},
    "reply": lambda app: {"reply_to": "answers", "message_id": "m1", "app_id": "shop"},
    "transient": lambda app: {"delivery_mode": "transient"},
    "ignored": lambda app: {"ignore_result": True},
    "kept": lambda app: {"ignore_result": False},
    "repr": lambda app: {"argsrepr": "(secret)", "kwargsrepr": "{secret}"},
    "retry policy": lambda app: {"retry": True, "retry_policy": {"max_retries": 1}, "timeout": 3},
}  # fmt: skip


@pytest.mark.parametrize("which", SIGNATURES)
@pytest.mark.parametrize("task", ["calls.add", "unknown.task"])
def test_published_later_equals_published_now(app: Celery, which: str, task: str) -> None:
    """C89: headers, priority, root id and the like are those of a direct call."""
    options = {"task_id": "id-1", **SIGNATURES[which](app)}
    direct, stored = direct_and_stored(app, task, (1, "zwei"), {"y": 3} if task == "unknown.task" else {}, options)
    assert stored == direct


def test_msgpack_body(app: Celery) -> None:
    pytest.importorskip("msgpack")
    direct, stored = direct_and_stored(
        app, "calls.add", (1, b"\x00\xff"), {}, {"task_id": "i", "serializer": "msgpack"}
    )
    assert stored == direct


def test_options_of_the_task_apply(app: Celery) -> None:
    direct, stored = direct_and_stored(
        app, app.tasks["calls.ignored"], (), {}, {"task_id": "i", "queue": "special"}, "special"
    )
    assert stored == direct
    assert stored["content-type"] == "application/x-yaml"
    assert stored["headers"]["ignore_result"] is True
    assert stored["headers"]["timelimit"] == [90, None]


def test_queue_routes_and_topic_exchange(app: Celery) -> None:
    app.conf.task_routes = {"calls.*": {"queue": "routed", "priority": 2}}
    direct, stored = direct_and_stored(app, "calls.add", (1,), {}, {"task_id": "i"}, queue="routed")
    assert stored == direct
    assert render(app, "calls.add", (1,)).message.queue == "routed"


@pytest.mark.parametrize(
    "value",
    [
        datetime(2030, 5, 6, 7, 8, 9, 10, tzinfo=timezone.utc),
        datetime(2030, 5, 6, 7, 8, 9),
        date(2030, 5, 6),
        time(7, 8, 9),
        uuid.UUID(int=5),
        Decimal("10.50"),
        {"a": [Decimal("1.0"), {"b": uuid.UUID(int=6)}]},
    ],
)
def test_argument_types_survive_as_in_a_direct_call(app: Celery, value: Any) -> None:
    """C97: the body holds what a plain call with the same versions sends."""
    direct, stored = direct_and_stored(app, "calls.add", (value,), {"y": value}, {"task_id": "i"})
    assert stored == direct


@pytest.mark.parametrize("text", ["漢字", "مرحبا", "👩\u200d👩\u200d👧\u200d👦", "é", "e\u0301", "a\x00b", "\ud800"])
def test_texts_of_any_script(app: Celery, text: str) -> None:
    """C101: arguments round-trip byte-equal, composed and decomposed forms stay different."""
    direct, stored = direct_and_stored(app, "calls.add", (text,), {"y": {text: text}}, {"task_id": "i"})
    assert stored == direct


class Model:
    """Stands for an ORM object."""


@pytest.mark.parametrize("value", [object(), Model(), lambda: None, {1j}], ids=["object", "orm", "lambda", "set"])
def test_unserializable_arguments_are_refused_at_the_call(app: Celery, value: Any) -> None:
    """C98: what a plain call refuses raises at the call, as a ValueError that names the cause."""
    task = app.tasks["calls.add"]
    with pytest.raises(Exception) as plain:
        task.apply_async((value,))
    with pytest.raises(InvalidTimer, match="cannot be serialized as json") as ours:
        render(app, task, (value,))
    assert type(ours.value.__cause__) is type(plain.value)
    with pytest.raises(InvalidTimer):
        list(render_many(app, task, [("a", (1,), {}), ("b", (value,), {})]))


def test_unserializable_in_pickle_too(app: Celery) -> None:
    """C98: a lambda cannot be pickled."""
    with pytest.raises(InvalidTimer, match="pickle"):
        render(app, "calls.add", (lambda: None,), options={"serializer": "pickle"})


@pytest.mark.parametrize("options", [{"serializer": "none-such"}, {"compression": "none-such"}])
def test_unknown_codecs_are_refused(app: Celery, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimer, match="none-such"):
        render(app, "calls.add", (1,), options=options)


@pytest.mark.parametrize("header", [float("nan"), float("inf"), object(), {"__type__": "nobody", "__value__": 1}])
def test_headers_that_json_cannot_carry_are_refused(app: Celery, header: Any) -> None:
    with pytest.raises(InvalidTimer, match="headers cannot be stored"):
        render(app, "calls.add", (1,), options={"headers": {"x": header}})


def test_arguments_that_do_not_fit_are_refused_as_celery_does(app: Celery) -> None:
    with pytest.raises(TypeError):
        render(app, "calls.add", (1, 2, 3))
    with pytest.raises(TypeError):
        list(render_many(app, "calls.add", [("a", (1,), {}), ("b", (), {"z": 1})]))


@pytest.mark.parametrize("option", [{"eta": datetime(2030, 1, 1)}, {"countdown": 5}])
def test_eta_has_no_place_in_a_stored_call(app: Celery, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimer, match="the timer itself says when"):
        render(app, "calls.add", (1,), options=option)
    assert render(app, "calls.add", (1,), options={"eta": None, "countdown": 0}).message.headers["eta"] is None


def test_protocol_1_is_refused(app: Celery) -> None:
    app.conf.task_protocol = 1
    with pytest.raises(ImproperlyConfigured, match="Set it to 2"):
        render(app, "calls.add", (1,))


def test_nothing_is_contacted(app: Celery) -> None:
    """Neither broker nor result backend: both point to a closed port."""
    lonely = Celery("lonely", broker="amqp://127.0.0.1:1//", backend="redis://127.0.0.1:1/0", set_as_current=False)
    lonely.conf.task_send_sent_event = True
    lonely.conf.task_queues = [Queue("big", queue_arguments={"x-queue-type": "quorum"})]
    lonely.conf.task_default_queue = "big"

    @lonely.task(name="lonely.task", shared=False)
    def task() -> None:
        return None

    rendered = render(lonely, task, options={"link": task.s(), "expires": 60})
    assert rendered.ignore_result is False
    assert rendered.message.headers["ignore_result"] is False
    assert rendered.message.queue == "big"
    assert render(lonely, "else.where").ignore_result is False


def test_publish_signals_fire_in_the_callers_process(app: Celery) -> None:
    seen: list[str] = []

    def before(headers: dict[str, Any], **_: Any) -> None:
        seen.append("before")
        headers["traceparent"] = "00-1"

    def after(**_: Any) -> None:
        seen.append("after")

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        assert render(app, "calls.add", (1,)).message.headers["traceparent"] == "00-1"
        many = list(render_many(app, "calls.add", [(None, (i,), {}) for i in range(5)]))
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert seen == ["before", "after"] * 2
    assert [each.message.headers["traceparent"] for each in many] == ["00-1"] * 5


def test_own_headers_are_added_and_those_of_another_delivery_left_out(app: Celery) -> None:
    """C89: a header of the user goes on into the retry, the product's do not."""
    inherited = {"x-tenant": 7, "durable_timer": "old", "durable_fence": 5}
    message = render(
        app,
        "calls.add",
        (1,),
        options={"headers": inherited},
        headers={"durable_timer": "new", "durable_leased": True},
    ).message
    assert message.headers["x-tenant"] == 7
    assert message.headers["durable_timer"] == "new"
    assert message.headers["durable_leased"] is True
    assert "durable_fence" not in message.headers
    assert inherited["durable_timer"] == "old"


def test_parent_and_root_of_the_running_task(app: Celery) -> None:
    rendered = []

    @app.task(name="calls.parent", shared=False, bind=True)
    def parent(self: Any) -> None:
        rendered.append(render(app, "calls.add", (1,), options={"task_id": "child"}))

    app.tasks["calls.parent"].apply(task_id="mother")
    headers = rendered[0].message.headers
    assert (headers["root_id"], headers["parent_id"]) in {("mother", "mother"), ("child", None)}


@pytest.mark.parametrize("task", ["calls.add", "unknown.task"])
def test_always_eager_renders_and_does_not_run(app: Celery, task: str) -> None:
    expected = render(app, task, (1,), options={"task_id": "i"})
    app.conf.task_always_eager = True
    eager = render(app, task, (1,), options={"task_id": "i"})
    assert eager == expected


def test_expiry_becomes_an_instant(app: Celery) -> None:
    now = datetime.now(timezone.utc)
    in_an_hour = render(app, "calls.add", (1,), options={"expires": 3600}).expires_at
    assert in_an_hour is not None and timedelta(0) <= in_an_hour - now - timedelta(hours=1) < timedelta(minutes=1)
    naive = render(app, "calls.add", (1,), options={"expires": datetime(2090, 1, 1, 12)}).expires_at
    assert naive == datetime(2090, 1, 1, 12, tzinfo=timezone.utc)
    text = render(app, "calls.add", (1,), options={"expires": "2090-01-01T12:00:00+02:00"}).expires_at
    assert text == datetime(2090, 1, 1, 10, tzinfo=timezone.utc)
    assert "expiration" not in render(app, "calls.add", (1,), options={"expires": 60}).message.properties
    assert render(app, "calls.add", (1,)).expires_at is None


def test_many_equal_one_by_one(app: Celery) -> None:
    options = {
        "queue": "q", "priority": 3, "link": app.signature("calls.add"), "compression": "zlib", "headers": {"x": 1},
        "expires": datetime(2090, 1, 1, tzinfo=timezone.utc),
    }  # fmt: skip
    calls: list[tuple[str, Any, Any]] = [
        ("a", (1,), {}), ("b", ("it's", 2.5), None), ("c", [None], {"y": {"deep": [1, {"z": ()}]}}),
        ("d", ("x" * 5000,), {"y": True}), ("e", (), {"x": 1}),
    ]  # fmt: skip
    for task in ("calls.add", "unknown.task"):
        many = list(render_many(app, task, calls, options, headers={"durable_leased": False}))
        single = [
            render(app, task, args, kwargs, {**options, "task_id": task_id}, headers={"durable_leased": False})
            for task_id, args, kwargs in calls
        ]
        assert many == single
        assert len({id(each.message.headers) for each in many}) == len(many)


def test_many_ids_are_made_and_ids_in_options_left_out(app: Celery) -> None:
    many = list(render_many(app, "calls.add", [(None, (i,), {}) for i in range(3)], {"task_id": "same"}))
    assert len({each.task_id for each in many}) == 3
    for each in many:
        assert each.task_id == each.message.headers["id"] == each.message.properties["correlation_id"]


def test_a_router_function_sees_the_arguments_of_each_call(app: Celery) -> None:
    def by_size(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> dict[str, str]:
        return {"queue": f"size-{args[0]}"}

    app.conf.task_routes = (by_size,)
    many = list(render_many(app, "calls.add", [(None, (i,), {}) for i in range(3)]))
    assert [each.message.queue for each in many] == ["size-0", "size-1", "size-2"]


def test_a_signature_of_a_canvas_keeps_its_callbacks(app: Celery) -> None:
    add = app.tasks["calls.add"]
    signature = chain(add.s(1), add.s(2), group(add.s(3), add.s(4)))
    direct, stored = direct_and_stored(
        app, "calls.add", (1,), {}, {"task_id": "i", "chain": list(reversed(signature.tasks[1:]))}
    )
    assert stored == direct


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(
    st.lists(VALUES, max_size=5).map(tuple) | st.lists(SCALARS) | st.dictionaries(st.text(), VALUES),
    st.integers(20, 200),
)
def test_the_short_way_of_argument_texts_is_celerys(value: Any, limit: int) -> None:
    assert shown(value, limit) == saferepr(value, limit)


TYPED = (
    st.datetimes() | st.dates() | st.uuids() | st.decimals(allow_nan=False) | st.binary() | st.integers() | st.text()
)


@given(st.dictionaries(st.text(), st.recursive(TYPED, lambda inner: st.lists(inner, max_size=3), max_leaves=5)))
def test_typed_headers_survive_json(headers: dict[str, Any]) -> None:
    assert revive(json.loads(json.dumps(storable(headers)))) == headers


def test_size_counts_body_and_headers(app: Celery) -> None:
    message = render(app, "calls.add", ("x" * 1000,)).message
    assert message.size == len(message.body) + len(json.dumps(message.headers))


def read_by_a_worker(app: Celery, message: Message) -> None:
    """Publish it on the memory broker, and take it apart as a worker and its pool do."""
    memory.Channel.queues.clear()
    publisher = publisher_for(app, timeout=5)
    (delivery,) = publisher.publish([Outgoing("t", message)])
    publisher.close()
    assert delivery.outcome is Outcome.CONFIRMED, delivery
    taken = None
    with app.connection_for_read() as connection:
        for name in list(memory.Channel.queues):
            taken = taken or Queue(name)(connection.channel()).get(no_ack=True)
        assert taken is not None
        request = Request(taken, app=app, task=app.tasks["calls.add"])
        request.maybe_expire()
        assert all(limit is None or limit >= 0 for limit in request.time_limits or ())
        assert request.info(safe=True)
        Context(request.request_dict).as_execution_options()


@pytest.mark.parametrize("where", ["option", "header"])
def test_an_option_is_refused_by_us_or_can_be_read_by_a_worker(app: Celery, where: str) -> None:
    """No other error at the call, and none later."""
    elsewhere = Celery("calls", broker="amqp://127.0.0.1:1//", set_as_current=False)
    for name in OPTIONS if where == "option" else HEADERS:
        for value in JUNK:
            options = {name: value} if where == "option" else {"headers": {name: value}}
            with contextlib.suppress(InvalidTimer):
                read_by_a_worker(app, render(app, "calls.add", (1,), {}, options).message)
            with contextlib.suppress(InvalidTimer):
                message = render(elsewhere, "calls.add", (1,), {}, options).message
                Content(Outgoing("t", message), 131_072)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "x" * 256}, "queue = 'xx"), ({"task_id": "x" * 256}, "correlation_id = 'xx"),
        ({"headers": {"n": 2**70}}, r"headers\['n'\]"), ({"headers": {"n": uuid.UUID(int=7)}}, r"headers\['n'\]"),
        ({"headers": {"x" * 256: 1}}, r"headers\['xx"), ({"headers": {"a": "x" * 140_000}}, r"headers\['a'\] = 'xx"),
        ({"headers": {"a": "x" * 70_000, "b": "x" * 70_000}}, "this message"),
    ],
)  # fmt: skip
def test_what_amqp_cannot_carry_is_refused_where_the_broker_speaks_it(
    app: Celery, options: dict[str, Any], said: str
) -> None:
    """As a direct call is; other brokers take it."""
    assert render(app, "calls.add", (1,), {}, options).message
    for settings in ({"broker_url": "amqp://127.0.0.1:1//"}, {"broker_write_url": "pyamqp://127.0.0.1:1//"}):
        elsewhere = Celery("calls", set_as_current=False)
        elsewhere.conf.update(settings)
        with pytest.raises(InvalidTimer, match=said):
            render(elsewhere, "calls.add", (1,), {}, options)
    assert render(Celery("unsaid", set_as_current=False), "calls.add", (1,), {}, options).message
