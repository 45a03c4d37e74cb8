"""A stored message for reading, as a table."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from celery_durable.cli.output import facts, plain
from celery_durable.messages.contents import REDACTED, document

__all__ = ["REDACTED", "document", "table"]


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
    pairs += [("route", plain(route)), *_named(message["headers"] or {})]
    return facts(pairs, title="Message")


def _named(headers: dict[str, Any]) -> list[tuple[str, str]]:
    said = {name: value for name, value in headers.items() if value not in (None, [], {}, [None, None])}
    return [
        (f"  {plain(name)}", plain(value if isinstance(value, str) else _text(value))) for name, value in said.items()
    ]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
