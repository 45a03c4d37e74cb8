"""When a schedule comes due: the public face of the recurrence rules.

Cron text, intervals and Celery's own schedule objects become one thing, a
:class:`Recurrence`, whose methods are pure functions of an instant::

    >>> from datetime import datetime, timezone
    >>> nightly = Cron("30 2 * * *", tz="Europe/Berlin")
    >>> nightly.next_after(datetime(2026, 3, 28, 12, tzinfo=timezone.utc))
    datetime.datetime(2026, 3, 29, 1, 0, tzinfo=datetime.timezone.utc)

The time rule is described in :mod:`celery_durable.core.recurrence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from celery.schedules import BaseSchedule, ParseException, crontab, schedule, solar

from celery_durable.core import recurrence as core
from celery_durable.core.recurrence import EPOCH, Crontab, Recurrence
from celery_durable.core.zones import Zone, as_zone
from celery_durable.errors import InvalidSchedule
from celery_durable.schedule_objects import ObjectRecurrence, Solar, from_crontab, host_zone, warn_of_misread

if TYPE_CHECKING:
    from typing import TypeAlias

    #: Whatever can say when a task is due.
    When: TypeAlias = "Recurrence | BaseSchedule | timedelta | float | str"

__all__ = ["Cron", "Every", "Recurrence", "Spec", "from_celery", "from_spec", "to_spec"]

_MICROSECOND = timedelta(microseconds=1)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except core.RecurrenceError as exc:
        raise InvalidSchedule(str(exc)) from exc


class Cron(core.Cron):
    """Cron text in a zone.

    Arguments:
        text: Five fields (minute hour day-of-month month day-of-week), six with the *seconds
            first*, or ``@yearly``, ``@monthly``, ``@weekly``, ``@daily``, ``@hourly``. Names,
            ranges, steps, lists, ``L``, ``5L``, ``5#3``, ``15W`` and ``?`` are understood. Day-of-month
            OR day-of-week where neither begins with ``*``.
        tz: IANA name, or a zoneinfo, pytz or dateutil zone, in which the fields are read.
        name: What ``H`` fields take their values from; give the schedule's name.

    Raises:
        InvalidSchedule: The text or zone cannot be used, or no date within 50 years matches.
    """

    def __post_init__(self) -> None:
        with _refusing():
            super().__post_init__()


class Every(core.Every):
    """An interval in elapsed time: occurrences are ``anchor + k * every``, k = 0, 1, 2, ….

    Arguments:
        every: The interval, at least 0.1 s.
        anchor: Aware datetime of the first occurrence; the Unix epoch unless given.

    Raises:
        InvalidSchedule: The interval is too short, or the anchor naive.
    """

    def __post_init__(self) -> None:
        with _refusing():
            super().__post_init__()


def from_celery(
    obj: When,
    tz: str | tzinfo | None = None,
    *,
    anchor: datetime | None = None,
    name: str | None = None,
) -> Recurrence:
    """The recurrence meant by anything that Celery's ``beat_schedule`` takes, and by cron text.

    Arguments:
        obj: A ``crontab``, ``schedule`` or ``solar``, any other ``BaseSchedule``, seconds, a
            timedelta, cron text, or a recurrence (returned as it is).
        tz: Zone of cron text (UTC unless given) and of crontabs (their app's unless given). A
            zone set on the crontab itself, as django-celery-beat does, goes first.
        anchor: Aware datetime from which intervals count; the Unix epoch unless given.
        name: The schedule's name, for ``H`` in cron text.

    Returns:
        * a ``crontab`` is evaluated from its five sets by our time rule; all must match
        * an interval counts elapsed time from ``anchor``, without Celery's drift;
          ``schedule(relative=True)`` keeps Celery's rounding
        * objects with an ``is_due`` or ``remaining_estimate`` of their own are asked themselves

    Raises:
        InvalidSchedule: It cannot be evaluated or never comes due; the message says why.
    """
    with _refusing():
        if isinstance(obj, str):
            return Cron(obj, "UTC" if tz is None else _plain(tz), name)
        if isinstance(obj, timedelta):
            return Every(obj, anchor or EPOCH)
        if isinstance(obj, (int, float)) and not isinstance(obj, bool):
            return Every(_seconds(obj), anchor or EPOCH)
        if isinstance(obj, BaseSchedule):
            return _from_object(obj, tz, anchor)
        if isinstance(obj, Recurrence):
            return obj
    raise InvalidSchedule(
        f"{obj!r} is no schedule: give cron text, a timedelta, seconds, or a schedule object of Celery's"
    )


def _from_object(obj: BaseSchedule, tz: str | tzinfo | None, anchor: datetime | None) -> Recurrence:
    if isinstance(obj, crontab):
        zone = _zone_of(obj, tz)
        if _is_tz_aware_crontab(obj) or not _overrides(obj, crontab, _DECISIONS):
            warn_of_misread(obj)
            return from_crontab(obj, zone.tz)
        return ObjectRecurrence(obj, zone.tz)
    if isinstance(obj, solar) and not _overrides(obj, solar, _DECISIONS):
        return Solar(obj.event, obj.lat, obj.lon)
    if isinstance(obj, schedule) and not _overrides(obj, schedule, _DECISIONS):
        run_every = getattr(obj, "run_every", None)
        if not isinstance(run_every, timedelta):
            raise InvalidSchedule(f"schedule(run_every={run_every!r}) has no interval: give a timedelta")
        every = Every(run_every, anchor or EPOCH)
        if not obj.relative:
            return every
    return ObjectRecurrence(obj, _zone_of(obj, tz).tz)


_DECISIONS = ("is_due", "remaining_delta", "remaining_estimate")


def _overrides(obj: object, base: type, names: tuple[str, ...]) -> bool:
    return any(getattr(type(obj), name, None) is not getattr(base, name, None) for name in names)


def _is_tz_aware_crontab(obj: crontab) -> bool:
    """django-celery-beat's crontab: it overrides ``is_due`` only to look at the clock in its zone."""
    cls = type(obj)
    return cls.__name__ == "TzAwareCrontab" and cls.__module__.startswith("django_celery_beat.")


def _zone_of(obj: BaseSchedule, tz: str | tzinfo | None) -> Zone:
    own = vars(obj).get("tz")
    # Celery keeps the app's zone in the same attribute once it has been asked for.
    if own is not None and (tz is None or own != obj.app.timezone):
        return as_zone(_plain(own))
    return as_zone(_plain(obj.tz if tz is None else tz))


def _plain(tz: str | tzinfo) -> str | tzinfo:
    """A zone in the form that equal zones share: its IANA name if it has one."""
    zone = as_zone(host_zone(tz) if isinstance(tz, tzinfo) else tz)
    return zone.name or zone.tz


def _seconds(value: float) -> timedelta:
    try:
        return timedelta(seconds=value)
    except (ValueError, OverflowError):
        raise InvalidSchedule(f"interval {value!r} is not a number of seconds that a timedelta can hold") from None


@dataclass(frozen=True)
class Spec:
    """A recurrence as data, for a database row.

    Attributes:
        kind: ``cron``, ``crontab``, ``interval`` or ``solar``.
        text: The cron text; a crontab's five fields in the order of ``crontab.from_string``;
            the interval's seconds; or ``event latitude longitude``.
        tz: IANA name, for ``cron`` and ``crontab``.
        anchor: Of an ``interval``.
    """

    kind: str
    text: str
    tz: str | None = None
    anchor: datetime | None = None


def to_spec(
    obj: When,
    tz: str | tzinfo | None = None,
    *,
    anchor: datetime | None = None,
    name: str | None = None,
) -> Spec | None:
    """A recurrence as data; arguments and refusals are those of :func:`from_celery`.

    ``H`` in cron text is stored as the value it stands for, so that a spec needs no name.

    Returns:
        None for what only code can hold: objects that decide for themselves,
        ``schedule(relative=True)``, and zones without an IANA name.
    """
    recurrence = from_celery(obj, tz, anchor=anchor, name=name)
    if isinstance(recurrence, core.Cron):
        parsed = recurrence.parsed
        return _zoned("cron", parsed.resolved if parsed.hashed else recurrence.text.strip(), recurrence.zone)
    if isinstance(recurrence, Crontab):
        return _zoned("crontab", recurrence.text, recurrence.zone)
    if isinstance(recurrence, core.Every):
        seconds, fraction = divmod(recurrence.every // _MICROSECOND, 1_000_000)
        return Spec("interval", f"{seconds}.{fraction:06}".rstrip("0").rstrip("."), None, recurrence.anchor)
    if isinstance(recurrence, Solar):
        return Spec("solar", f"{recurrence.event} {recurrence.lat} {recurrence.lon}")
    return None


def _zoned(kind: str, text: str, zone: Zone) -> Spec | None:
    return Spec(kind, text, zone.name) if zone.name else None


def from_spec(spec: Spec) -> Recurrence:
    """The recurrence a spec stands for; the inverse of :func:`to_spec`.

    Raises:
        InvalidSchedule: The kind is unknown, or the text does not fit it.
    """
    parts = spec.text.split()
    if spec.kind == "cron":
        return Cron(spec.text, spec.tz or "UTC")
    if spec.kind == "interval":
        with _refusing():
            return Every(_exact_seconds(spec.text), spec.anchor or EPOCH)
    if spec.kind == "crontab":
        return _crontab_of(spec, parts)
    if spec.kind == "solar":
        try:
            event, lat, lon = parts
            return Solar(event, _degrees(lat), _degrees(lon))
        except InvalidSchedule:
            raise
        except ValueError:
            raise InvalidSchedule(f"solar text {spec.text!r} must be 'event latitude longitude'") from None
    raise InvalidSchedule(f"schedule kind {spec.kind!r} is unknown: use cron, crontab, interval or solar")


def _crontab_of(spec: Spec, parts: list[str]) -> Recurrence:
    if len(parts) != 5:
        raise InvalidSchedule(f"crontab text {spec.text!r} must have 5 fields separated by blanks")
    minute, hour, day_of_month, month_of_year, day_of_week = parts
    try:
        obj = crontab(minute, hour, day_of_week, day_of_month, month_of_year)
    except (ValueError, TypeError, ParseException) as exc:
        raise InvalidSchedule(f"crontab text {spec.text!r}: {exc}") from exc
    with _refusing():
        return from_crontab(obj, spec.tz or "UTC")


def _exact_seconds(text: str) -> timedelta:
    try:
        return int(Decimal(text) * 1_000_000) * _MICROSECOND
    except (InvalidOperation, ValueError, OverflowError):
        raise InvalidSchedule(f"interval text {text!r} is not a number of seconds") from None


def _degrees(text: str) -> Any:
    return float(text) if "." in text or "e" in text else int(text)
