"""An app for tests of workers: short leases and back-offs, and bodies that end in every way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry

from celery_durable import DurableTask
from celery_durable.signals import lease_lost, timer_dead, timer_dispatched, timer_retried, timer_started

URL = os.environ.get("CELERY_DURABLE_DATABASE_URL", "")

app = Celery("working", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BACKEND"))
app.conf.update(
    beat_scheduler="durable",
    task_default_queue="working",
    task_track_started=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    durable_lease=float(os.environ.get("TEST_LEASE", "3")),
    durable_heartbeat=float(os.environ.get("TEST_LEASE", "3")) / 3,
    durable_claim_timeout=2,
    durable_publish_timeout=1,
    durable_sweep_interval=0.3,
    durable_poll_interval=1,
    durable_connect_timeout=2,
    durable_redispatch_after=float(os.environ.get("TEST_REDISPATCH", "300")),
)
# What else a test wants, as JSON.
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))

TABLE = """create table if not exists body (at timestamptz default clock_timestamp(), name text, task_id text,
    timer_id uuid, attempt int, retries int, key text, pid int, parent int, more json)"""

#: Short enough for a test, long enough that a delay is one.
QUICK = {"base": DurableTask, "bind": True, "shared": False, "retry_backoff": 0.2, "retry_backoff_max": 1}


def record(task: Any, name: str) -> int:
    """Note that a body has begun; returns the number of its bodies so far, this one included."""
    request, durable = task.request, task.durable
    more = {
        "tenant": request.get("x-tenant"), "priority": request.delivery_info["priority"],
        "queue": request.delivery_info["routing_key"], "root_id": request.root_id, "args": request.args,
        "kwargs": request.kwargs, "lateness": durable.lateness and durable.lateness.total_seconds(),
        "fence": durable.fence,
    }  # fmt: skip
    with psycopg.connect(URL.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(
            "insert into body (name, task_id, timer_id, attempt, retries, key, pid, parent, more)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                name, request.id, durable.timer_id, durable.attempt, request.retries,
                task.idempotency_key, os.getpid(), os.getppid(), json.dumps(more, default=str),
            ),
        )  # fmt: skip
        row = connection.execute("select count(*) from body where name = %s", (name,)).fetchone()
    assert row is not None
    return int(row[0])


def wait_for(file: str) -> None:
    """Wait until a file is there: the test says when the body may go on."""
    deadline = time.monotonic() + 60
    while not Path(file).exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.02)


@app.task(**QUICK, name="working.note")
def note(self: Any, name: str, value: Any = None) -> Any:
    """Leave a row."""
    record(self, name)
    return value


class Alone(DurableTask):
    """Runs the body by itself."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Leave ours out."""
        return self.run(*args, **kwargs)


class Around:
    """A mixin that goes on to ours, and fails in the first attempt before it does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Fail before the body."""
        if self.request.retries == 0:  # type: ignore[attr-defined]  # a mixin of tasks
            raise ConnectionError("before the body")
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # as above


