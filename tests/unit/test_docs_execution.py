"""Each row of the tables in docs/execution.md names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.servers.processes import ROOT

TEXT = (ROOT / "docs" / "execution.md").read_text()


def table(name: str) -> list[list[str]]:
    """The rows below a mark, without the two of the head."""
    section = TEXT.split(f"<!-- checked: {name} -->")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("|")
    ]
    assert {len(row) for row in rows[2:]} == {len(rows[0])}
    return rows[2:]


ENDS, OVERRIDES = table("ends"), table("overrides")


def names(path: str) -> set[str]:
    """The tests of a file, those of a class with the class before them."""
    found = set()
    for node in ast.parse((ROOT / "tests" / path).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{before}{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("row", ENDS + OVERRIDES, ids=[row[0] for row in ENDS + OVERRIDES])
def test_the_tests_of_each_row_exist(row: list[str]) -> None:
    assert all(row)
    shown = row[-1].split(", ")
    for each in shown:
        test = re.fullmatch(r"`([\w/]+\.py)::([\w:]+)`", each)
        assert test, each
        assert test[2] in names(test[1]), each


def test_no_end_is_told_twice() -> None:
    ends = [row[0] for row in ENDS]
    assert len(ends) == len(set(ends)) >= 25
