"""Publishers against real brokers, healthy and not."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue

from celery_durable.messages.amqp_confirms import ConfirmingPublisher
from celery_durable.messages.delivery import BrokerUnavailable, Delivery, Outcome, Outgoing, Publisher
from celery_durable.messages.one_by_one import OneByOnePublisher
from celery_durable.messages.publishers import publisher_for
from celery_durable.messages.redis_batch import RedisBatchPublisher
from celery_durable.messages.rendering import render, render_many
from tests.servers.proxy import Proxy
from tests.servers.waiting import eventually

LIMIT = 2.0
#: What a call may take beyond its limit on a loaded machine.
SLACK = 1.5

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["valkey", "rabbitmq"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def url(server: Any) -> str:
    return str(server.url)


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def proxied(server: Any, proxy: Proxy) -> str:
    """The URL of the broker behind the proxy."""
    return str(server.url).replace(f":{server.port}", f":{proxy.port}")


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Celery, Publisher]]]:
    """Apps with their publishers, closed afterwards."""
    made: list[Publisher] = []

    def build(url: str, limit: float = LIMIT, **conf: Any) -> tuple[Celery, Publisher]:
        app = Celery("pub", broker=url, set_as_current=False)
        app.conf.update(conf)
        publisher = publisher_for(app, timeout=limit)
        made.append(publisher)
        return app, publisher

    yield build
    for each in made:
        started = time.monotonic()
        each.close()
        each.close()
        assert time.monotonic() - started < 0.5, "close() waited for the broker"


def raw(connection: Connection) -> Any:
    """A channel with what only its own transport has."""
    return connection.channel()


def calls(app: Celery, count: int, queue: str, **options: Any) -> list[Outgoing]:
    """Calls of a task that this app does not know."""
    items = [(None, (index, "ä"), {"k": None}) for index in range(count)]
    many = render_many(app, "pub.task", items, {"queue": queue, **options})
    return [Outgoing(each.task_id, each.message) for each in many]


def taken(url: str, queue: str) -> list[Any]:
    """All messages of a queue, as a consumer sees them, leaving it empty."""
    messages = []
    with Connection(url) as connection:
        channel = connection.channel()
        bound = Queue(queue, Exchange(queue), routing_key=queue)(channel)
        bound.declare()
        while (message := bound.get(no_ack=True)) is not None:
            messages.append(message)
    return messages


def outcomes(deliveries: list[Delivery]) -> list[Outcome]:
    return [each.outcome for each in deliveries]


def timed(publisher: Publisher, outgoing: list[Outgoing]) -> tuple[list[Delivery] | BrokerUnavailable, float]:
    started = time.monotonic()
    try:
        result: list[Delivery] | BrokerUnavailable = publisher.publish(outgoing)
    except BrokerUnavailable as exc:
        result = exc
    return result, time.monotonic() - started


@pytest.fixture
def queue(url: str, request: pytest.FixtureRequest) -> str:
    name = f"q-{request.node.name}-{time.monotonic_ns()}".replace("[", "-").replace("]", "")
    return name[:120]


def test_the_fitting_publisher(url: str, make: Any) -> None:
    _, publisher = make(url)
    if url.startswith("amqp"):
        fitting: type = ConfirmingPublisher
    else:
        # Pipelines came with Kombu 5.7.
        fitting = RedisBatchPublisher if hasattr(Producer, "batch") else OneByOnePublisher
    assert type(publisher) is fitting
    assert publisher.publish([]) == []


def test_redis_that_may_repeat_a_pipeline_is_served_one_by_one(valkey: Any, make: Any) -> None:
    app, publisher = make(str(valkey.url), broker_transport_options={"retry_on_timeout": True})
    assert type(publisher) is OneByOnePublisher
    assert outcomes(publisher.publish(calls(app, 3, "one-by-one"))) == [Outcome.CONFIRMED] * 3
    assert len(taken(str(valkey.url), "one-by-one")) == 3


def test_a_page_arrives_once_and_equal_to_direct_calls(url: str, queue: str, make: Any) -> None:
    """C89 C101: headers, properties and bodies are those of a direct call, for a page larger than a pipeline."""
    app, publisher = make(url)
    options = {"queue": queue, "priority": 3, "headers": {"x-tenant": 7, "name": "é e\u0301 日本"}, "expires": 3600}
    app.send_task("pub.task", ("direct",), {"k": "ü"}, task_id="direct", **options)
    (direct,) = taken(url, queue)

    rendered = render(app, "pub.task", ("direct",), {"k": "ü"}, {**options, "task_id": "direct"})
    outgoing = [
        Outgoing("t", replace(rendered.message, headers=json.loads(json.dumps(rendered.message.headers))), 3600.0)
    ]
    outgoing += calls(app, 1200, queue)
    deliveries = publisher.publish(outgoing)
    assert outcomes(deliveries) == [Outcome.CONFIRMED] * 1201
    assert [each.timer_id for each in deliveries] == [each.timer_id for each in outgoing]

    arrived = {each.headers["id"]: each for each in taken(url, queue)}
    assert len(arrived) == 1201
    stored = arrived["direct"]
    for each in (direct, stored):
        for name in ("origin", "expires"):
            each.headers.pop(name)
        for name in ("delivery_tag", "delivery_info"):
            each.properties.pop(name, None)
        each.properties.get("application_headers", {}).pop("origin", None)
    assert (stored.headers, stored.properties, stored.body) == (direct.headers, direct.properties, direct.body)
    assert (stored.content_type, stored.content_encoding) == (direct.content_type, direct.content_encoding)


def test_typed_headers_arrive_as_from_a_direct_call(url: str, queue: str, make: Any) -> None:
    headers = {
        "when": datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        "raw": b"ab",
        "deep": [{"price": Decimal("1.5")}],
    }
    app, publisher = make(url)
    app.send_task("pub.task", queue=queue, headers=headers, task_id="i")
    (direct,) = taken(url, queue)
    message = render(app, "pub.task", options={"queue": queue, "headers": headers, "task_id": "i"}).message
    kept = replace(message, headers=json.loads(json.dumps(message.headers)))
    assert outcomes(publisher.publish([Outgoing("t", kept)])) == [Outcome.CONFIRMED]
    (stored,) = taken(url, queue)
    assert {name: stored.headers[name] for name in headers} == {name: direct.headers[name] for name in headers}


def test_missing_exchange_is_returned_and_the_rest_goes_on(url: str, queue: str, make: Any) -> None:
    app, publisher = make(url)
    outgoing = calls(app, 9, queue)
    lost = replace(outgoing[4].message, exchange="no-such-exchange", routing_key="x", queue=None)
    outgoing[4] = Outgoing("lost", lost)
    for _ in range(2):
        deliveries = publisher.publish(outgoing)
        assert outcomes(deliveries) == [Outcome.CONFIRMED] * 4 + [Outcome.RETURNED] + [Outcome.CONFIRMED] * 4
        assert "no-such-exchange" in deliveries[4].reason
        assert len(taken(url, queue)) == 8


def test_a_message_that_cannot_be_encoded_is_refused_alone(url: str, queue: str, make: Any) -> None:
    app, publisher = make(url)
    outgoing = calls(app, 5, queue)
    outgoing[2].message.headers["bad"] = object()
    deliveries = publisher.publish(outgoing)
    assert outcomes(deliveries) == [Outcome.CONFIRMED] * 2 + [Outcome.REFUSED] + [Outcome.CONFIRMED] * 2
    assert deliveries[2].reason
    assert len(taken(url, queue)) == 4


def test_a_message_that_the_client_library_chokes_on_is_no_outage(valkey: Any, make: Any) -> None:
    """An error of a kind that nobody foresaw: kombu itself wants to write into this property."""
    url, queue = str(valkey.url), "choking"
    app, publisher = make(url)
    outgoing = calls(app, 5, queue)
    outgoing[2].message.properties["delivery_info"] = 5
    chokes = Outcome.REFUSED if hasattr(Producer, "batch") else Outcome.FAILED
    for only in (outgoing, outgoing[2:3]):
        deliveries = publisher.publish(only)
        assert [each.outcome for each in deliveries if each.timer_id == outgoing[2].timer_id] == [chokes]
        assert outcomes(deliveries).count(Outcome.CONFIRMED) == len(only) - 1
    _, single = make(url, broker_transport_options={"retry_on_timeout": True})
    deliveries = single.publish(outgoing)
    assert outcomes(deliveries) == [Outcome.CONFIRMED] * 2 + [Outcome.FAILED] + [Outcome.CONFIRMED] * 2
    assert "update" in deliveries[2].reason
    assert len(taken(url, queue)) == 8


def test_headers_that_cannot_be_revived_are_refused(rabbitmq: Any, make: Any) -> None:
    url = str(rabbitmq.url)
    app, publisher = make(url)
    outgoing = calls(app, 3, "unrevived")
    outgoing[1].message.headers["odd"] = {"__type__": ["not", "hashable"], "__value__": 1}
    deliveries = publisher.publish(outgoing)
    assert outcomes(deliveries) == [Outcome.CONFIRMED, Outcome.REFUSED, Outcome.CONFIRMED]
    assert len(taken(url, "unrevived")) == 2


def test_a_queue_that_is_not_configured_is_returned(url: str, queue: str, make: Any) -> None:
    app, _ = make(url)
    _, publisher = make(url, task_create_missing_queues=False, task_queues=[Queue(queue)])
    outgoing = calls(app, 2, queue) + calls(app, 1, "unknown-queue")
    deliveries = publisher.publish(outgoing)
    assert outcomes(deliveries) == [Outcome.CONFIRMED] * 2 + [Outcome.RETURNED]
    assert "task_queues" in deliveries[2].reason


def test_task_sent_events_follow_the_messages(url: str, queue: str, make: Any) -> None:
    app, publisher = make(url, task_send_sent_event=True)
    seen: list[dict[str, Any]] = []

    def watch() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"task-sent": seen.append})
            with contextlib.suppress(TimeoutError):
                receiver.capture(limit=None, timeout=4, wakeup=False)

    watcher = threading.Thread(target=watch)
    watcher.start()
    published: list[Outgoing] = []

    def noticed() -> bool:
        # What was published before the watcher had subscribed is not seen.
        (each,) = calls(app, 1, queue)
        published.append(each)
        assert outcomes(publisher.publish([each])) == [Outcome.CONFIRMED]
        return len(seen) >= 2

    eventually(noticed, timeout=15, every=0.2)
    watcher.join()
    known = {each.timer_id: each.message for each in published}
    for each in seen:
        message = known[each["uuid"]]
        assert (each["name"], each["queue"], each["routing_key"]) == ("pub.task", queue, queue)
        assert (each["args"], each["root_id"]) == (message.headers["argsrepr"], each["uuid"])
    assert len(taken(url, queue)) == len(published)


# -- brokers that do not answer


def test_closed_port(url: str, make: Any) -> None:
    """B6: nothing is sent, and the caller is told so at once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    app, publisher = make(f"{url.split(':', 1)[0]}://127.0.0.1:{port}//")
    result, took = timed(publisher, calls(app, 2, "q"))
    assert isinstance(result, BrokerUnavailable)
    assert took < LIMIT + SLACK


