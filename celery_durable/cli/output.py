"""Where a command's words go: data to stdout, as tables or as one JSON document; notes to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import TextIOWrapper
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from celery_durable.core.text import jsonable

#: More columns than anything has.
UNLIMITED = 1_000_000
#: Columns of text that are left to what can be folded.
NARROWEST = 10

# Whatever a task put into its error must not move the operator's cursor or colour the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def plain(value: object) -> str:
    """Text for a terminal: control characters are shown, not obeyed; None is a dash."""
    if value is None or value == "":
        return "-"
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", str(value).replace("\r\n", "\n"))


class Output:
    """One command's output.

    Arguments:
        as_json: one JSON document instead of tables.
        no_color: plain text even on a terminal; ``NO_COLOR`` is honoured as well.
        quiet: leave the notes out; errors stay.
    """

    def __init__(self, *, as_json: bool = False, no_color: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self._quiet = quiet
        options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": False}
        if no_color:
            options["color_system"] = None
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A terminal without the character gets its number, not a traceback.
                stream.reconfigure(errors="backslashreplace")
        self._terminal = sys.stdout.isatty()
        # What goes into a file or another program is not cut to a width that nobody sees.
        self._out = Console(file=sys.stdout, width=None if self._terminal else UNLIMITED, **options)
        self._err = Console(file=sys.stderr, **options)

    def show(self, document: Mapping[str, Any], *tables: Callable[[], RenderableType | None]) -> None:
        """Print `document` as JSON, or else what `tables` make."""
        if self.as_json:
            print(json.dumps(jsonable(document), indent=2), file=self._out.file)  # the CLI's own output
            return
        for table in tables:
            made = table()
            if made is not None:
                self._out.print(self._fitted(made), crop=False)

    def line(self, document: Mapping[str, Any]) -> None:
        """Print `document` as one line of JSON, one of many."""
        print(json.dumps(jsonable(document)), file=self._out.file)  # the CLI's own output

    def _fitted(self, made: RenderableType) -> RenderableType:
        """Let the text columns of a table that is too wide for the terminal give way, but not ids and times.

        None gives way altogether: what then still is too wide, the terminal wraps.
        """
        if not isinstance(made, Table) or not self._terminal:
            return made

        def natural(part: RenderableType) -> int:
            return self._out.measure(part, options=self._out.options.update(width=UNLIMITED)).maximum

        whole = natural(made)
        if whole <= self._out.width:
            return made
        widths = [max(map(natural, (column.header, *column.cells)), default=0) for column in made.columns]
        made.width = whole - sum(widths)
        giving = []
        for column, width in sorted(zip(made.columns, widths, strict=True), key=lambda pair: pair[1]):
            if column.no_wrap or column.min_width is not None:
                column.width = min(width, column.min_width or width)
                made.width += column.width
            else:
                giving.append((column, width))
        for number, (column, width) in enumerate(giving):
            # From the narrowest: what it leaves of its share goes to the others.
            share = (self._out.width - made.width) // (len(giving) - number)
            column.width = min(width, max(share, NARROWEST))
            made.width += column.width
        return made

    def note(self, text: str) -> None:
        """Say something that is no data."""
        if not self._quiet:
            self._err.print(plain(text), soft_wrap=True)

    def error(self, text: str) -> None:
        """Say what went wrong."""
        self._err.print(Text(plain(text), style="red"), soft_wrap=True)


def listed(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, ids: bool = True, fixed: Sequence[int] = ()
) -> Table:
    """A table of rows: as wide as it needs to be, or as the terminal is.

    Arguments:
        columns: titles.
        rows: cells, already plain.
        ids: the first column holds ids, which are to be copied: it is wide enough for them.
        fixed: columns that are never folded, such as times.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, title in enumerate(columns):
        width = 36 if ids and number == 0 else None
        table.add_column(title, overflow="fold", no_wrap=number in fixed, min_width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def facts(pairs: Iterable[tuple[str, str]], *, title: str | None = None) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    return table
