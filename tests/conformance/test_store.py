"""What a check leaves behind: nothing."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from suite_runner import run_suite

from kvstore_sdk_backends import memory
from kvstore_sdk_conformance.steps import until


def test_nothing_that_was_stored_stays_where_the_suite_cannot_remove_the_place(tmp_path: Path) -> None:
    before = {name for name, shelf in memory._shelves.items() if shelf.records}
    ran = run_suite("memory:", tmp_path, "core", "deletion", "tier")
    assert ran.verdict("core") == ran.verdict("tier") == "CONFORMANT"
    assert {name for name, shelf in memory._shelves.items() if shelf.records} == before


def test_no_folder_and_no_thread_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    before = set(threading.enumerate())
    assert run_suite("fs", tmp_path, "core", "sharing").verdict("sharing") == "CONFORMANT"
    assert list((tmp_path / "tmp").iterdir()) == []
    # Each is told to end, and not waited for for ever.
    assert until(lambda: not set(threading.enumerate()) - before, 30.0), set(threading.enumerate()) - before
