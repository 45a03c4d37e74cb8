"""C102: calls with a countdown or an eta of a whole app wait in Postgres, and no queue holds a broker ETA."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, group

from celery_durable import DatabaseUnavailable, DurableTask, InvalidTimer, get_timer, intercept
from celery_durable.store import migrations
from celery_durable.store.database import Database
from tests.beats import Published, inline_beat, rows, states


@pytest.fixture
def published(broker_url: str) -> Published:
    return Published(broker_url)


@pytest.fixture(params=["classic", "quorum"])
def app(request: pytest.FixtureRequest, database_url: str, broker_url: str) -> Iterator[Celery]:
    """An app whose plain calls are kept from a minute on; the queue's type is RabbitMQ's, Redis has one kind."""
    app = Celery("kept", broker=broker_url, set_as_current=False)
    app.conf.update(durable_database_url=database_url, durable_intercept_eta=60, result_backend="disabled://")
    if request.param == "quorum" and broker_url.startswith("amqp"):
        app.conf.task_default_queue_type = "quorum"

    @app.task(name="kept.plain", shared=False)
    def plain(*_: Any) -> None: ...

    @app.task(name="kept.durable", base=DurableTask, shared=False)
    def durable(*_: Any) -> None: ...

    app.finalize()
    migrations.upgrade(Database.of(app), app_name=app.main)
    yield app
    app.close()
    Database.of(app).close()


LATER: tuple[dict[str, Any], ...] = (
    {"countdown": 3600},
    {"eta": datetime.now(timezone.utc) + timedelta(hours=2)},
    {"eta": (datetime.now(timezone.utc) + timedelta(hours=2)).isoformat()},
)


@pytest.mark.parametrize("later", LATER, ids=["countdown", "eta", "text"])
@pytest.mark.parametrize("name", ["kept.plain", "kept.durable", "elsewhere.unknown"])
def test_no_broker_eta_is_published(app: Celery, published: Published, name: str, later: dict[str, Any]) -> None:
    ways: list[Any] = [app.send_task(name, (1,), priority=3, **later)]
    if name in app.tasks:
        task = app.tasks[name]
        ways += [task.apply_async((1,), **later), task.s(1).set(**later).apply_async()]
        ways += group(task.s(each) for each in range(2)).apply_async(**later).children
    assert published.collect() == 0
    assert states(app) == {"waiting": len(ways)}
    for result in ways:
        timer = get_timer(result.id, app=app)
        assert timer is not None and timer.task == name
        assert timer.details is not None and timer.details.leased is (name == "kept.durable")
    found = rows(app, "select headers->>'eta' as eta, properties->>'priority' as priority from {schema}.call")
    assert {each.eta for each in found} == {None} and "3" in {each.priority for each in found}


def test_short_delays_of_plain_tasks_are_celerys(app: Celery, published: Published) -> None:
    plain, durable = app.tasks["kept.plain"], app.tasks["kept.durable"]
    plain.apply_async((1,), countdown=59)
    app.send_task("kept.plain", (1,), countdown=1)
    plain.delay(1)
    assert states(app) == {}
    durable.apply_async((1,), countdown=1)
    app.send_task("kept.durable", (1,), countdown=1)
    assert states(app) == {"waiting": 2}


def test_celerys_own_tasks_are_left_alone(app: Celery, published: Published) -> None:
    app.send_task("celery.backend_cleanup", countdown=3600)
    assert states(app) == {}


def test_it_is_dispatched_as_a_direct_call_would_have_been(app: Celery, published: Published) -> None:
    result = app.tasks["kept.plain"].apply_async((1,), countdown=3600, headers={"mine": 1})
    rows(app, "update {schema}.timer set wake_at = {schema}.clock() returning id")
    with inline_beat(app) as beat:
        beat.until(lambda: states(app) == {"sent": 1})
    if app.conf.task_default_queue_type == "quorum":
        published.arguments = {"x-queue-type": "quorum"}
    assert published.collect() == 1
    [headers] = published.headers
    assert (headers["id"], headers["eta"], headers["mine"], headers["task"]) == (result.id, None, 1, "kept.plain")


def test_a_chain_waits_as_a_whole(app: Celery, published: Published) -> None:
    plain = app.tasks["kept.plain"]
    chain(plain.s(1), plain.s(2)).apply_async(countdown=3600)
    assert published.collect() == 0 and states(app) == {"waiting": 1}


def test_nonsense_is_refused_at_the_call(app: Celery) -> None:
    for later in ({"countdown": float("nan")}, {"countdown": 1e12}, {"eta": "tomorrow"}):
        with pytest.raises(InvalidTimer):
            app.send_task("kept.plain", **later)
    assert states(app) == {}


def test_without_the_setting_plain_tasks_are_celerys(app: Celery, published: Published) -> None:
    other = Celery("other", broker=app.conf.broker_url, set_as_current=False)
    other.conf.update(result_backend="disabled://", task_default_queue="other")

    @other.task(name="other.plain", shared=False)
    def plain() -> None: ...

    other.finalize()
    intercept(other)
    intercept(other)
    plain.apply_async(countdown=3600)
    taken = Published(str(app.conf.broker_url), "other")
    assert taken.collect() == 1
    other.close()


def test_what_celery_takes_is_not_judged_where_it_is_left_alone(app: Celery, published: Published) -> None:
    app.conf.durable_intercept_eta = None
    app.tasks["kept.plain"].apply_async((1,), countdown=4e9)
    assert states(app) == {}


def test_a_plain_tasks_own_retry_is_not_lost_while_postgres_is_away(app: Celery, published: Published) -> None:
    """Celery drops a task whose retry cannot be published; a call of the application raises."""
    Database.of(app).close()
    other = Celery("away", broker=app.conf.broker_url, set_as_current=False)
    other.conf.update(
        durable_database_url="postgresql+psycopg://x@127.0.0.1:1/x", durable_intercept_eta=60, durable_connect_timeout=1,
        result_backend="disabled://", task_default_queue="away",
    )  # fmt: skip
    intercept(other)
    with pytest.raises(DatabaseUnavailable):
        other.send_task("away.plain", countdown=3600)
    other.send_task("away.plain", countdown=3600, retries=1)
    assert Published(str(app.conf.broker_url), "away").collect() == 1
    other.close()


def test_a_call_by_name_before_anything_is_finalized(database_url: str, broker_url: str) -> None:
    app = Celery("early", broker=broker_url, set_as_current=False)
    app.conf.update(durable_database_url=database_url, result_backend="disabled://")
    intercept(app)

    @app.task(name="early.durable", base=DurableTask, shared=False)
    def durable() -> None: ...

    migrations.upgrade(Database.of(app), app_name=app.main)
    app.send_task("early.durable", countdown=3600)
    assert states(app) == {"waiting": 1}
    Database.of(app).close()
    app.close()
