"""Text as Postgres can store it."""

from __future__ import annotations


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
