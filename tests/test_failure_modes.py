"""The page of failure modes names tests that are there and run, and every row once."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "failure-modes.md"

ROWS = {
    "INT": (1, 2, 3, 4, 5, 7, 8, 9, 10),
    "ATM": (1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14),
    "CAP": (1, 3, 4, 5, 6, 9, 10, 11),
    "RACE": (1, 3, 4, 5, 6, 8, 10, 11),
    "LIV": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 14, 16, 17, 18, 20, 21),
    "API": (1, 2, 3, 5),
    "KEY": (1, 2, 3, 4, 5, 6, 8, 9, 11, 12),
    "HMA": (1, 3, 6, 7),
    "TOP": (1, 4, 6, 7),
    "CFG": (1, 3, 5, 6, 7, 8, 9, 10, 12, 13),
    "OBS": (1, 2, 4, 5),
    "SEC": (1, 2, 3, 4, 5, 6, 7, 8),
    "LEAK": (1, 2, 3, 6, 7),
    "PERF": (1, 2, 3, 4),
}
"""Which there are. A row that turns out to be of no interest keeps its number, and says so."""

KNOWN = [f"{family}-{number:02}" for family, numbers in ROWS.items() for number in numbers]
WITHOUT: set[str] = set()
"""Rows that no test holds."""

ID = re.compile(rf"(?<![-\w])(?:{'|'.join(ROWS)})-\d\d(?!\d)")
TEST = re.compile(r"`([\w./-]+\.py)::(\w+)`")
LEFT_OUT = re.compile(r"pytest\.mark\.(skip\b|xfail|long)")
REQUIREMENT = re.compile(r"\[(KV-[A-Z]+-\d\d)\]\(requirements\.md#(kv-[a-z]+-\d\d)\)")


def rows() -> list[tuple[str, str, str]]:
    """(id, what goes wrong, what holds it) of every line of every table."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and ID.match(line.removeprefix("|").strip()):
            name, wrong, held = (cell.strip() for cell in line.strip().strip("|").split("|"))
            found.append((name, wrong, held))
    return found


@functools.cache
def always_run(path: Path) -> dict[str, bool]:
    """Of a module each test at its top, and whether nothing keeps all of it from a run."""
    tree = ast.parse(path.read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = not any(LEFT_OUT.match(ast.unparse(decorator)) for decorator in node.decorator_list)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            assert not re.search(LEFT_OUT, ast.unparse(node.value)), path
    return found


@functools.cache
def requirements() -> set[str]:
    table = TESTS.parent / "conformance" / "kvstore_sdk_conformance" / "requirements.toml"
    return set(re.findall(r"KV-[A-Z]+-\d\d", table.read_text())) if tomllib.loads(table.read_text()) else set()


def test_every_row_is_there_once_and_in_order() -> None:
    assert [name for name, _, _ in rows()] == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_what_holds_a_row_is_there_and_runs(name: str) -> None:
    [(wrong, held)] = [(wrong, held) for row, wrong, held in rows() if row == name]
    assert wrong.endswith(".")
    tests, clauses = TEST.findall(held), REQUIREMENT.findall(held)
    assert "test_" not in TEST.sub("", held), "a test is not named as file and function"
    for path, function in tests:
        assert always_run(TESTS / path)[function], f"{function} is left out of some runs"
    for shown, anchor in clauses:
        assert shown in requirements()
        assert anchor == shown.lower()
    if name in WITHOUT:
        assert not tests
        assert re.fullmatch(r"None: .{30,}\.", held)
    else:
        assert tests, "a requirement alone says what backends do, and nothing of what is made of them"
        assert "None" not in held


def test_a_row_that_a_test_mentions_is_on_the_page() -> None:
    mentioned = {
        (found, str(path.relative_to(TESTS)))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for found in ID.findall(path.read_text())
    }
    assert len(mentioned) > 100
    assert {(found, path) for found, path in mentioned if found not in KNOWN} == set()
