"""What celery-durable relies on in Celery without Celery promising it; run with the oldest and the newest release."""

from __future__ import annotations

import inspect
import pickle
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery, Task, signals
from celery.app import trace
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context
from celery.apps import worker
from celery.exceptions import Ignore, Retry
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request, create_request_cls
from kombu.utils.imports import symbol_by_name

from celery_durable import DuplicateDelivery, DurableTask
from celery_durable.worker.heartbeat import CANCELLING, CANCELLING_5_5, LeaseStep
from celery_durable.worker.request import DurableRequest
from celery_durable.worker.task import LEASE_STEP


@pytest.fixture
def app() -> Celery:
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    app.finalize()
    return app


def identity(x: Any, y: Any = 0) -> Any:
    """A body."""
    return x


def define(app: Celery, base: type[Any], body: Any, **options: Any) -> Any:
    app.task(base=base, shared=False, name="proj.task", **options)(body)
    return app.tasks["proj.task"]


def message(app: Celery, **headers: Any) -> Any:
    """A delivered message of ``proj.task``, as far as a request looks at it."""
    task_id = uuid4().hex
    sent = app.amqp.create_task_message(task_id, "proj.task", (1,), {})
    return Mock(
        headers={**sent.headers, **headers}, body=sent.body, payload=sent.body, content_type="application/json",
        content_encoding="utf-8", delivery_info={}, properties=sent.properties,
    )  # fmt: skip


def test_celery_takes_us_for_a_task_that_it_has_wrapped(app: Celery) -> None:
    """add_autoretry_behaviour wraps ``run`` of a task with autoretry_for, unless it has ``_orig_run``."""

    def body() -> None:
        """Nothing."""

    theirs = Celery("other", set_as_current=False)
    wrapped = define(theirs, Task, body, autoretry_for=(ValueError,))
    assert wrapped.run is not body
    ours = define(app, DurableTask, body, autoretry_for=(ValueError,), retry_backoff=0.5)
    assert ours.run is body
    add_autoretry_behaviour(ours, autoretry_for=(ValueError,))
    assert ours.run is body


def test_the_request_class_is_kept_but_for_two_methods(app: Celery) -> None:
    """create_request_cls subclasses what ``Task.Request`` names, and replaces these two without asking."""
    task = define(app, DurableTask, identity)
    assert symbol_by_name(task.Request) is DurableRequest
    made = create_request_cls(DurableRequest, task, Mock(), "host", Mock(enabled=False), app=app)
    replaced = {name for name in vars(made) if not name.startswith("__")}
    assert replaced == {"execute_using_pool", "on_success"}


def test_celery_calls_what_we_override() -> None:
    """The names, and what they are given."""
    for name in (
        "on_accepted", "on_failure", "on_timeout", "terminate", "cancel", "_announce_revoked", "_announce_cancelled",
    ):  # fmt: skip
        assert callable(getattr(Request, name))
    shutdown = inspect.getsource(worker.on_cold_shutdown)
    assert [
        name for name in (CANCELLING, CANCELLING_5_5) if f"consumer.{name}()" in shutdown and hasattr(Consumer, name)
    ]
    assert list(inspect.signature(Request.on_failure).parameters) == [
        "self", "exc_info", "send_failed_event", "return_ok",
    ]  # fmt: skip
    assert list(inspect.signature(Request.on_timeout).parameters) == ["self", "soft", "timeout"]
    assert list(inspect.signature(getattr(Request, "_announce_revoked")).parameters) == [  # noqa: B009 - untyped
        "self", "reason", "terminated", "signum", "expired",
    ]  # fmt: skip
    assert Request._already_cancelled is False  # type: ignore[attr-defined]  # not in celery-types
    assert Request._already_revoked is False  # type: ignore[attr-defined]  # as above


def test_the_token_reaches_the_process_of_the_body(app: Celery) -> None:
    """The request's dict is what the pool's process gets, and its items become attributes of ``self.request``."""
    task = define(app, DurableTask, identity)
    headers = {"durable_timer": str(uuid4()), "durable_leased": True, "x-mine": 1}
    request = DurableRequest(message(app, **headers), app=app, task=task)
    assert request.delivery is not None
    assert request.request_dict["durable_token"] == request.delivery.token
    context = Context(request.request_dict)
    assert context.get("durable_token") == request.delivery.token
    assert vars(context)["durable_leased"] is True
    assert context.headers is not None
    assert context.headers["x-mine"] == 1
    plain = DurableRequest(message(app), app=app, task=task)
    assert plain.delivery is None
    assert "durable_token" not in plain.request_dict


