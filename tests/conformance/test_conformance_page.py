"""docs/conformance.md names what there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvstore_sdk.cli import conformance
from kvstore_sdk_conformance import plugin
from kvstore_sdk_conformance.outcome import Status, Verdict

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "conformance.md").read_text()


def test_every_status_and_verdict_is_explained() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert [row for row in rows if row in {status.value for status in Status}] == [status.value for status in Status]
    assert [row for row in rows if row in {verdict.value for verdict in Verdict}] == [verdict.value for verdict in Verdict]


def options_of_the_command() -> set[str]:
    commands = argparse.ArgumentParser(prog="kvstore").add_subparsers()
    conformance.add_command(commands)
    return set(re.findall(r"(?<![\w-])(--?[a-z]+)", commands.choices["conformance"].format_usage()))


def test_every_option_is_explained() -> None:
    explained = set(re.findall(r"^\| `(--?[a-z]+)", PAGE, re.MULTILINE)) - {"--junitxml"}
    assert options_of_the_command() - {"-h"} == explained


def test_both_doors_have_the_same_options() -> None:
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    by_pytest = {option.names()[0].removeprefix("--kvstore-") for option in parser.getgroup("kvstore").options} - {"backend"}
    by_command = {name.lstrip("-") for name in options_of_the_command()}
    # The last three are pytest's own, or of no use to those who run it.
    assert by_pytest == by_command - {"h", "k", "list", "explain"}
