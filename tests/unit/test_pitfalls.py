"""The page of faults that are made impossible names a test for each, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "pitfalls.md"
FAULTS = 35


def named() -> dict[int, list[str]]:
    """Number of the fault -> ``folder/file.py::test``."""
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+\.py::\w+)`", tests) for number, tests in rows}


def test_each_fault_names_a_test() -> None:
    rows = named()
    assert list(rows) == list(range(1, FAULTS + 1))
    assert [number for number, tests in rows.items() if not tests] == []


def test_every_named_test_exists() -> None:
    missing = []
    for test in {test for tests in named().values() for test in tests}:
        file, name = test.split("::")
        tree = ast.parse((TESTS / file).read_text())
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        if name not in functions:
            missing.append(test)
    assert missing == []
