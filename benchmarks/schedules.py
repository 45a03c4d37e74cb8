"""How late recurring entries that fall due together are published, beside other beats for many entries."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import Counter
from datetime import datetime
from typing import Any

import psutil

from benchmarks.beats import Beat, Durable, RedBeat, SQLAlchemyBeat, full_minute
from benchmarks.servers import servers
from tests.servers.brokers import ValkeyServer
from tests.servers.processes import CeleryNode
from tests.servers.waiting import eventually

#: Seconds that a beat waits for the entries at least, from when it is ready.
CALM = 30.0
#: Seconds until it is ready at most.
START = 30.0
#: Seconds until all are published at most.
LONGEST = 900.0
#: Seconds to look for messages beyond the expected number.
AFTERWARDS = 3.0

PEERS: dict[str, type[Beat]] = {"redbeat": RedBeat, "sqlalchemy": SQLAlchemyBeat}


def run(due: int = 1000, entries: int = 10_000, many: int = 100_000) -> dict[str, Any]:
    """Let `due` entries of `entries` come due in the same second, for each beat; for ours also of `many`.

    Returns:
        Milliseconds of lateness as ``…_p50``, ``…_p99`` and ``…_max``, seconds from the start of the process until it
        is ready as ``…_ready``, its megabytes then waiting as ``…_rss``; ``…_load`` is the machine's load just before:
        above its cores' number a figure says more of the others. ``ratio`` only when all peers could run.
    """
    found: dict[str, Any] = {
        "name": "schedules", "unit": "ms", "lower_is_better": True, "goal": 1.0, "due": due, "entries": entries,
        "units": "p50, p99, max: ms; ready: s; rss: MB",
    }  # fmt: skip
    p99s: dict[str, float] = {}
    with servers() as (_, database, valkey):
        ours = Durable(database, valkey)
        found.update(_prefixed("ours_100", _started(ours, 100)))
        found.update(_prefixed("ours_10k", _measured(ours, entries, due)))
        for name, kind in PEERS.items():
            try:
                measured = _measured(kind(database, valkey), entries, due)
            except Exception as exc:  # the others' figures are worth having without it
                found[f"{name}_error"] = f"{type(exc).__name__}: {exc}"
                continue
            found.update(_prefixed(name, measured))
            p99s[name] = measured["p99"]
        found.update(_prefixed("ours_100k", _measured(ours, many, due)))
    found["ours"] = found["ours_10k_p99"]
    if len(p99s) == len(PEERS):
        best = min(p99s, key=p99s.__getitem__)
        found.update(anchor=p99s[best], anchor_is=f"p99 of {best}", ratio=found["ours"] / p99s[best])
    return found


def _prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _started(beat: Beat, entries: int) -> dict[str, Any]:
    """What the start takes, with entries of which none is due."""
    beat.clear()
    beat.fill(entries, 0, None)
    node = beat.node()
    try:
        return {"ready": _start(beat, node), "rss": _megabytes(node)}
    finally:
        node.teardown()


def _measured(beat: Beat, entries: int, due: int) -> dict[str, Any]:
    with beat.valkey.client() as client:
        client.flushall()
    beat.clear()
    beat.fill(entries - due, due, None)
    at = full_minute(time.time() + START + CALM)
    beat.fill(due, 0, at)
    node = beat.node()
    try:
        ready = _start(beat, node)
        calm = at.timestamp() - time.time()
        assert calm >= CALM, f"{beat.module} was ready {calm:.1f} s before its entries are due, not {CALM:g} s"
        time.sleep(max(at.timestamp() - 2 - time.time(), 0))
        megabytes, load = _megabytes(node), os.getloadavg()[0]
        late = _lateness(beat.valkey, at, due)
        numbers = _numbers(beat.valkey)
    finally:
        node.teardown()
    published, duplicates = len(numbers), sum(numbers.values()) - len(numbers)
    assert published == due and set(numbers) == set(range(due)), f"{published} entries were published, not {due}"
    assert not duplicates or not isinstance(beat, Durable), f"{duplicates} duplicates"
    return {
        "p50": _nth(late, 0.5), "p99": _nth(late, 0.99), "max": late[-1], "ready": ready, "rss": megabytes,
        "duplicates": duplicates, "load": load,
    }  # fmt: skip


def _start(beat: Beat, node: CeleryNode) -> float:
    started = time.monotonic()
    node.start(wait=False)

    def ready() -> bool:
        return not node.alive() or beat.ready(node)

    eventually(ready, timeout=START * 4, message=f"{beat.module} is ready", every=0.005)
    assert node.alive(), f"{beat.module} has ended:\n{node.logs()}"
    return time.monotonic() - started


def _megabytes(node: CeleryNode) -> float:
    return float(psutil.Process(node.pid).memory_info().rss) / 1e6


def _lateness(valkey: ValkeyServer, at: datetime, number: int) -> list[float]:
    """Milliseconds after the instant at which the first, second, … message was in the queue; looked at every one."""
    due, late = at.timestamp(), []
    with valkey.client() as client:
        while len(late) < number:
            length = int(client.llen("bench"))  # type: ignore[arg-type]
            late += [(time.time() - due) * 1000] * (length - len(late))
            assert time.time() < due + LONGEST, f"{length} of {number} messages after {LONGEST:g} s"
            time.sleep(0.001)
    return late[:number]


def _nth(late: list[float], share: float) -> float:
    """The lateness that this share of the messages does not exceed."""
    return late[round(len(late) * share) - 1]


def _numbers(valkey: ValkeyServer) -> Counter[int]:
    """How often the entry of each number was published, some time after all were."""
    time.sleep(AFTERWARDS)  # there is no condition for what shall not come
    with valkey.client() as client:
        messages: Any = client.lrange("bench", 0, -1)
    return Counter(json.loads(base64.b64decode(json.loads(each)["body"]))[0][0] for each in messages)
