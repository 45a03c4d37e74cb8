"""Identities: the UUIDv7 of a timer and the key of a schedule's occurrence."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from uuid import UUID


def new_id() -> UUID:
    """Make a UUIDv7 (RFC 9562, section 5.7): ordered by millisecond, so index inserts stay at one end.

    A random UUID costs ten times the WAL per insert just after a checkpoint.
    """
    value = (time.time_ns() // 1_000_000 & 0xFFFFFFFFFFFF) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def occurrence_key(schedule: str, nominal: datetime) -> str:
    """The idempotency key of the occurrence of `schedule` at the aware instant `nominal`."""
    return f"{schedule}@{instant_text(nominal)}"


def instant_text(instant: datetime) -> str:
    """ISO-8601 in UTC with a ``Z``, the one form used in keys, headers and JSON output."""
    return instant.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