class Hooked(DurableTask):
    """With every hook of Celery's, and none of them calls ours."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Before the lease."""
        self._note("before_start", args)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """After the end of the run."""
        self._note("on_success", args)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """After the end of the attempt."""
        self._note("on_retry", args)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """After the end of the run."""
        self._note("on_failure", args)

    def after_return(self, status: Any, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Last of all."""
        self._note(f"after_return {status}", args)

    def _note(self, hook: str, args: Any) -> None:
        record(self, f"{args[0]} {hook}")


@app.task(**{**QUICK, "base": Alone}, name="working.alone")
def alone(self: Any, name: str, times: int) -> str:
    """Fail so often, then return."""
    if record(self, name) <= times:
        raise ConnectionError("not yet")
    return name


@app.task(
    bind=True, shared=False, retry_backoff=0.2, name="working.around", base=type("Mixed", (Around, DurableTask), {})
)
def around(self: Any, name: str) -> str:
    """Return."""
    record(self, name)
    return name


@app.task(**{**QUICK, "base": Hooked, "max_retries": 1}, name="working.hooked")
def hooked(self: Any, name: str, times: int) -> str:
    """Fail so often, then return."""
    if record(self, name) <= times:
        raise ConnectionError("not yet")
    return name


@app.task(name="working.after", bind=True, shared=False)
def after(self: Any, value: Any, name: str) -> Any:
    """A plain callback."""
    with psycopg.connect(URL.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("insert into body (name, task_id) values (%s, %s)", (name, self.request.id))
    return value


@app.task(name="working.errback", bind=True, shared=False)
def errback(self: Any, *_: Any) -> None:
    """A callback for failures."""
    after.run(None, "errback")


@app.task(**{**QUICK, "base": Task if "TEST_FORMER" in os.environ else DurableTask}, name="working.former")
def former(self: Any, name: str) -> None:
    """A durable task that a later program has made a plain one."""
    after.run(None, name)


@app.task(**QUICK, name="working.sum")
def total(self: Any, first: Any, more: list[int]) -> int:
    """Add up what came before."""
    return sum([*(first if isinstance(first, list) else [first]), *more])


@app.task(**QUICK, name="working.flaky")
def flaky(self: Any, name: str, failures: int) -> str:
    """Fail so many times, then work."""
    if record(self, name) <= failures:
        raise ConnectionError(f"nobody there\x00 at attempt {self.request.retries + 1}")
    return name


@app.task(**{**QUICK, "max_retries": 2}, name="working.doomed")
def doomed(self: Any, name: str, cure: str = "", **_: Any) -> str:
    """Fail each time, until there is a cure."""
    record(self, name)
    if cure and Path(cure).exists():
        return "cured"
    try:
        {}["missing"]
    except KeyError as exc:
        raise ValueError(f"{name} cannot work") from exc
    return ""


@app.task(**QUICK, name="working.picky", dont_autoretry_for=(LookupError,))
def picky(self: Any, name: str, file: str = "") -> None:
    """Fail in a way that no second attempt can mend."""
    record(self, name)
    if file:
        wait_for(file)
    raise KeyError(name)


@app.task(**QUICK, name="working.waiting", soft_time_limit=None)
def waiting(self: Any, name: str, file: str) -> str:
    """Run until the file is there."""
    record(self, name)
    wait_for(file)
    self.check_lease()
    return name


@app.task(**QUICK, name="working.gate")
def gate(self: Any, name: str, file: str) -> str:
    """As waiting, without looking at the lease: the fence alone decides."""
    record(self, name)
    wait_for(file)
    return name


@app.task(**{**QUICK, "max_retries": 2}, name="working.killer")
def killer(self: Any, name: str, times: int = 1000) -> str:
    """Kill the process that runs the body, so many times."""
    if record(self, name) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


@app.task(**QUICK, name="working.leaving")
def leaving(self: Any, name: str) -> str:
    """Leave the process at the first attempt."""
    if record(self, name) == 1:
        sys.exit(3)
    return name


@app.task(**{**QUICK, "max_retries": 1}, name="working.endless", time_limit=2)
def endless(self: Any, name: str) -> None:
    """Run into the hard time limit."""
    record(self, name)
    time.sleep(60)


@app.task(**{**QUICK, "max_retries": 1}, name="working.slow", soft_time_limit=1)
def slow(self: Any, name: str) -> None:
    """Run into the soft time limit."""
    record(self, name)
    time.sleep(60)


@app.task(**QUICK, name="working.asking")
def asking(self: Any, name: str, number: int = 1, *, last: int = 3) -> int:
    """Ask for another attempt with other arguments until the last one."""
    record(self, name)
    if number < last:
        raise self.retry(args=(name, number + 1), kwargs={"last": last}, countdown=0.1, headers={"x-tenant": 8})
    return number


@app.task(**{**QUICK, "max_retries": 1}, name="working.untimely")
def untimely(self: Any, name: str, how: str) -> None:
    """Ask for an attempt at no time."""
    record(self, name)
    if how == "retry":
        raise self.retry(countdown=3e11)
    raise Retry(when=3e11)


@app.task(**QUICK, name="working.naive")
def naive(self: Any, name: str) -> str:
    """Ask, by hand, for an attempt at a UTC time that does not say so."""
    if record(self, name) == 1:
        raise Retry(when=datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(seconds=1))
    return name


@app.task(**QUICK, name="working.giving_up")
def giving_up(self: Any, name: str) -> None:
    """Ask more often than allowed."""
    record(self, name)
    raise self.retry(exc=OSError("no answer"), countdown=0, max_retries=1)


@app.task(**QUICK, name="working.swallowing")
def swallowing(self: Any, name: str) -> str:
    """Ask for a retry at the first attempt and go on."""
    if record(self, name) == 1:
        self.retry(countdown=0.1, throw=False)
    return "swallowed"


@app.task(**QUICK, name="working.ignoring")
def ignoring(self: Any, name: str) -> None:
    """Say that there is nothing to say."""
    record(self, name)
    raise Ignore("not today")


@app.task(**QUICK, name="working.rejecting")
def rejecting(self: Any, name: str, requeue: bool = False) -> str:
    """Reject the message; with requeue at the first attempt only."""
    first = record(self, name) == 1
    if first or not requeue:
        raise Reject("no good", requeue=requeue)
    return name


@app.task(**QUICK, name="working.unserializable")
def unserializable(self: Any, name: str) -> Any:
    """Return what no serializer takes."""
    record(self, name)
    return object()


@app.task(**QUICK, name="working.huge")
def huge(self: Any, name: str) -> int:
    """Return more digits than Python prints."""
    record(self, name)
    return 1 << 20_000


@app.task(**QUICK, name="working.calling_itself")
def calling_itself(self: Any, name: str, depth: int = 0) -> int:
    """Call the task as a function from within its body."""
    record(self, name) if depth == 0 else None
    return depth if depth == 3 else self(name, depth + 1)


@app.task(**QUICK, name="working.gated_failure")
def gated_failure(self: Any, name: str, file: str) -> str:
    """Fail at the first attempt, when the test says so."""
    first = record(self, name) == 1
    wait_for(file)
    if first:
        raise ConnectionError("no")
    return name


@app.task(**QUICK, name="working.gated_retry")
def gated_retry(self: Any, name: str, file: str) -> str:
    """Ask for a retry at the first attempt, when the test says so."""
    first = record(self, name) == 1
    wait_for(file)
    if first:
        raise self.retry(args=(name, file), countdown=0.1)
    return name


@app.task(**{**QUICK, "retry_backoff": 3, "retry_backoff_max": 3}, name="working.patient")
def patient(self: Any, name: str) -> None:
    """Fail at once, and wait long."""
    record(self, name)
    raise ConnectionError("no")


class DyingResult(DurableTask):
    """Kills its process after the run is settled and before any callback is sent."""

    def _leased(self, body: Any) -> Any:
        value = super()._leased(body)
        crash = Path(self.request.args[1])
        if crash.exists():
            crash.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return value


@app.task(**{**QUICK, "base": DyingResult}, name="working.dying_result")
def dying_result(self: Any, name: str, crash: str) -> str:
    """Return something to callbacks that may have to wait."""
    record(self, name)
    return "kept"


class DyingEarly(DurableTask):
    """Kills its process once, before it can take the lease."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Celery calls this with the message in hand, before the body."""
        mark = Path(args[1])
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@app.task(**{**QUICK, "base": DyingEarly}, name="working.dying_early")
def dying_early(self: Any, name: str, file: str) -> str:
    """Run at the second delivery."""
    record(self, name)
    return name


class Overriding(DurableTask):
    """Its apply_async fails whenever a running body retries."""

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Raise in a worker."""
        if self.request.id is not None and kwargs.get("producer") is None:
            raise KeyError("no such thing")
        return super().apply_async(*args, **kwargs)


@app.task(**{**QUICK, "base": Overriding}, name="working.overriding")
def overriding(self: Any, name: str) -> str:
    """Ask for a retry at the first attempt."""
    record(self, name)
    if self.durable.attempt == 1:
        raise self.retry(countdown=0)
    return name


if "TEST_NEWER" in os.environ:

    @app.task(**QUICK, name="working.newer")
    def newer(self: Any, name: str) -> str:
        """A task that only a newer program knows."""
        record(self, name)
        return name


def told(signal: Any = None, sender: Any = None, timer_id: Any = None, **more: Any) -> None:
    """Note a signal."""
    assert sender is app
    with psycopg.connect(URL.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(
            "insert into body (name, timer_id, more) values (%s, %s, %s)",
            (f"signal {signal.name}", timer_id, json.dumps(more, default=str)),
        )


if "TEST_SIGNALS" in os.environ:
    for each in (timer_dead, timer_dispatched, timer_retried, timer_started, lease_lost):
        each.connect(told, weak=False)
