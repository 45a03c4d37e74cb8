"""Cron text: what is accepted, and what each field means.

Accepted are five fields (minute hour day-of-month month day-of-week), or six with the
*seconds first*; names, ranges (also wrapping: ``fri-mon``), steps, lists, ``L`` (last
day), ``5L`` or ``L5`` (last Friday), ``5#3`` (third Friday), ``15W`` (the weekday
nearest the 15th), ``?``, ``@daily`` and its kin, and ``H``: a value spread by the
schedule's name, after Jenkins.

Everything else is refused, with the field and its value in the message. The values are
spelled out here rather than by croniter, which reads ``5-5`` as the whole field and
loses step in wrapping ranges.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from celery_durable.core.calendar import Fields
from celery_durable.core.errors import RecurrenceError

MAX_LENGTH = 256

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_MONTHS = {
    "jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6,
    "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11, "dec": 12,
}  # fmt: skip
_WEEKDAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}


@dataclass(frozen=True)
class Field:
    """One position of a cron text: its range, its names, and the range ``H`` spreads over."""

    label: str
    low: int
    high: int
    names: dict[str, int]
    spread_to: int

    @property
    def top(self) -> int:
        """The highest number that may be written: 7 is a second way to say Sunday."""
        return 7 if self.label == "day-of-week" else self.high


SECOND = Field("seconds", 0, 59, {}, 59)
MINUTE = Field("minute", 0, 59, {}, 59)
HOUR = Field("hour", 0, 23, {}, 23)
DAY = Field("day-of-month", 1, 31, {}, 28)  # H stays within the days that every month has
MONTH = Field("month", 1, 12, _MONTHS, 12)
WEEKDAY = Field("day-of-week", 0, 6, _WEEKDAYS, 6)
FIELDS = (SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY)

_RANGE = re.compile(r"(?P<low>\d{1,4}|[a-z]{3})(-(?P<high>\d{1,4}|[a-z]{3}))?(/(?P<step>\d{1,4}))?", re.ASCII)
_STAR = re.compile(r"\*(/(?P<step>\d{1,4}))?", re.ASCII)
_LAST_WEEKDAY = re.compile(r"l(?P<before>[0-7])|(?P<after>[0-7])l", re.ASCII)
_NTH_WEEKDAY = re.compile(r"(?P<day>[0-7]|[a-z]{3})#(?P<nth>[1-5])", re.ASCII)
_NEAREST_WEEKDAY = re.compile(r"(?P<day>[1-9]|[12]\d|3[01])w", re.ASCII)
_HASH = re.compile(r"H(\((?P<low>\d{1,4})-(?P<high>\d{1,4})\))?(/(?P<step>\d{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class CronText:
    """A cron text understood.

    Attributes:
        parts: The six field texts, seconds first (``0`` if five were given), ``H`` replaced by its value.
        fields: The same, spelled out for :class:`.calendar.Calendar`.
        frequent: The minute, hour or seconds field begins with ``*``: the job follows the real
            clock instead of running each slot once.
        seconds: Six fields were given.
        hashed: The text has ``H``, so its meaning depends on the name.
    """

    parts: tuple[str, ...]
    fields: Fields
    frequent: bool
    seconds: bool
    hashed: bool

    @property
    def resolved(self) -> str:
        """The text with ``H`` and aliases replaced: it means the same without the name."""
        return " ".join(self.parts if self.seconds else self.parts[1:])


def parse(text: str, name: str | None = None) -> CronText:
    """Read a cron text.

    Arguments:
        text: Five fields, six with the seconds first, or an alias.
        name: What ``H`` is derived from; the schedule's name.

    Raises:
        RecurrenceError: Not a cron text; the message names the field, its value and the fix.
    """
    if not isinstance(text, str):
        raise RecurrenceError(f"cron text must be a string, not {text!r}")
    shown = text if len(text) <= 60 else text[:57] + "..."
    if len(text) > MAX_LENGTH:
        raise RecurrenceError(f"cron text {shown!r} has {len(text)} characters; at most {MAX_LENGTH} are read")
    stripped = text.strip(" \t\r\n")
    if stripped.startswith("@"):
        if stripped.lower() not in ALIASES:
            raise RecurrenceError(
                f"cron text {shown!r}: known aliases are {', '.join(ALIASES)}; for an interval give a timedelta"
            )
        stripped = ALIASES[stripped.lower()]
    written = [part for part in re.split(r"[ \t\r\n]+", stripped) if part]
    if len(written) not in (5, 6):
        raise RecurrenceError(
            f"cron text {shown!r} has {len(written)} fields; give 5 (minute hour day-of-month month "
            f"day-of-week), or 6 with the seconds first"
        )
    parts = tuple(written if len(written) == 6 else ["0", *written])
    hashed = any(_HASH.fullmatch(item) for part in parts for item in part.split(","))
    try:
        parts = tuple(_resolve(part, field, name) for part, field in zip(parts, FIELDS, strict=True))
        second, minute, hour, day, month, weekday = map(_spell, parts, FIELDS)
    except RecurrenceError as exc:
        raise RecurrenceError(f"cron text {shown!r}: {exc}") from None
    either_day = parts[3][0] not in "*?" and parts[5][0] not in "*?"
    return CronText(
        parts=parts,
        fields=Fields(second, minute, hour, day, month, weekday, either_day),
        frequent=any(part[0] == "*" for part in parts[:3]),
        seconds=len(written) == 6,
        hashed=hashed,
    )


def _refuse(item: str, field: Field, why: str) -> RecurrenceError:
    return RecurrenceError(f"{field.label} {item!r} {why}")


def _resolve(part: str, field: Field, name: str | None) -> str:
    """Replace the ``H`` items of a field by values that depend on the name and the field alone."""
    return ",".join(
        _spread(item, match, field, name) if (match := _HASH.fullmatch(item)) else item for item in part.split(",")
    )


def _spread(item: str, match: re.Match[str], field: Field, name: str | None) -> str:
    if not name:
        raise _refuse(item, field, "needs a name to derive its value from: give name=")
    low = int(match["low"] or field.low)
    high = int(match["high"] or field.spread_to)
    if not field.low <= low <= high <= field.high:
        raise _refuse(item, field, f"must lie within {field.low}-{field.high}, the lower number first")
    # One digest per field, so that minute and hour are independent and every pair can occur.
    digest = hashlib.sha256(f"{field.label}\0{name}".encode("utf-8", "surrogatepass")).digest()
    number = int.from_bytes(digest[:8], "big")
    width = high - low + 1
    if not match["step"]:
        return str(low + number % width)
    step = int(match["step"])
    if not 1 <= step <= width:
        raise _refuse(item, field, f"has a step outside 1-{width}")
    return f"{low + number % step}-{high}/{step}"


def _spell(part: str, field: Field) -> str:
    """A field as croniter gets it: ``*``, numbers, or its forms of L, # and W."""
    if part == "*" or (part == "?" and field in (DAY, WEEKDAY)):
        return "*"
    numbers: set[int] = set()
    special: list[str] = []
    for item in part.split(","):
        lowered = item.lower()
        found = _special(lowered, field)
        if found:
            special.append(found)
        else:
            numbers.update(_numbers(item, lowered, field))
    if numbers and special and field is WEEKDAY:
        raise _refuse(part, field, "mixes plain weekdays with # or L; make two schedules of it")
    if len(numbers) == field.high - field.low + 1 and not special:
        return "*"
    if any(text.endswith("w") for text in special) and len(special) + len(numbers) > 1:
        raise _refuse(part, field, "has W beside other days; W stands alone")
    return ",".join([*map(str, sorted(numbers)), *special])