def test_a_duplicate_leaves_no_trace(app: Celery) -> None:
    """An Ignore from ``__call__``: no result, no success, no failure, no retry."""
    seen: list[str] = []

    class Skipping(DurableTask):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise DuplicateDelivery("duplicate")

    task = define(app, Skipping, identity)
    assert issubclass(DuplicateDelivery, Ignore)
    task.backend = Mock()
    receivers = {}
    for name in ("task_success", "task_failure", "task_retry"):
        receivers[name] = lambda name=name, **_: seen.append(name)
        getattr(signals, name).connect(receivers[name], weak=False)
    try:
        tracer = trace.build_tracer(task.name, task, app=app)
        retval, info = tracer(uuid4().hex, (1,), {}, {})[:2]
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert info.state == "IGNORED"
    assert seen == []
    task.backend.mark_as_done.assert_not_called()
    task.backend.mark_as_failure.assert_not_called()
    task.backend.store_result.assert_not_called()
    # The parent process is told the reason.
    assert pickle.loads(pickle.dumps(DuplicateDelivery("cancelled"))).reason == "cancelled"
    assert isinstance(retval.exception.exc, DuplicateDelivery)


def test_a_custom_call_is_used(app: Celery) -> None:
    """The tracer calls the task instead of ``run`` exactly because ``__call__`` is overridden."""
    task = define(app, DurableTask, identity)
    assert trace.task_has_custom(task, "__call__")


def test_celerys_retry_makes_its_call_by_apply_async(app: Celery) -> None:
    """With all that has to stay: our own apply_async keeps it instead of publishing it."""
    calls: list[tuple[Any, Any, dict[str, Any]]] = []

    class Noting(Task):  # type: ignore[type-arg]  # as DurableTask's own base
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:  # type: ignore[override]
            calls.append((args, kwargs, options))

    task = define(app, Noting, identity)
    request = Context(
        {"id": "the-id", "args": [1], "kwargs": {"y": 2}, "root_id": "root", "called_directly": False, "retries": 1,
         "callbacks": [{"task": "a"}], "expires": "2030-01-01T00:00:00+00:00", "headers": {"x-mine": 1},
         "delivery_info": {"exchange": "", "routing_key": "q", "priority": 5, "redelivered": False}}
    )  # fmt: skip
    task.request_stack.push(request)
    try:
        signal = task.retry(countdown=7, throw=False)
        with pytest.raises(OSError, match="over"):
            task.retry(exc=OSError("over"), max_retries=1)
    finally:
        task.request_stack.pop()
    [(args, kwargs, options)] = calls
    assert isinstance(signal, Retry)
    assert (list(args), kwargs) == ([1], {"y": 2})
    assert options["countdown"] == 7
    wanted = {
        "task_id": "the-id",
        "root_id": "root",
        "retries": 2,
        "queue": "q",
        "priority": 5,
        "link": [{"task": "a"}],
    }
    assert wanted.items() <= options.items()
    assert options["headers"] == {"x-mine": 1}


def test_steps_may_be_given_by_name() -> None:
    """So that a client process does not load the worker's side."""
    blueprint = Consumer.Blueprint(steps={LEASE_STEP})
    name, step = blueprint.load_step(LEASE_STEP)
    assert (name, step) == (LeaseStep.name, LeaseStep)
    assert f"{Tasks.__module__}:Tasks" in LeaseStep.requires


def test_the_worker_knows_which_requests_are_active(app: Celery) -> None:
    task = define(app, DurableTask, identity)
    request = DurableRequest(message(app, durable_timer=str(uuid4()), durable_leased=True), app=app, task=task)
    assert not request.active
    state.task_accepted(request)
    assert request.active
    state.task_ready(request)
    assert not request.active


def test_the_body_sees_its_request_in_a_worker(app: Celery) -> None:
    """Workers protect the request stack: ``super().__call__`` does not hide the running request."""
    source = inspect.getsource(trace._install_stack_protection)  # type: ignore[attr-defined]  # not in celery-types
    assert "_protected" in source
    assert "called_directly" in source
