"""New time zone data: next times are computed anew at the start of a beat and daily."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

from celery.utils.log import get_logger

from celery_durable.beat.link import Link
from celery_durable.core import zone_data
from celery_durable.core.catchup import Policy, first
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import Spec, from_spec
from celery_durable.store import meta, schedules
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import StoredSchedule

logger = get_logger(__name__)

#: Seconds between two looks.
DAILY = 86_400.0
#: Schedules computed anew in one transaction.
PAGE = 500
#: Moved schedules that are named in the log.
NAMED = 20


class ZoneWatch:
    """Keeps the stored next times true to the time zone data that this process reads.

    Arguments:
        link: the beat's connection.
        forget: called when the data has changed: recurrences made before it hold the old.
    """

    def __init__(self, link: Link, forget: Callable[[], None]) -> None:
        self._link = link
        self._forget = forget
        self._look_at = float("-inf")
        self._read: dict[str, str] = {}

    def soon(self) -> None:
        """Look at the next turn."""
        self._look_at = float("-inf")

    def turn(self) -> None:
        """Look if it is time.

        Raises:
            DatabaseUnavailable: Postgres is away; what was not computed anew is so next time.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        zones = self._link.run(schedules.zones)
        found = zone_data.fingerprints(zones)
        if any(self._read.get(name, digest) != digest for name, digest in found.items()):
            zone_data.forget()
            self._forget()
        self._read = found
        if self._look_at == float("-inf"):
            logger.info("Time zone data is read from %s.", zone_data.source())
        known = self._link.run(meta.zone_data)
        changed = sorted(name for name, digest in found.items() if known.get(name, digest) != digest)
        if changed:
            moved = self._compute_anew(changed)
            logger.warning(
                "Time zone data of %s has changed, read from %s: %d schedules moved.",
                ", ".join(changed), zone_data.source(), moved,
            )  # fmt: skip
        if found != known:
            self._link.run(lambda executor: meta.set_zone_data(executor, {**known, **found}))
        self._look_at = now + DAILY

    def _compute_anew(self, zones: list[str]) -> int:
        after, moved = "", 0
        while True:
            last, number = self._link.transact(partial(self._page, zones=zones, after=after, named=NAMED - moved))
            moved += number
            if last is None:
                return moved
            after = last

    @staticmethod
    def _page(executor: Executor, *, zones: list[str], after: str, named: int) -> tuple[str | None, int]:
        rows = schedules.of_zones(executor, zones, after=after, page=PAGE)
        moved: dict[str, datetime | None] = {}
        for row in rows:
            try:
                stored = schedules.read(row)
                next_at = next_time(stored)
            except (InvalidSchedule, ValueError):
                continue  # its fault is noted when it comes due
            if stored.queued or next_at == stored.next_at:
                continue
            moved[stored.name] = next_at
            if len(moved) <= named:
                logger.info("Schedule %r (%s): next %s, was %s.", stored.name, stored.tz, next_at, stored.next_at)
        schedules.move(executor, moved)
        return (rows[-1].name if len(rows) == PAGE else None), len(moved)


def next_time(stored: StoredSchedule) -> datetime | None:
    """When a beat should look at a schedule, from its definition and how far it has come.

    Raises:
        InvalidSchedule: the definition cannot be understood.
    """
    policy, pause = Policy.of(stored.policy), stored.pause
    if pause is not None:
        return pause.until
    recurrence = from_spec(Spec(stored.kind, stored.text, stored.tz, stored.anchor))
    if policy.max_runs is not None and stored.fired >= policy.max_runs:
        return None
    nominal = first(recurrence, policy, stored.cursor)
    return None if nominal is None else nominal + policy.delay(stored.name)
