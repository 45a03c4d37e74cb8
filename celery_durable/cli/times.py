"""Instants and durations as operators write and read them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from celery_durable.core.identity import instant_text

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DELAY = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?[smhdw])+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def read_when(text: str) -> datetime | timedelta:
    """Read a time.

    Arguments:
        text: ``now``; a delay such as ``10m``, ``1h30m``, ``3d`` (``-2h`` is two hours ago);
            or an ISO-8601 instant with its zone.

    Returns:
        An aware datetime, or a timedelta from now.

    Raises:
        ValueError: it is none of these; says what would be.
    """
    text = text.strip()
    if text.lower() == "now":
        return timedelta(0)
    delay = _DELAY.fullmatch(text.lower())
    try:
        if delay is not None:
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(delay[2]))
            return timedelta(seconds=-seconds if delay[1] == "-" else seconds)
        # Python 3.10 does not read the Z.
        instant = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time. Write now, a delay such as 10m, 2h or 3d, or an instant such as 2030-01-31T09:00:00Z."
        ) from None
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone, so it does not say when. Add one: {text}Z, or {text}+02:00.")
    return instant


if TYPE_CHECKING:
    _ParamType = click.ParamType[datetime | timedelta]
else:
    # Generic only in newer releases of click.
    _ParamType = click.ParamType


class When(_ParamType):
    """A time on the command line; see :func:`read_when`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime | timedelta:
        """See :class:`click.ParamType`."""
        if isinstance(value, (datetime, timedelta)):
            return value
        try:
            return read_when(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


WHEN = When()


def resolved(when: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The instant that is meant, counted from `now`.

    Raises:
        click.UsageError: it is beyond what a date can say.
    """
    if not isinstance(when, timedelta):
        return when
    try:
        return now + when
    except OverflowError as exc:
        raise click.UsageError(f"A delay of {when.days} days is beyond the calendar.") from exc


def absolute(instant: datetime | None) -> str:
    """UTC to the second, as tables show it."""
    if instant is None:
        return "-"
    return instant.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def iso(instant: datetime | None) -> str | None:
    """ISO-8601 in UTC with ``Z``, as JSON says it."""
    return None if instant is None else instant_text(instant)


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size}{unit} {rest}{next_unit}" if rest else f"{whole // size}{unit}"
    return f"{whole} s"


def relative(instant: datetime | None, now: datetime) -> str:
    """How far away an instant is."""
    if instant is None:
        return "-"
    seconds = (instant - now).total_seconds()
    return f"in {duration(seconds)}" if seconds >= 0 else f"{duration(seconds)} ago"


def both(instant: datetime | None, now: datetime) -> str:
    """Absolute and relative on one line."""
    return "-" if instant is None else f"{absolute(instant)}  {relative(instant, now)}"
