"""A stored message for reading: its headers and, only where asked for, its arguments."""

from __future__ import annotations

import json
from typing import Any

from kombu.compression import decompress
from kombu.serialization import loads
from rich.table import Table

from celery_durable.cli.output import facts, jsonable, plain
from celery_durable.store.executor import Row

REDACTED = "(hidden; --show-args shows it)"

# Celery writes the arguments' text into the headers as well.
_TELLING = ("argsrepr", "kwargsrepr")
_JSON = "application/json"


def document(row: Row, *, show_args: bool) -> dict[str, Any]:
    """A stored message as JSON values.

    Arguments:
        row: with body, content_type, content_encoding, headers, properties, exchange, routing_key.
        show_args: with its arguments; only JSON is decoded, since unpickling runs what the message says.
    """
    headers: dict[str, Any] = json.loads(row.headers)
    arguments, note = (None, REDACTED) if not show_args else _arguments(row, headers)
    if not show_args:
        headers = {name: REDACTED if name in _TELLING else value for name, value in headers.items()}
    return {
        "content_type": row.content_type, "content_encoding": row.content_encoding, "size_bytes": len(row.body),
        "exchange": row.exchange, "routing_key": row.routing_key, "headers": headers,
        "properties": json.loads(row.properties), "arguments": arguments, "arguments_note": note,
    }  # fmt: skip


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


def table(message: dict[str, Any]) -> Table:
    """The same as names and values; headers without a value are left out."""
    pairs = [("content type", plain(f"{message['content_type']}, {message['size_bytes']} bytes"))]
    if message["arguments_note"]:
        pairs.append(("arguments", plain(message["arguments_note"])))
    elif isinstance(message["arguments"], dict) and "kwargs" in message["arguments"]:
        pairs += [(name, plain(_text(message["arguments"][name]))) for name in ("args", "kwargs")]
    else:
        pairs.append(("body", plain(_text(message["arguments"]))))
    route = f"{message['exchange'] or '(default exchange)'} -> {message['routing_key']}"
    pairs += [("route", plain(route)), *_named(message["headers"])]
    return facts(pairs, title="Message")


def _named(headers: dict[str, Any]) -> list[tuple[str, str]]:
    said = {name: value for name, value in headers.items() if value not in (None, [], {}, [None, None])}
    return [
        (f"  {plain(name)}", plain(value if isinstance(value, str) else _text(value))) for name, value in said.items()
    ]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
