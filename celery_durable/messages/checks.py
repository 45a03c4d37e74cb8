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
from kombu import Queue

from ..errors import InvalidTimer
from .message import Message

#: Properties that Kombu writes itself, on virtual transports into whatever stands there.
RESERVED = ("delivery_info", "delivery_tag", "body_encoding", "body", "content_type", "content_encoding")
#: Headers that say how the message was made, or that it waits for itself; the last one would hide all others.
RESERVED_HEADERS = ("compression", "eta", "headers")
#: Parameters of Celery's own functions on the way to the message.
NO_OPTIONS = ("name", "args", "kwargs", "task_type", "create_sent_event", "result_cls")

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
    for name in NO_OPTIONS:
        if name in options:
            raise InvalidTimer(f"{name} = {options[name]!r}: apply_async has no option of this name. Leave it out.")
    for name in RESERVED_HEADERS:
        value = (options.get("headers") or {}).get(name)
        if value is not None:
            raise InvalidTimer(f"headers[{name!r}] = {value!r}: Celery writes this header itself. Leave it out.")
    for name in options.get("stamped_headers") or ():
        if name not in options:
            raise InvalidTimer(f"stamped_headers names {name!r}, which is not among the options. Give {name}=… too.")


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
    # Longer than any process lives, and what a timer of the operating system takes.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**31


def _name(value: Any) -> bool:
    return bool(value) and storable(value)


def _optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _optional_dict(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


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


_SECONDS = "a number of seconds from 0 to 2,147,483,647"

_OPTIONS: tuple[tuple[str, Test, str], ...] = (
    ("headers", lambda value: isinstance(value, Mapping) and _texts(list(value)), "a dict with text keys"),
    ("expires", _expiry, "seconds, a datetime or ISO-8601 text"),
    ("delivery_mode", lambda value: value in (1, 2, "transient", "persistent"), "1 (transient) or 2 (persistent)"),
    ("stamped_headers", _texts, "a list of header names"),
    ("time_limit", _number, _SECONDS),
    ("soft_time_limit", _number, _SECONDS),
    ("priority", _whole(0, 255), "a whole number from 0 to 255"),
    ("queue", lambda value: isinstance(value, (str, Queue)), "a queue's name or a Kombu Queue"),
    ("router", lambda value: callable(getattr(value, "route", None)), "a router of Celery"),
    ("declare", lambda value: isinstance(value, (list, tuple)), "a list of Kombu's queues and exchanges"),
)  # fmt: skip

#: As Celery's worker reads them in ``celery.worker.request``; anything else ends the worker or fails the task there.
_HEADERS: tuple[tuple[str, Test, str], ...] = (
    ("task", _name, "the task's name"),
    ("id", _name, "text"),
    ("lang", _name, "text"),
    ("retries", lambda value: value is None or _whole(0, 2**31)(value), "a whole number"),
    ("timelimit", _limits, "two numbers of seconds, either of which may be None"),
    *((name, _optional_text, "text or None") for name in (
        "root_id", "parent_id", "group", "shadow", "argsrepr", "kwargsrepr", "origin",
    )),
    ("expires", lambda value: value is None or (isinstance(value, str) and _expiry(value)), "ISO-8601 text or None"),
    ("stamped_headers", lambda value: value is None or _texts(value), "a list of header names, or None"),
    ("stamps", _optional_dict, "a dict, or None"),
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
