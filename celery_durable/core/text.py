"""Text as Postgres can store it, values as JSON can say them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def storable(text: str, limit: int | None = None) -> str:
    """Escape what Postgres refuses (NUL, lone surrogates) and shorten what is too long: the end says most.

    Arguments:
        text: anything, an error's message for example.
        limit: most characters that are kept; None keeps all.
    """
    text = text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\0")
    return (
        text if limit is None or len(text) <= limit else f"[{len(text) - limit} characters left out] …{text[-limit:]}"
    )


def jsonable(value: Any) -> Any:
    """The same value with what JSON has no word for (NaN, infinities, other types) as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