def _special(item: str, field: Field) -> str | None:
    if field is DAY:
        if item == "l":
            return "l"
        match = _NEAREST_WEEKDAY.fullmatch(item)
        return f"{match['day']}w" if match else None
    if field is WEEKDAY:
        if match := _LAST_WEEKDAY.fullmatch(item):
            return f"l{int(match['before'] or match['after']) % 7}"
        if (match := _NTH_WEEKDAY.fullmatch(item)) and (match["day"].isdigit() or match["day"] in _WEEKDAYS):
            return f"{_number(match['day'], field) % 7}#{match['nth']}"
    return None


def _numbers(item: str, lowered: str, field: Field) -> Iterator[int]:
    if match := _STAR.fullmatch(lowered):
        yield from range(field.low, field.high + 1, _step(item, match["step"], field))
        return
    match = _RANGE.fullmatch(lowered)
    if not match:
        raise _refuse(item, field, _why_not(item, field))
    step = _step(item, match["step"], field)
    low = _number(match["low"], field)
    if match["high"]:
        high = _number(match["high"], field)
    else:
        high = max(field.high, low) if match["step"] else low
    if low > high:  # wraps: fri-mon, nov-feb, 22-2
        low = low % 7 if field is WEEKDAY else low
        values = list(range(low, high + 1)) or [*range(low, field.high + 1), *range(field.low, high + 1)]
    else:
        values = list(range(low, high + 1))
    for value in values[::step]:
        yield value % 7 if field is WEEKDAY else value


def _number(text: str, field: Field) -> int:
    value = field.names.get(text) if not text.isdigit() else int(text)
    if value is None:
        raise _refuse(text, field, f"is not one of {', '.join(field.names)}" if field.names else "is not a number")
    if not field.low <= value <= field.top:
        raise _refuse(text, field, f"is outside {field.low}-{field.top}")
    return value


def _step(item: str, step: str | None, field: Field) -> int:
    if step is None:
        return 1
    if int(step) == 0:
        raise _refuse(item, field, "has step 0; a step is 1 or more")
    return int(step)


def _why_not(item: str, field: Field) -> str:
    if not item:
        return "is an empty list item: remove the extra comma"
    if item == "?":
        return "may stand alone in a day field only"
    if item.upper().startswith("H") and item.lower() not in field.names:
        return "is not a form of H; write H, H/step, H(low-high) or H(low-high)/step"
    if "w" in item.lower() and field is DAY:
        return "is not supported; write a day before W, as 15W"
    if field is WEEKDAY and item.lower().endswith("l"):
        return "is not supported; write the last weekday with its number, as 5L for Friday"
    return f"is not a number, name, range or step of {field.low}-{field.high}"
