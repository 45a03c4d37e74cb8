"""Each row of the table in docs/execution.md names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.servers.processes import ROOT

LINES = (ROOT / "docs" / "execution.md").read_text().split("<!-- checked: ends -->")[1].strip().splitlines()
TABLE = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES if line.startswith("|")]
HEAD, ROWS = TABLE[0], TABLE[2:]


def names(path: str) -> set[str]:
    """The tests of a file, those of a class with the class before them."""
    found = set()
    for node in ast.parse((ROOT / "tests" / path).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{before}{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_tests_of_each_end_exist(row: list[str]) -> None:
    assert len(row) == len(HEAD) == 7 and all(row)
    shown = row[-1].split(", ")
    for each in shown:
        test = re.fullmatch(r"`([\w/]+\.py)::([\w:]+)`", each)
        assert test, each
        assert test[2] in names(test[1]), each


def test_no_end_is_told_twice() -> None:
    ends = [row[0] for row in ROWS]
    assert len(ends) == len(set(ends)) >= 25
