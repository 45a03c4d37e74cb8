"""What the demo shows: a live table on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_ORDER = ("waiting", "claimed", "dispatched", "running", "succeeded", "dead", "cancelled")


class Screen(AbstractContextManager["Screen"]):
    """Tells what happens, and how many timers stand where."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._began = time.monotonic()
        self._events: list[str] = []
        self._numbers: Mapping[str, int] = {}
        self._lateness = ""
        self._told = 0.0

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """Tell one event."""
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        self._events.append(line)
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.update(self._picture())

    def show(self, numbers: Mapping[str, int], p50: float, p99: float) -> None:
        """Show the present numbers; as a plain line only every two seconds."""
        self._numbers = numbers
        self._lateness = f"lateness p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms"
        if self._live is not None:
            self._live.update(self._picture())
        elif time.monotonic() - self._told > 2:
            self._told = time.monotonic()
            states = ", ".join(f"{self._numbers.get(state, 0)} {state}" for state in _ORDER if self._numbers.get(state))
            print(f"{time.monotonic() - self._began:5.1f} s  [{states or 'nothing yet'}; {self._lateness}]", flush=True)

    def _picture(self) -> Group:
        table = Table(title="timers", title_justify="left")
        for state in _ORDER:
            table.add_column(state, justify="right", min_width=9)
        table.add_row(*(str(self._numbers.get(state, 0)) for state in _ORDER))
        return Group(Text("\n".join(self._events[-14:])), table, Text(self._lateness))
