"""The producer that keeps a message instead of sending it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kombu import Queue
from kombu.compression import compress
from kombu.entity import maybe_delivery_mode
from kombu.serialization import dumps

from ..errors import InvalidTimer
from .message import Message, storable

_PLAIN = frozenset((str, int, bool, type(None)))


class CapturingProducer:
    """Stands where Celery expects a Kombu producer, and keeps the first message given to it.

    The second message of a call is the ``task-sent`` event; the publisher
    sends that one once the message itself is on its way.  An ``apply_async``
    that stores calls of its own accord must let a call with this producer
    pass to Celery's.
    """

    serializer = None
    compression = None

    def __init__(self, ignore_result: Any) -> None:
        self._ignore_result = ignore_result
        self.message: Message | None = None
        #: The body before serialization: arguments, keyword arguments, callbacks and canvas.
        self.content: Any = None
        #: The serializer asked for, None for Kombu's default.
        self.serializer_used: str | None = None

    @property
    def connection(self) -> CapturingProducer:
        """Celery asks the producer's connection to translate errors; there are none to translate."""
        return self

    def _reraise_as_library_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(
        self,
        body: Any,
        routing_key: str | None = None,
        delivery_mode: int | str | None = None,
        priority: int | None = 0,
        serializer: str | None = None,
        headers: dict[str, Any] | None = None,
        compression: str | None = None,
        exchange: Any = None,
        declare: Sequence[Any] | None = None,
        # Named to be left out: the time to live is computed at dispatch, the rest is the publisher's business.
        expiration: float | None = None,
        mandatory: bool | None = None,
        immediate: bool | None = None,
        retry: bool | None = None,
        retry_policy: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        **properties: Any,
    ) -> None:
        """Keep the message as :meth:`kombu.Producer.publish` would hand it to the transport.

        Raises:
            InvalidTimer: body, headers or properties cannot be serialized.
        """
        if self.message is not None:
            return
        headers = {} if headers is None else headers
        headers["ignore_result"] = self._ignore_result
        content_type, content_encoding, data = serialize(body, serializer)
        if compression:
            try:
                data, headers["compression"] = compress(data, compression)
            except Exception as exc:  # codecs are pluggable and raise what they like
                raise InvalidTimer(f"compression = {compression!r} failed: {exc!r}") from exc
        reply_to = properties.get("reply_to")
        if isinstance(reply_to, Queue):
            properties["reply_to"] = reply_to.name
        properties["priority"] = priority
        properties["delivery_mode"] = maybe_delivery_mode(delivery_mode or getattr(exchange, "delivery_mode", None))
        if not all(type(value) in _PLAIN for value in properties.values()):
            properties = _storable("properties", properties)
        self.content = body
        self.serializer_used = serializer
        self.message = Message(
            body=data,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=_storable("headers", headers),
            properties=properties,
            exchange=getattr(exchange, "name", exchange) or "",
            routing_key=routing_key or "",
            queue=next((each.name for each in declare or () if isinstance(each, Queue)), None),
        )


def serialize(body: Any, serializer: str | None) -> tuple[str, str, bytes]:
    """Serialize as Kombu's producer does, to bytes.

    Returns:
        Content type, content encoding and data.

    Raises:
        InvalidTimer: the serializer refuses the body, or is not known.
    """
    try:
        content_type, content_encoding, text = dumps(body, serializer)
        data = text if isinstance(text, bytes) else str(text).encode(content_encoding or "utf-8")
    except Exception as exc:  # serializers are pluggable and raise what they like
        raise InvalidTimer(f"The arguments cannot be serialized as {serializer or 'json'}: {exc}") from exc
    return content_type, content_encoding, data


def _storable(what: str, values: dict[str, Any]) -> dict[str, Any]:
    try:
        return storable(values)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidTimer(f"The message {what} cannot be stored as JSON: {exc}") from exc
