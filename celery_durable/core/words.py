"""Recurrences in plain English, for listings and messages; nothing is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from celery_durable.core.calendar import Fields

_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    "", "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_NTH = ("", "first", "second", "third", "fourth", "fifth")
#: As many times of day are written out; more of them are told by hours and minutes.
_TIMES = 6


def of_interval(every: timedelta) -> str:
    """``every 1 hour 30 minutes``, from the interval."""
    parts = []
    seconds = every % timedelta(minutes=1) / timedelta(seconds=1)
    minutes = every // timedelta(minutes=1)
    for count, unit in (
        (minutes // 1440, "day"),
        (minutes // 60 % 24, "hour"),
        (minutes % 60, "minute"),
        (seconds, "second"),
    ):
        if count:
            parts.append(f"{count:.6f}".rstrip("0").rstrip(".") + f" {unit}" + ("s" if count != 1 else ""))
    return "every " + " ".join(parts)


def of_cron(parts: Sequence[str], fields: Fields, zone: str) -> str:
    """A cron entry.

    Arguments:
        parts: The texts as written: seconds, minute, hour, … (only their stars are looked at).
        fields: The same, spelled out.
        zone: The zone's name.
    """
    said = [_time(parts, fields)]
    days = []
    if fields.day != "*":
        days.append(_list(fields.day, _day))
    if fields.weekday != "*":
        days.append(_list(fields.weekday, _weekday))
    if days:
        said.append("on " + (" or on " if fields.either_day else " and on ").join(days))
    if fields.month != "*":
        said.append("in " + _list(fields.month, lambda month: _MONTHS[int(month)]))
    return " ".join(said) + f" ({zone})"


def _time(parts: Sequence[str], fields: Fields) -> str:
    hours = fields.hour.split(",")
    if fields.second.isdigit() and fields.minute.isdigit() and "*" not in hours and len(hours) <= _TIMES:
        seconds = f":{int(fields.second):02}" if fields.second != "0" else ""
        return "at " + _join([f"{int(hour):02}:{int(fields.minute):02}{seconds}" for hour in hours])
    second, minute, hour = (
        _unit(part, values, unit, size)
        for part, values, unit, size in zip(
            parts,
            (fields.second, fields.minute, fields.hour),
            ("second", "minute", "hour"),
            (60, 60, 24),
            strict=False,
        )
    )
    said = [minute, hour] if fields.second == "0" else [second, minute, hour]
    if said[0] == "minute 0" and hour.startswith("every"):
        said = [hour]
    # "every 15 minutes of every hour" says no more than "every 15 minutes"
    kept = [
        text
        for before, text in zip(["", *said], said, strict=False)
        if not (before.startswith("every") and text in ("every minute", "every hour"))
    ]
    return ("" if kept[0].startswith("every") else "at ") + " of ".join(kept)


def _unit(part: str, values: str, unit: str, size: int) -> str:
    if values == "*":
        return f"every {unit}"
    step = part[2:]
    if part.startswith("*/") and step.isdigit() and size % int(step) == 0:
        return f"every {int(step)} {unit}s"
    return f"{unit}{'s' if ',' in values else ''} {_list(values, str)}"


def _list(values: str, word: Callable[[str], str]) -> str:
    """``1,2,3,4,7`` as ``1 to 4 and 7``, each in its word."""
    said: list[str] = []
    run: list[str] = []
    for value in [*values.split(","), ""]:
        if run and not (value.isdigit() and run[-1].isdigit() and int(value) == int(run[-1]) + 1):
            said += [f"{word(run[0])} to {word(run[-1])}"] if len(run) > 2 else map(word, run)
            run = []
        run.append(value)
    return _join(said)


def _join(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]


def _day(day: str) -> str:
    if day == "l":
        return "the last day of the month"
    if day.endswith("w"):
        return f"the weekday nearest day {day[:-1]}"
    return f"day {day}"


def _weekday(weekday: str) -> str:
    day, _, nth = weekday.partition("#")
    if nth:
        return f"the {_NTH[int(nth)]} {_WEEKDAYS[int(day)]}"
    if weekday.startswith("l"):
        return f"the last {_WEEKDAYS[int(weekday[1:])]}"
    return _WEEKDAYS[int(weekday)]
