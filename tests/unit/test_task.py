"""DurableTask outside a worker: definition, eager runs, plain calls, and what reaches the broker."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, ImproperlyConfigured, MaxRetriesExceededError, Retry

from celery_durable import DurableTask, scheduling
from celery_durable.calls import due, instant
from celery_durable.core.moments import Moment
from celery_durable.errors import InvalidTimer
from celery_durable.messages.rendering import render
from celery_durable.worker import DurableContext
from celery_durable.worker.delivery import DELIVERIES, Delivery, new_token
from celery_durable.worker.request import DurableRequest
from celery_durable.worker.task import LEASE_STEP

IDS = {"durable_timer": str(uuid4()), "durable_call": str(uuid4())}


def make_app(**settings: Any) -> Celery:
    app = Celery("proj", broker="memory://", set_as_current=False, task_cls="celery_durable:DurableTask")
    app.conf.update(durable_database_url="postgresql+psycopg://nobody@127.0.0.1:1/none", **settings)
    app.finalize()
    return app


@pytest.fixture
def app() -> Celery:
    return make_app()


def test_task_cls_makes_every_task_of_an_app_durable(app: Celery) -> None:
    @app.task(shared=False, name="proj.mine", track_started=True)
    def mine() -> None:
        """Nothing."""

    task: Any = app.tasks["proj.mine"]
    assert isinstance(task, DurableTask)
    assert task.takes_lease
    assert task.acks_late is False  # Celery's default
    # STARTED is stored after the lease: a late duplicate must not write it over a result.
    assert (task.stores_started, task.track_started) == (True, False)
    assert LEASE_STEP in app.steps["consumer"]


def test_late_acknowledgement_is_the_apps_or_the_tasks() -> None:
    """It counts for messages without a timer; see the faults for what the worker does."""
    app = make_app(task_acks_late=True)

    @app.task(shared=False, name="proj.late")
    def late() -> None:
        """Nothing."""

    @app.task(shared=False, name="proj.early", acks_late=False)
    def early() -> None:
        """Nothing."""

    assert (app.tasks["proj.late"].acks_late, app.tasks["proj.early"].acks_late) == (True, False)


def test_celerys_own_tasks_are_left_to_celery() -> None:
    app = make_app(task_acks_late=True)
    internal = [task for name, task in app.tasks.items() if name.startswith("celery.")]
    assert len(internal) > 5
    for task in internal:
        assert not getattr(task, "takes_lease", True)
        assert task.Request == Task.Request
        assert task.acks_late is True
    assert app.steps["consumer"] == set()


def test_a_mixin_for_other_task_classes(app: Celery) -> None:
    class Theirs(Task):  # type: ignore[type-arg]  # as Django's
        def delay_on_commit(self) -> str:
            return "theirs"

    class Ours(DurableTask, Theirs):
        """Both."""

    @app.task(base=Ours, shared=False, name="proj.both")
    def both() -> None:
        """Nothing."""

    assert app.tasks["proj.both"].delay_on_commit() == "theirs"


def test_a_plain_call_and_an_eager_one(app: Celery) -> None:
    @app.task(bind=True, shared=False, name="proj.tell")
    def tell(self: Any, x: int) -> tuple[int, Any, Any]:
        self.check_lease()
        return x, self.durable, self.idempotency_key

    task = app.tasks["proj.tell"]
    first = DurableContext(attempt=1)
    assert task(1) == (1, first, None)
    assert (first.timer_id, first.lateness, first.missed) == (None, None, 0)
    result = task.apply((2,))
    assert result.get() == (2, first, result.id)
    app.conf.task_always_eager = True
    assert task.delay(3).get()[0] == 3
    assert task.apply_async((4,), countdown=60).get()[0] == 4


def test_an_eager_run_retries_at_once_as_celerys_does(app: Celery) -> None:
    runs: list[int] = []

    @app.task(bind=True, shared=False, name="proj.flaky", max_retries=2)
    def flaky(self: Any, failures: int) -> str:
        runs.append(self.request.retries)
        if len(runs) <= failures:
            raise ConnectionError(f"number {len(runs)}")
        return "works"

    assert app.tasks["proj.flaky"].apply((2,)).get() == "works"
    assert runs == [0, 1, 2]
    runs.clear()
    failed = app.tasks["proj.flaky"].apply((5,))
    assert isinstance(failed.result, ConnectionError)
    assert runs == [0, 1, 2]


def test_an_eager_run_passes_on_what_is_no_failure(app: Celery) -> None:
    @app.task(shared=False, name="proj.ignoring")
    def ignoring() -> None:
        raise Ignore

    @app.task(bind=True, shared=False, name="proj.asking")
    def asking(self: Any) -> None:
        raise self.retry(countdown=0, max_retries=1)

    assert app.tasks["proj.ignoring"].apply().state == "IGNORED"
    assert isinstance(app.tasks["proj.asking"].apply().result, MaxRetriesExceededError)
    with pytest.raises(Retry):
        app.tasks["proj.asking"]()


@pytest.fixture
def noted(app: Celery) -> Any:
    """What was stored and what was published, by a task of the app."""
    stored: list[tuple[Any, dict[str, Any]]] = []
    published: list[dict[str, Any]] = []

    @app.task(shared=False, name="proj.note")
    def note(x: int) -> None:
        """Nothing."""

    def defer(task: Any, when: Any, args: Any, kwargs: Any, options: Any) -> Any:
        stored.append((when, {"args": args, **options}))
        return SimpleNamespace(task_id="stored-id")

    def send_task(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        published.append({"args": args, **options})
        return app.AsyncResult("published-id")

    with patch.object(scheduling, "defer", defer), patch.object(app, "send_task", send_task):
        yield SimpleNamespace(task=app.tasks["proj.note"], stored=stored, published=published)


def test_what_waits_is_stored(noted: Any) -> None:
    """C102: eta and countdown, also by way of a signature, never reach the broker."""
    soon = datetime.now(timezone.utc) + timedelta(minutes=1)
    assert noted.task.apply_async((1,), eta=soon, queue="q", connection=object(), retry=False).id == "stored-id"
    noted.task.apply_async((2,), countdown=3, task_id="mine", link=noted.task.s())
    noted.task.s(3).set(countdown=4).apply_async()
    noted.task.apply_async((5,), durable=True, key="k")
    assert noted.published == []
    (when1, one), (when2, two), (when3, _), (when4, four) = noted.stored
    assert (when1, when2, when3, when4) == (soon, 3.0, 4.0, 0.0)
    assert one == {"args": (1,), "queue": "q"}
    assert (two["task_id"], two["link"]) == ("mine", noted.task.s())
    assert four == {"args": (5,), "key": "k"}


def test_what_does_not_wait_is_published(noted: Any) -> None:
    assert noted.task.delay(1).id == "published-id"
    noted.task.apply_async((2,), countdown=0, headers={"mine": 1, **IDS, "durable_leased": True})
    assert noted.stored == []
    assert [each["args"] for each in noted.published] == [(1,), (2,)]
    assert noted.published[1]["headers"] == {"mine": 1}


def test_rendering_passes_through(app: Celery) -> None:
    @app.task(shared=False, name="proj.shown")
    def shown(x: int) -> None:
        """Nothing."""

    rendered = render(app, app.tasks["proj.shown"], (1,), {}, {}, headers={**IDS, "durable_leased": True})
    assert rendered.message.headers["durable_timer"] == IDS["durable_timer"]


@pytest.mark.parametrize(
    ("eta", "expected"),
    [
        (datetime(2030, 1, 1, 12), datetime(2030, 1, 1, 12, tzinfo=timezone.utc)),
        ("2030-01-01T12:00:00", datetime(2030, 1, 1, 12, tzinfo=timezone.utc)),
        (datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2))), datetime(2030, 1, 1, 10, tzinfo=timezone.utc)),
    ],
)
def test_an_eta_keeps_celerys_meaning(eta: Any, expected: datetime) -> None:
    assert instant(eta) == expected


@pytest.mark.parametrize(
    ("when", "at", "after"),
    [
        (datetime(2030, 1, 1, 12), datetime(2030, 1, 1, 12, tzinfo=timezone.utc), None),
        ("2030-01-01T12:00:00+02:00", datetime(2030, 1, 1, 10, tzinfo=timezone.utc), None),
        (3, None, 3.0), (0.5, None, 0.5), (Decimal("0.5"), None, 0.5), (timedelta(minutes=1), None, 60.0),
    ],
)  # fmt: skip
def test_a_time_of_celerys_is_read(when: Any, at: datetime | None, after: float | None) -> None:
    assert due(when) == Moment(at=at, after=after)


@pytest.mark.parametrize(
    "when",
    [3e11, float("nan"), float("inf"), 10**400, True, "tomorrow", "", object(), datetime(9999, 1, 1), datetime.min,
     timedelta.max, Decimal("Infinity")],
)  # fmt: skip
def test_what_is_no_time_is_refused_by_its_value(when: Any) -> None:
    with pytest.raises(InvalidTimer) as caught:
        due(when)
    assert f"eta or countdown {when!r} cannot be used" in str(caught.value)


@pytest.mark.parametrize("options", [{"countdown": 3e11}, {"countdown": "soon"}, {"eta": "tomorrow"}])
def test_a_call_at_no_time_is_refused(noted: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimer, match="cannot be used"):
        noted.task.apply_async((1,), **options)
    assert (noted.stored, noted.published) == ([], [])


def test_a_delivery_is_read_from_headers() -> None:
    delivery = Delivery.of({**IDS, "durable_leased": True, "durable_token": "1-abc"})
    assert delivery is not None
    assert (str(delivery.timer_id), str(delivery.call_id)) == tuple(IDS.values())
    assert delivery.elsewhere
    own = Delivery.of({**IDS, "durable_leased": True})
    assert own is not None
    assert not own.elsewhere


@pytest.mark.parametrize(
    "headers",
    [
        {}, {**IDS, "durable_leased": False}, {"durable_leased": True}, {"durable_leased": True, "durable_timer": "x"},
        {"durable_timer": 17}, {"durable_leased": True, "durable_timer": 17}, {**IDS, "durable_leased": 1, "durable_call": [1]},
    ],
)  # fmt: skip
def test_messages_without_a_lease(headers: Mapping[str, Any]) -> None:
    assert Delivery.of(headers) is None


def test_deliveries_go_away_with_their_requests() -> None:
    class Request:
        """Weakly referenced."""

    request = Request()
    DELIVERIES.add(new_token(), request)
    assert request in DELIVERIES.requests()
    gone = id(request)
    del request
    assert gone not in map(id, DELIVERIES.requests())


def test_a_call_of_the_users_is_leased_once_for_every_task(app: Celery) -> None:
    """The wrapping is not repeated: a second binding of the class, or functools.wraps, makes no second layer."""

    class Base(DurableTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ("mine", self.run(*args, **kwargs))

    @app.task(shared=False, name="proj.called", base=Base)
    def called(value: int) -> int:
        return value

    task: Any = app.tasks["proj.called"]
    wrapped = type(task).__call__
    assert wrapped is not Base.__call__ and wrapped is not DurableTask.__call__
    task.bind(app)
    assert type(task).__call__ is wrapped
    assert task(3) == ("mine", 3), "called directly it is the user's own"


def test_a_call_from_an_annotation() -> None:
    """The settings' own, put into the class while it is bound: ours goes around it all the same."""

    def annotated(self: Any, *args: Any) -> Any:
        return ("annotated", self.run(*args))

    app = make_app(task_annotations={"proj.plain": {"__call__": annotated}})

    @app.task(shared=False, name="proj.plain")
    def plain(value: int) -> int:
        return value

    task: Any = app.tasks["proj.plain"]
    assert type(task).__call__ is not annotated and type(task).__call__.__wrapped__ is annotated
    assert task(3) == ("annotated", 3)


def test_a_binding_that_leaves_ours_out(app: Celery) -> None:
    class Base(DurableTask):
        abstract = True

        @classmethod
        def on_bound(cls, app: Any) -> None:
            """Nothing of ours."""

    with pytest.raises(ImproperlyConfigured, match=r"proj.unbound: its on_bound must call super\(\)\.on_bound"):

        @app.task(shared=False, name="proj.unbound", base=Base)
        def unbound() -> None:
            """Nothing."""


def test_a_request_class_that_is_none_of_ours(app: Celery) -> None:
    with pytest.raises(
        ImproperlyConfigured, match=r"proj.asked: Request='celery.worker.request:Request' must be a subclass"
    ):

        @app.task(shared=False, name="proj.asked", Request="celery.worker.request:Request")
        def asked() -> None:
            """Nothing."""

    with pytest.raises(ImproperlyConfigured, match=r"proj.odd: Request=5 must be a subclass"):

        @app.task(shared=False, name="proj.odd", Request=5)
        def odd() -> None:
            """Nothing."""

    @app.task(shared=False, name="proj.fine", Request=type("Mine", (DurableRequest,), {}))
    def fine() -> None:
        """Nothing."""

    assert app.tasks["proj.fine"].takes_lease
