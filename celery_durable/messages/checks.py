"""What no message may say: options that end a worker, choke a client library or do not go into a column.

Celery checks few of its options when a call is made, and a direct call fails
where the caller sees it.  A stored one would fail in a beat or a worker, days
later, so each is refused at the call, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601

from ..errors import InvalidTimer
from .message import Message

#: Properties that Kombu's virtual transports write themselves, into whatever stands there.
RESERVED = ("delivery_info", "delivery_tag", "body_encoding", "body")

Test = Callable[[Any], bool]


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that Celery would take apart in another way than they were meant.

    Raises:
        InvalidTimer: names the option, its value and what it must be.
    """
    for name, fits, wanted in _OPTIONS:
        value = options.get(name)
        if value is not None and not fits(value):
            raise InvalidTimer(f"{name} = {value!r}: it must be {wanted}.")
    for name in RESERVED:
        if name in options:
            raise InvalidTimer(f"{name} = {options[name]!r}: Kombu writes this property itself. Leave it out.")


def check_message(message: Message) -> None:
    """Refuse a rendered message that a worker could not read, or that no column could hold.

    Raises:
        InvalidTimer: names the header, property or field, its value and what it must be.
    """
    for name, fits, wanted in _HEADERS:
        if not fits(message.headers.get(name)):
            raise InvalidTimer(f"headers[{name!r}] = {message.headers.get(name)!r}: it must be {wanted}.")
    for name, fits, wanted in _PROPERTIES:
        value = message.properties.get(name)
        if value is not None and not fits(value):
            raise InvalidTimer(f"{name} = {value!r}: it must be {wanted}.")
    for name in ("content_type", "content_encoding", "exchange", "routing_key", "queue"):
        value = getattr(message, name)
        if value is not None and not storable(value):
            raise InvalidTimer(f"{name} = {value!r}: it must be text without NUL and lone surrogates.")


def storable(value: object) -> bool:
    """Whether Postgres can hold a value as text."""
    if not isinstance(value, str) or "\x00" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _name(value: Any) -> bool:
    return bool(value) and storable(value)


def _optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _whole(least: int, most: int) -> Test:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _limits(value: Any) -> bool:
    return value is None or (
        isinstance(value, (list, tuple)) and len(value) == 2 and all(each is None or _number(each) for each in value)
    )


def _texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


def _expiry(value: Any) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return -1e10 < value < 1e10
    if isinstance(value, str):
        try:
            return maybe_iso8601(value) is not None
        except ValueError:
            return False
    return isinstance(value, datetime)


_SECONDS = "a number of seconds of at least 0"

_OPTIONS: tuple[tuple[str, Test, str], ...] = (
    ("headers", lambda value: isinstance(value, Mapping) and _texts(list(value)), "a dict with text keys"),
    ("expires", _expiry, "seconds, a datetime or ISO-8601 text"),
    ("delivery_mode", lambda value: value in (1, 2, "transient", "persistent"), "1 (transient) or 2 (persistent)"),
    ("stamped_headers", _texts, "a list of header names"),
    ("time_limit", _number, _SECONDS),
    ("soft_time_limit", _number, _SECONDS),
    ("priority", _whole(0, 255), "a whole number from 0 to 255"),
)  # fmt: skip

#: As Celery's worker reads them in ``celery.worker.request``; anything else ends the worker or fails the task there.
_HEADERS: tuple[tuple[str, Test, str], ...] = (
    ("task", _name, "the task's name"),
    ("id", _name, "text"),
    ("lang", _name, "text"),
    ("retries", lambda value: value is None or _whole(0, 2**31)(value), "a whole number"),
    ("timelimit", _limits, "two numbers of seconds, either of which may be None"),
    *((name, _optional_text, "text or None") for name in (
        "root_id", "parent_id", "group", "eta", "expires", "shadow", "argsrepr", "kwargsrepr", "origin", "compression",
    )),
    ("stamped_headers", lambda value: value is None or _texts(value), "a list of header names, or None"),
    ("stamps", lambda value: value is None or isinstance(value, Mapping), "a dict, or None"),
)  # fmt: skip

_PROPERTIES: tuple[tuple[str, Test, str], ...] = (
    ("priority", _whole(0, 255), "a whole number from 0 to 255"),
    ("delivery_mode", lambda value: value in (1, 2), "1 (transient) or 2 (persistent)"),
    ("correlation_id", storable, "text"),
    ("reply_to", storable, "text"),
    ("user_id", storable, "text"),
    ("app_id", storable, "text"),
    ("message_id", storable, "text"),
    ("type", storable, "text"),
)
