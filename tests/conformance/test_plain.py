"""What a backend says reaches people bounded, and as text alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suite_runner import QUICK, run_suite

from kvstore_sdk.backend import BackendError
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory
from kvstore_sdk_conformance.plain import SHOWN, plain

LONG = 5_000_000
RED = "\x1b[31m"


@given(st.text(max_size=60), st.integers(4, 40))
def test_nothing_is_left_that_a_terminal_obeys_and_the_length_is_bounded(text: str, most: int) -> None:
    shown = plain(text, most)
    assert all(one.isprintable() or one in "\n\t" for one in shown)
    # The longest escape has ten characters.
    assert len(shown) <= 10 * most + 40
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=SHOWN))
def test_what_can_be_printed_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


def test_of_a_long_text_the_middle_is_left_out() -> None:
    shown = plain("a" + "x" * 10_000 + "z", 100)
    assert shown == "a" + "x" * 49 + " ... 9902 characters more ... " + "x" * 49 + "z"


class Verbose(BackendWrapper):
    """Says too much of what is wrong, in red."""

    def around(self, op, items, deadline, proceed):  # type: ignore[no-untyped-def]
        if op == "get":
            sys.stdout.write(RED + "p" * LONG)
            raise BackendError(f"{RED}get failed: " + "y" * LONG)
        return proceed(items)


def open_verbose(location: str) -> Verbose:
    return Verbose(open_memory(location.strip("/")))


def test_an_error_of_millions_of_characters_makes_no_report_of_that_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_suite("test_plain:open_verbose", tmp_path, "core", options=[*QUICK, f"--kvstore-report={tmp_path / 'r.md'}"])
    said = "".join(capfd.readouterr())
    failed = ran.result("KV-CORE-01")
    assert failed["status"] == "fail"
    assert failed["seen"].startswith("BackendError: \\x1b[31mget failed: yyy")
    texts = [json.dumps(ran.report), (tmp_path / "r.md").read_text(), said]
    assert [len(text) for text in texts if len(text) > 500_000] == []
    assert [text for text in texts if RED in text] == []
