"""The time zone data that zoneinfo reads: where it comes from, whether it has changed, whether two copies differ.

zoneinfo prefers the system's copy to the ``tzdata`` package and keeps what it has
read for the life of the process (PEP 615), so a beat that runs for months needs
to be told.
"""

from __future__ import annotations

import hashlib
import zoneinfo
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from importlib import metadata, resources
from io import BytesIO
from pathlib import Path

from celery_durable.core import zones

#: Offsets are compared this far ahead, in these steps: no zone changes twice within one.
_AHEAD = timedelta(days=3 * 365)
_STEP = timedelta(hours=6)


def system(name: str) -> bytes | None:
    """The system's data of a zone; None where it has none."""
    for folder in zoneinfo.TZPATH:
        path = Path(folder, *name.split("/"))
        if path.is_file():
            return path.read_bytes()
    return None


def package(name: str) -> bytes | None:
    """The data of a zone in the ``tzdata`` package; None where it has none or is not installed."""
    try:
        found = resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
        return found.read_bytes() if found.is_file() else None
    except (ModuleNotFoundError, OSError):
        return None


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """A digest of the data of each zone as zoneinfo would read it now; of none that it cannot find."""
    found = {name: system(name) or package(name) for name in names}
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in found.items() if data is not None}


def source() -> str:
    """Where the data comes from and its release, in words."""
    for folder in zoneinfo.TZPATH:
        if Path(folder, "UTC").is_file():
            return f"{folder}{_release(Path(folder))}"
    try:
        return f"tzdata {metadata.version('tzdata')}"
    except metadata.PackageNotFoundError:
        return "none"


def _release(folder: Path) -> str:
    for name in ("tzdata.zi", "+VERSION"):
        path = folder / name
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                return f" ({file.readline().removeprefix('# version').strip()})"
    return ""


def differing(names: Iterable[str], now: datetime | None = None) -> list[str]:
    """Those zones whose clock differs within three years between the system's copy and the ``tzdata`` package.

    Arguments:
        names: IANA names.
        now: an aware instant; the host's time unless given.
    """
    now = (now or datetime.now(timezone.utc)).replace(minute=0, second=0, microsecond=0)
    found = []
    for name in names:
        ours, theirs = system(name), package(name)
        if ours is None or theirs is None or ours == theirs:
            continue
        first, second = (zoneinfo.ZoneInfo.from_file(BytesIO(data)) for data in (ours, theirs))
        instants = (now + step * _STEP for step in range(_AHEAD // _STEP))
        if any(each.astimezone(first).utcoffset() != each.astimezone(second).utcoffset() for each in instants):
            found.append(name)
    return found


def forget() -> None:
    """Read the data anew from now on; recurrences that were made before keep the old."""
    zoneinfo.ZoneInfo.clear_cache()
    zones.forget()
