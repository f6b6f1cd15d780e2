"""Names cannot leave the root of a store, whatever bytes they are made of."""

from __future__ import annotations

import os.path
import re
import string
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.backend import (
    Capabilities,
    ConfigError,
    Deadline,
    DeleteStatus,
    Durability,
    Fork,
    GetStatus,
    Mode,
    PutStatus,
    is_valid_name,
)

# An oracle of its own: sets of characters instead of a regular expression.
FIRST = set(string.ascii_letters + string.digits + "_-")
REST = FIRST | {"."}


def allowed(name: str) -> bool:
    return all(segment and segment[0] in FIRST and set(segment) <= REST for segment in name.split("/"))


@pytest.mark.parametrize("name", ["a", "v1/" + "0" * 32 + "/ab/ab12-g0", "manifest.json", "a.b", "_", "-", "a/b/c", "A..B", "x" * 255])
def test_names_of_the_sdk_are_valid(name: str) -> None:
    assert is_valid_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/.b",
        ".kvstore",
        "a b",
        "a\n",
        "a\0",
        "é",
        "a\\b",
        "a:b",
        "~",
        "a?b",
        "\ud800",
        "a/..",
        "\u0661",
    ],
)
def test_what_could_mean_something_else_is_not_valid(name: str) -> None:
    assert not is_valid_name(name)


def test_the_length_counts() -> None:
    assert is_valid_name("a" * 10, 10)
    assert not is_valid_name("a" * 11, 10)


@given(st.text(alphabet=st.sampled_from("ab./-_ \n\0é"), max_size=12) | st.text(max_size=12))
def test_valid_names_stay_below_the_root(name: str) -> None:
    assert is_valid_name(name) == allowed(name)
    if is_valid_name(name):
        path = os.path.normpath(os.path.join("/root-of-store", name))
        assert path == "/root-of-store/" + name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_record_bytes", 0),
        ("max_batch", -1),
        ("max_parts", True),
        ("align_bytes", 3),
        ("align_bytes", 8192),
        ("max_concurrency", 1.5),
        ("batch_bytes", -1),
        ("batch_bytes", True),
        ("shared", "yes"),
        ("read_only", 1),
        ("durability", "process_crash"),
        ("fork", None),
    ],
)
def test_capabilities_are_checked_when_they_are_made(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Capabilities(**{"max_record_bytes": 1, field: value})  # type: ignore[arg-type]


def test_a_value_of_an_enum_that_is_none_is_told_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'process' must be Durability.NONE or Durability.PROCESS_CRASH"):
        Capabilities(max_record_bytes=1, durability="process")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Durability, Fork, Mode, PutStatus, GetStatus, DeleteStatus])
def test_help_says_what_each_member_of_an_enum_means(kind: type[Enum]) -> None:
    """`help()` shows the text of the class, and none that stands beside a member."""
    assert kind.__doc__ is not None
    for member in kind:
        assert re.search(rf"^\s+{member.name}: [`\w]", kind.__doc__, re.MULTILINE), member


def test_a_deadline_is_an_instant_and_remaining_time_is_never_negative() -> None:
    past, future = Deadline.after(-1.0), Deadline.after(60.0)
    assert past.expired
    assert past.remaining_s() == 0.0
    assert not future.expired
    assert 59.0 < future.remaining_s() <= 60.0
