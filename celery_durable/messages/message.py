"""A rendered Celery call: what is stored for a timer and published when it is due.

The body is opaque bytes, as the caller's serializer made it; nothing between
the caller and the worker decodes it.  Headers and properties are plain JSON
values.  What JSON has no word for (datetimes, UUIDs, decimals, bytes) stands
there in the envelope that Kombu's own JSON writes,
``{"__type__": …, "__value__": …}``: Redis and the other virtual transports
send that envelope as it is, and :func:`revive` turns it back into the object
for AMQP, which has types of its own for some of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kombu.utils.json import JSONEncoder, object_hook

#: NaN and Infinity are no JSON, and Postgres refuses them in a json column.
_encode = JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message, complete: a beat publishes it without knowing the task."""

    body: bytes
    """The serialized and, if asked for, compressed arguments."""
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    """Message headers as JSON values; this message's own dict, further flat headers may be added."""
    properties: dict[str, Any]
    """``priority``, ``delivery_mode``, ``correlation_id``, ``reply_to`` … as JSON values, without ``expiration``."""
    exchange: str
    """Exchange name; empty for the default exchange."""
    routing_key: str
    queue: str | None
    """Name of the queue to declare first, from ``task_queues`` or made as Celery makes missing ones."""

    @property
    def size(self) -> int:
        """Bytes of the body and of the headers written as JSON."""
        return len(self.body) + len(json.dumps(self.headers))


def storable(values: dict[str, Any]) -> dict[str, Any]:
    """Rewrite headers or properties as plain JSON values, in Kombu's envelopes where needed.

    Raises:
        ValueError: for NaN and Infinity, circular values, and an envelope of unknown type.
        TypeError: for what Kombu's JSON refuses too.
    """
    text = _encode(values)
    plain: dict[str, Any] = json.loads(text)
    if '"__type__"' in text:
        revive(plain)
    return plain


def revive(value: Any) -> Any:
    """Undo the envelopes of :func:`storable`, at any depth.

    Raises:
        ValueError: for an envelope whose type is not registered with Kombu in this process.
    """
    if isinstance(value, dict):
        # Most values are neither dict nor list: a test here is cheaper than a call.
        return object_hook(
            {key: revive(each) if isinstance(each, (dict, list)) else each for key, each in value.items()}
        )
    if isinstance(value, list):
        return [revive(each) if isinstance(each, (dict, list)) else each for each in value]
    return value