def test_black_hole_at_connect(url: str, make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        app, publisher = make(f"{url.split(':', 1)[0]}://127.0.0.1:{hole.getsockname()[1]}//")
        result, took = timed(publisher, calls(app, 2, "q"))
    assert isinstance(result, BrokerUnavailable)
    assert took < LIMIT + SLACK


def test_black_hole_in_the_middle_is_uncertain_and_the_next_call_reconnects(
    proxied: str, proxy: Proxy, queue: str, make: Any
) -> None:
    """B5: no answer is no failure; the messages may arrive later."""
    app, publisher = make(proxied)
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2
    before = proxy.connections
    proxy.mode = "blackhole"
    result, took = timed(publisher, calls(app, 600, queue))
    assert proxy.swallowed > 0
    assert isinstance(result, list)
    assert set(outcomes(result)) == {Outcome.UNCERTAIN}
    assert re.search("no answer|[Tt]imeout", result[0].reason)
    assert took < LIMIT + SLACK
    proxy.mode = "forward"
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2
    assert proxy.connections > before


def test_a_connection_that_died_while_idle_costs_nothing(
    url: str, proxied: str, proxy: Proxy, queue: str, make: Any
) -> None:
    """B7: a broker restart between two pages is seen before anything is sent into the dead connection."""
    app, publisher = make(proxied)
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2
    before = proxy.connections
    proxy.cut()
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2
    assert proxy.connections > before
    assert len(taken(url, queue)) == 4


def test_abandon_ends_a_call_in_progress(proxied: str, proxy: Proxy, queue: str, make: Any) -> None:
    app, publisher = make(proxied, limit=30.0)
    assert outcomes(publisher.publish(calls(app, 1, queue))) == [Outcome.CONFIRMED]
    proxy.mode = "blackhole"
    timer = threading.Timer(0.5, publisher.abandon)
    timer.start()
    result, took = timed(publisher, calls(app, 5, queue))
    timer.join()
    assert isinstance(result, list)
    assert set(outcomes(result)) == {Outcome.UNCERTAIN}
    assert took < 5
    with pytest.raises(BrokerUnavailable, match="closed"):
        publisher.publish(calls(app, 1, queue))


def test_no_thread_outlives_its_call(url: str, queue: str, make: Any) -> None:
    app, publisher = make(url)
    publisher.publish(calls(app, 1, queue))
    before = threading.active_count()
    for _ in range(20):
        publisher.publish(calls(app, 1, queue))
    eventually(lambda: threading.active_count() <= before, timeout=5)


# -- RabbitMQ only


def test_unroutable_messages_are_returned_though_acked(rabbitmq: Any, make: Any) -> None:
    """B10: mandatory; the queue was deleted behind our back, and is declared again for the next page."""
    url, queue = str(rabbitmq.url), f"deleted-{time.monotonic_ns()}"
    app, publisher = make(url)
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2
    with Connection(url) as connection:
        raw(connection).queue_delete(queue)
    other = calls(app, 3, queue + "-other")
    mixed = [*calls(app, 120, queue), *other]
    deliveries = publisher.publish(mixed)
    assert outcomes(deliveries) == [Outcome.RETURNED] * 120 + [Outcome.CONFIRMED] * 3
    assert "NO_ROUTE" in deliveries[0].reason
    assert outcomes(publisher.publish(calls(app, 2, queue))) == [Outcome.CONFIRMED] * 2


def test_full_queue_is_returned(rabbitmq: Any, make: Any) -> None:
    """B9: RabbitMQ nacks what a full queue rejects."""
    url, name = str(rabbitmq.url), f"full-{time.monotonic_ns()}"
    full = Queue(name, queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    app, publisher = make(url, task_queues=[full])
    found = outcomes(publisher.publish(calls(app, 5, name)))
    assert found.count(Outcome.RETURNED) >= 1
    assert set(found) == {Outcome.CONFIRMED, Outcome.RETURNED}
    assert len(taken_from(url, full)) == found.count(Outcome.CONFIRMED)


def taken_from(url: str, queue: Queue) -> list[Any]:
    with Connection(url) as connection:
        bound = queue(connection.channel())
        messages = []
        while (message := bound.get(no_ack=True)) is not None:
            messages.append(message)
    return messages


def test_an_exchange_deleted_in_between_is_isolated(rabbitmq: Any, make: Any) -> None:
    """B10: a missing exchange closes the channel; the other messages of the page go on."""
    url, name = str(rabbitmq.url), f"gone-{time.monotonic_ns()}"
    app, publisher = make(url)
    queue = Queue(name, Exchange(name + "-x", "topic"), routing_key="#")
    with Connection(url) as connection:
        queue(connection.channel()).declare()
    rows = calls(app, 7, name + "-plain")
    rows[3] = Outgoing("x", replace(rows[3].message, exchange=name + "-x", routing_key="a", queue=None))
    assert outcomes(publisher.publish(rows)) == [Outcome.CONFIRMED] * 7
    with Connection(url) as connection:
        raw(connection).exchange_delete(name + "-x")
    deliveries = publisher.publish(rows)
    assert [each.timer_id for each in deliveries if each.outcome is not Outcome.CONFIRMED] == ["x"]
    assert deliveries[3].outcome is Outcome.RETURNED
    assert "NOT_FOUND" in deliveries[3].reason
    assert outcomes(publisher.publish(calls(app, 2, name + "-plain"))) == [Outcome.CONFIRMED] * 2


def test_a_queue_with_other_arguments_is_returned(rabbitmq: Any, make: Any) -> None:
    url, name = str(rabbitmq.url), f"other-{time.monotonic_ns()}"
    with Connection(url) as connection:
        Queue(name, queue_arguments={"x-max-priority": 3})(connection.channel()).declare()
    app, publisher = make(url)
    rows = [*calls(app, 2, name), *calls(app, 2, name + "-fine")]
    deliveries = publisher.publish(rows)
    assert outcomes(deliveries) == [Outcome.RETURNED] * 2 + [Outcome.CONFIRMED] * 2
    assert "PRECONDITION_FAILED" in deliveries[0].reason


def test_headers_larger_than_a_frame_are_refused(rabbitmq: Any, make: Any) -> None:
    """RabbitMQ would close the whole connection.  Stored by an app that has named no broker."""
    url, name = str(rabbitmq.url), f"large-{time.monotonic_ns()}"
    app, publisher = make(url)
    rows = calls(app, 3, name)
    rows[1].message.headers["x"] = "y" * 140_000
    assert outcomes(publisher.publish(rows)) == [Outcome.CONFIRMED, Outcome.REFUSED, Outcome.CONFIRMED]


def test_large_bodies_that_come_back_do_not_stall(rabbitmq: Any, make: Any) -> None:
    url = str(rabbitmq.url)
    app, publisher = make(url, limit=20.0)
    queue = f"bodies-{time.monotonic_ns()}"
    publisher.publish(calls(app, 1, queue))
    with Connection(url) as connection:
        raw(connection).queue_delete(queue)
    row = render(app, "pub.task", ("x" * 500_000,), options={"queue": queue}).message
    deliveries = publisher.publish([Outgoing(str(index), row) for index in range(100)])
    assert outcomes(deliveries) == [Outcome.RETURNED] * 100


def test_blocked_broker(rabbitmq: Any, make: Any) -> None:
    """B8: a memory alarm. The page sent into it is uncertain, the next is not sent, and all goes on afterwards."""
    url, name = str(rabbitmq.url), f"blocked-{time.monotonic_ns()}"
    app, publisher = make(url)
    assert outcomes(publisher.publish(calls(app, 1, name))) == [Outcome.CONFIRMED]
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
    try:
        result, took = timed(publisher, calls(app, 50, name))
        assert isinstance(result, list)
        assert set(outcomes(result)) == {Outcome.UNCERTAIN}
        assert "blocked" in result[0].reason
        assert took < LIMIT + SLACK
        result, took = timed(publisher, calls(app, 50, name))
        assert isinstance(result, BrokerUnavailable)
        assert "blocked" in str(result)
        assert took < SLACK
        _, new = make(url)
        result, took = timed(new, calls(app, 5, name))
        assert isinstance(result, BrokerUnavailable) or set(outcomes(result)) == {Outcome.UNCERTAIN}
        assert took < LIMIT + SLACK
    finally:
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")

    def flows() -> bool:
        result, _ = timed(publisher, calls(app, 3, name))
        return isinstance(result, list) and outcomes(result) == [Outcome.CONFIRMED] * 3

    eventually(flows, timeout=20)


# -- Valkey only


def test_full_memory_is_not_taken_for_success(valkey: Any, make: Any) -> None:
    """B9: Redis refuses writes over its memory limit."""
    url = str(valkey.url)
    app, publisher = make(url)
    with Connection(url) as connection:
        client = raw(connection).client
        client.config_set("maxmemory", "1")
        try:
            result, _ = timed(publisher, calls(app, 5, "full-memory"))
            assert isinstance(result, BrokerUnavailable) or Outcome.CONFIRMED not in outcomes(result)
        finally:
            client.config_set("maxmemory", "0")
    assert outcomes(publisher.publish(calls(app, 2, "full-memory"))) == [Outcome.CONFIRMED] * 2


def test_stopped_valkey(valkey: Any, make: Any) -> None:
    """B5: a server that is frozen for longer than the limit."""
    app, publisher = make(str(valkey.url))
    assert outcomes(publisher.publish(calls(app, 1, "stopped"))) == [Outcome.CONFIRMED]
    valkey.pause()
    try:
        result, took = timed(publisher, calls(app, 5, "stopped"))
        again, took_again = timed(publisher, calls(app, 5, "stopped"))
    finally:
        valkey.resume()
    assert isinstance(result, list)
    assert set(outcomes(result)) == {Outcome.UNCERTAIN}
    assert isinstance(again, BrokerUnavailable)
    assert max(took, took_again) < LIMIT + SLACK
    assert outcomes(publisher.publish(calls(app, 1, "stopped"))) == [Outcome.CONFIRMED]


def test_priorities_lie_in_their_own_lists(valkey: Any, make: Any) -> None:
    url = str(valkey.url)
    app, publisher = make(url)
    rows = [*calls(app, 2, "steps", priority=0), *calls(app, 3, "steps", priority=9)]
    assert outcomes(publisher.publish(rows)) == [Outcome.CONFIRMED] * 5
    with Connection(url) as connection:
        client = raw(connection).client
        assert client.llen("steps") == 2
        assert client.llen("steps\x06\x169") == 3
