"""The examples of docs/testing.md run, and its table names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvstore_sdk.testing
from kvstore_sdk.testing import KINDS, Action

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


PRINTED = {
    0: r"\[\('put', 1\), \('get', 1\), \('get', 2\)\]\n",
    1: r"( *[\d.]+ s to +[\d.]+ s: [a-z_]+\n){3}",
}
"""What examples print."""


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(compile(EXAMPLES[number], "docs/testing.md", "exec"), scope)
    assert re.fullmatch(PRINTED.get(number, ""), capsys.readouterr().out)
    if "region" in scope:
        scope["region"].close()  # type: ignore[attr-defined]


def first_cells() -> list[str]:
    return [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("|")]


def test_every_action_is_in_the_table() -> None:
    public = {name: getattr(kvstore_sdk.testing, name) for name in kvstore_sdk.testing.__all__}
    actions = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Action)}
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert {name for name in actions - {Action.__name__} if f"`{name}(" not in rows} == set()
    assert len(actions) == 16


def test_every_kind_of_a_schedule_is_in_the_table() -> None:
    assert [cell.strip("`") for cell in first_cells() if cell.startswith("`")] == list(KINDS)
