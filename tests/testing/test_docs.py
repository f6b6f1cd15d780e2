"""The examples of docs/testing.md run, and its table names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvstore_sdk.testing
from kvstore_sdk.testing import Action

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(compile(EXAMPLES[number], "docs/testing.md", "exec"), scope)
    if "region" in scope:
        assert capsys.readouterr().out == "[('put', 1), ('get', 1), ('get', 2)]\n"
        scope["region"].close()  # type: ignore[attr-defined]


def test_every_action_is_in_the_table() -> None:
    public = {name: getattr(kvstore_sdk.testing, name) for name in kvstore_sdk.testing.__all__}
    actions = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Action)}
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert {name for name in actions - {Action.__name__} if f"`{name}(" not in rows} == set()
    assert len(actions) == 12
