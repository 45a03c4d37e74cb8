"""A stored message for reading: its headers and, only where asked for, its arguments."""

from __future__ import annotations

import json
from typing import Any

from kombu.compression import decompress
from kombu.serialization import loads

from celery_durable.core.text import jsonable
from celery_durable.store.executor import Row

REDACTED = "(hidden; --show-args shows it)"

# Celery writes the arguments' text into the headers as well.
_TELLING = ("argsrepr", "kwargsrepr")
_JSON = "application/json"


def document(row: Row, *, show_args: bool) -> dict[str, Any]:
    """A stored message as JSON values; what of it cannot be read is None, with a note.

    Arguments:
        row: with body, content_type, content_encoding, headers, properties, exchange, routing_key.
        show_args: with its arguments; only JSON is decoded, since unpickling runs what the message says.
    """
    headers, properties = _object(row.headers), _object(row.properties)
    arguments, note = (None, REDACTED) if not show_args else _arguments(row, headers or {})
    if not show_args and headers is not None:
        headers = {name: REDACTED if name in _TELLING else value for name, value in headers.items()}
    return {
        "content_type": row.content_type, "content_encoding": row.content_encoding, "size_bytes": len(row.body),
        "exchange": row.exchange, "routing_key": row.routing_key, "headers": headers, "properties": properties,
        "arguments": arguments, "arguments_note": note,
    }  # fmt: skip


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # more digits or levels than Python reads: only plain SQL writes such
        return None
    return found if isinstance(found, dict) else None


def _arguments(row: Row, headers: dict[str, Any]) -> tuple[Any, str | None]:
    size = f"{row.content_type}, {len(row.body)} bytes"
    if row.content_type != _JSON:
        return None, f"not decoded: {size}"
    try:
        body = bytes(row.body)
        if headers.get("compression"):
            body = decompress(body, headers["compression"])
        content = loads(body, row.content_type, row.content_encoding, accept={_JSON})
    except Exception as exc:  # any codec may be named, each has its own errors; the rest is still worth showing
        return None, f"cannot be decoded: {size}: {type(exc).__name__}: {exc}"
    if isinstance(content, (list, tuple)) and len(content) == 3:
        return {"args": jsonable(content[0]), "kwargs": jsonable(content[1])}, None
    return jsonable(content), None
