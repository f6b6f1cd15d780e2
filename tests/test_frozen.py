"""What was written once by a frozen version of the record format or of the protocol is read as it was, for ever."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
FROZEN: dict[str, str] = {}
"""SHA-256 of each golden file of a frozen version. A file is added with its version, and none is ever changed or taken away."""


def version_of(name: str) -> int:
    """The version in a golden file's name."""
    found = re.fullmatch(r"[a-z0-9]+-v(\d+)\.(?:json|bin)", name)
    assert found is not None, f"{name} says no version"
    return int(found[1])


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_is_what_it_was(name: str) -> None:
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == FROZEN[name]


def test_every_golden_file_of_a_frozen_version_is_pinned() -> None:
    """Of version 0 none is. A new version is frozen with the first commit that has its files."""
    found = {path.name for path in GOLDEN.iterdir() if path.suffix in (".json", ".bin")}
    assert {name for name in found if version_of(name)} == set(FROZEN)
