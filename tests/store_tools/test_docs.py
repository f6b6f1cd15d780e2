"""The operators' page shows commands that are there, and what they really print."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import fill
from places import Place, Ran

from kvstore_sdk.cli.command import make_parser
from kvstore_sdk.tools.check import Verdict

PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
TOOLS = ["health", "ls", "stat", "verify", "repair", "prune", "copy"]
Command = Callable[..., Ran]


def section(command: str) -> str:
    return SECTIONS[command.capitalize()]


@pytest.fixture
def example(make_folder: Callable[[], Place]) -> Place:
    """The store of the page: two chunks of each of two groups, one of them damaged, and somebody's notes; a day apart."""
    place = make_folder()
    filled = fill(place.tree, ["acme/tiny-llama"], chunks=2)
    place.tree.write("notes.txt", b"somebody's notes\n")
    names = sorted(filled.records)
    damaged = bytearray(filled.records[names[1]])
    damaged[5000] ^= 1
    place.tree.write(names[1], bytes(damaged))
    for days, name in enumerate([*names, *filled.manifests, "notes.txt"]):
        place.tree.set_time(name, time.time() - 86400 * (3 + days))
    return place


@pytest.mark.parametrize("line", dict.fromkeys(re.findall(r"^kvstore .*$|(?<=\[`)kvstore [^`]*(?=`\])", PAGE, re.MULTILINE)))
def test_every_command_on_the_page_is_a_command(line: str) -> None:
    parsed = make_parser().parse_args(shlex.split(line)[1:])
    assert callable(parsed.run)


@pytest.mark.parametrize("command", TOOLS)
def test_every_tool_has_a_section_that_knows_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--no-progress"}
    shared = set(re.findall(r"--[a-z][a-z-]+", PAGE[: PAGE.index("## Health")]))
    told = set(re.findall(r"--[a-z][a-z-]+", section(command)))
    # `ls` tells how to say which names, for all.
    told |= {"--namespace", "--prefix"} & set(re.findall(r"--[a-z][a-z-]+", section("ls")))
    assert options - told - shared - {"--to-location", "--to-option"} == set()
    others = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - options
    assert told & (others - shared) <= {"--namespace", "--prefix", "--kind"}


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_what_the_page_shows_is_what_is_printed(command: str, example: Place, kvstore: Command) -> None:
    [shown] = re.findall(r"^```text\n(.*?)^```$", section(command), re.DOTALL | re.MULTILINE)
    printed = kvstore(command, example).out.replace(example.url, "file:///mnt/kv")

    def lines(text: str) -> list[str]:
        return [re.sub(r"in \S+ s \(\d+ MB/s\)", "in T", line) for line in text.splitlines()]

    # What is corrupt is told as it is found, by any thread.
    order: Any = sorted if command == "verify" else list
    assert order(lines(printed)) == order(lines(shown))


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_every_name_in_the_json_is_on_the_page(command: str, example: Place, kvstore: Command) -> None:
    text = section(command) + PAGE[: PAGE.index("## Health")]

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value))
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set()

    out = kvstore(command, example, "--json").out
    found = names([json.loads(line) for line in out.splitlines()] if command == "ls" else json.loads(out))
    values = {verdict.value for verdict in Verdict} | {"payload"}
    assert [name for name in sorted(found - values - {"command"}) if f"`{name}`" not in text] == []


def test_the_verdicts_on_the_page_are_those_that_are_given() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", section("verify"), re.MULTILINE)) == sorted(verdict.value for verdict in Verdict)
