"""What AMQP cannot write down, said at the call: a direct call fails there, a stored one would fail in a beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kombu.transport.pyamqp import Transport as AMQPTransport

from ..errors import InvalidTimer
from .amqp_confirms import Content
from .delivery import Outgoing
from .message import Message

if TYPE_CHECKING:
    from celery import Celery

#: What fits into one frame if the broker does not ask for smaller ones; more, no client of Kombu agrees to.
FRAME = 131_072
#: Longest name, in bytes of UTF-8: one octet says how long it is.
SHORT = 255

_speaking: WeakKeyDictionary[Celery, bool] = WeakKeyDictionary()


def check_amqp(app: Celery, message: Message) -> None:
    """Refuse a message that AMQP has no words for, if that is what the app's broker speaks.

    Raises:
        InvalidTimer: names the header, property or name.
    """
    if not _speaks(app) or _problem(message) is None:
        return
    for what, part in _parts(message):
        problem = _problem(part)
        if problem is not None:
            raise InvalidTimer(f"{what}: AMQP, which the broker of this app speaks, cannot carry it ({problem}).")
    raise InvalidTimer(f"AMQP, which the broker of this app speaks, cannot carry this message: {_problem(message)}.")


def _speaks(app: Celery) -> bool:
    known = _speaking.get(app)
    if known is None:
        # Unset, it would mean AMQP, but a caller needs no broker and may well not say which one the beats have.
        told = app.conf.broker_write_url or app.conf.broker_url
        known = bool(told) and issubclass(app.connection_for_write().get_transport_cls(), AMQPTransport)
        _speaking[app] = known
    return known


def _problem(message: Message) -> str | None:
    for name in (message.exchange, message.routing_key, message.queue or ""):
        if len(name.encode()) > SHORT:
            return f"{len(name.encode()):,} bytes, more than {SHORT}"
    try:
        Content(Outgoing("", message), FRAME)
    except Exception as exc:  # client libraries raise what they like
        return str(exc) or repr(exc)
    return None


def _parts(message: Message) -> Iterator[tuple[str, Message]]:
    """The message with one part each, and what to call it."""
    bare = replace(message, headers={}, properties={}, exchange="", routing_key="", queue=None)
    for name in ("queue", "exchange", "routing_key"):
        value = getattr(message, name)
        yield f"{name} = {value!r:.100}", replace(bare, **{name: value})
    for name, value in message.properties.items():
        yield f"{name} = {value!r:.100}", replace(bare, properties={name: value})
    for name, value in message.headers.items():
        yield f"headers[{name!r:.100}] = {value!r:.100}", replace(bare, headers={name: value})
