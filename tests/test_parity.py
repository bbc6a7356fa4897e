"""docs/parity.md has every line of the specification once, and the tests that it names exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "parity.md"
LINES = [
    f"{section}{number}"
    for section, last in zip("ABCDF", (10, 11, 5, 7, 13), strict=True)
    for number in range(1, last + 1)
]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [A-F]\d+ \|", line)
]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@functools.cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions)


def test_every_line_is_there_once_and_in_order() -> None:
    assert [row[0] for row in ROWS] == LINES


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_line_says_what_it_is_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == 4
    assert row[1]
    named = NAMED.findall(row[2])
    assert named
    assert NAMED.sub("", row[2]).strip() == "", "nothing but names of tests"
    missing = [f"{file}::{name}" for file, name in named if not (TESTS / file).is_file() or name not in names_in(file)]
    assert not missing
