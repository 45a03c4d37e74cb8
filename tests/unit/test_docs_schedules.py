"""The tables of docs/schedules.md say what the product does."""

from __future__ import annotations

import ast
from datetime import datetime, timedelta, timezone

import pytest

from celery_durable.core.catchup import Policy
from celery_durable.recurrence import Cron
from tests.servers.processes import ROOT

DOCUMENT = (ROOT / "docs" / "schedules.md").read_text()


def table(mark: str) -> list[list[str]]:
    """The cells of the table below a mark, without its head."""
    lines = DOCUMENT.split(f"<!-- checked: {mark} -->")[1].strip().splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    assert rows
    return rows


@pytest.mark.parametrize(("what", "text", "zone", "begin", "end", "runs"), table("runs"))
def test_the_runs_of_each_row(what: str, text: str, zone: str, begin: str, end: str, runs: str) -> None:
    first, last = (datetime.fromisoformat(each).replace(tzinfo=timezone.utc) for each in (begin, end))
    recurrence, at, found = Cron(text, zone), first - timedelta(microseconds=1), []
    while (following := recurrence.next_after(at)) is not None and following <= last:
        found.append(f"{following:%m-%d %H:%M}")
        at = following
    assert ", ".join(found) == runs, what


@pytest.mark.parametrize(("what", "answer", "test"), table("tests"))
def test_the_test_of_each_row_exists(what: str, answer: str, test: str) -> None:
    path, name = test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, what
    assert answer


def test_every_word_of_a_policy_is_told() -> None:
    words = DOCUMENT.split("## Policy")[1].split("## What happens")[0]
    for word in Policy.__dataclass_fields__:
        assert f"`{word}`" in words, word
