"""`kvstore demo --no-vllm`: through a store into another process, and honest about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.cli import demo_synthetic, main

PROMPTS = 1


def demo(store: Path) -> int:
    return main(["demo", "--no-vllm", "--prompts", str(PROMPTS), "--store", f"file://{store}"])


def records(store: Path) -> list[Path]:
    return sorted(store.rglob("*-g0"))


def test_the_records_stay_in_the_store_and_a_second_run_finds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunks = sum(len(tokens) // demo_synthetic.BLOCK_TOKENS for tokens in demo_synthetic.prompts(PROMPTS))
    assert demo(tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"{chunks} of {chunks}" in printed
    namespace = demo_synthetic.identity().namespace
    assert f"{chunks} new, 0 replaced, 0 there before; in file://{tmp_path} under v1/{namespace}." in printed
    assert f"To delete it, give the same store to kvstore prune --namespace {namespace}\n" in printed
    assert len(records(tmp_path)) == chunks
    assert all(file.stat().st_size > 8192 for file in records(tmp_path))
    assert demo(tmp_path) == 0
    assert f" 0 new, 0 replaced, {chunks} there before; in" in capsys.readouterr().out
    assert len(records(tmp_path)) == chunks


def test_a_damaged_record_fails_the_demo_and_the_next_run_repairs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path) == 0
    # The last chunk: those before it load well first, and that earns the reader the right to remove a bad one.
    key = demo_synthetic.keys_of(demo_synthetic.prompts(PROMPTS)[-1])[-1]
    damaged = next(file for file in records(tmp_path) if file.name.startswith(key[:-4].hex()))
    record = bytearray(damaged.read_bytes())
    record[5000] ^= 1
    damaged.write_bytes(record)
    capsys.readouterr()
    assert demo(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "FAILED: not every chunk came back as it was stored." in printed
    lines = [" ".join(line.split()) for line in printed.partition("What engine B counted:")[2].splitlines()]
    assert "corrupt payload 1" in lines
    assert "loads corrupt 1" in lines
    warnings = lines[lines.index("The first warnings of engine B:") + 1 :]
    assert any("is corrupt (payload)" in line for line in warnings)
    assert demo(tmp_path) == 0
    assert ": 1 new, 0 replaced," in capsys.readouterr().out


def test_the_stores_url_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It may hold a secret, and every user of a machine can read the command lines of all processes."""
    commands: list[str] = []
    real = subprocess.run

    def run(command: list[str], **kwargs: Any) -> Any:
        commands.append(" ".join(command))
        return real(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", run)
    assert demo(tmp_path) == 0
    assert len(commands) == 1
    assert str(tmp_path) not in commands[0]
    assert "FAILED" not in capsys.readouterr().out


def write_store(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `demo_store` for both engines, on a folder; `body` is what its factory returns."""
    head = "from kvstore_sdk.backend import open_backend\nfrom kvstore_sdk.testing import *\nimport sys\n"
    (folder / "demo_store.py").write_text(f"{head}def open_store(location, *, wish: str = ''):\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "demo_store", raising=False)


def test_options_reach_the_store_in_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A backend that prints must not disturb what the engines tell each other.
    body = "    with open(location + '-wishes', 'a') as file:\n        print('wish', wish, file=file)\n    print('hello')\n"
    write_store(tmp_path, body + "    return open_backend('fs', location=location)", monkeypatch)
    arguments = ["demo", "--no-vllm", "--prompts", "1", "--store", "demo_store:open_store", "--location", str(tmp_path / "records")]
    assert main([*arguments, "--option", "wish=a=b"]) == 0
    assert (tmp_path / "records-wishes").read_text().splitlines() == ["wish a=b"] * 3  # looked at, engine A, engine B
    assert main([*arguments, "--option", "hope=1"]) == 2
    assert "hope: unknown option" in capsys.readouterr().err


def test_a_breach_is_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = "[Fault('get', Return(lambda results: results[:-1]))]"
    write_store(tmp_path, f"    return FaultyBackend(open_backend('fs', location=location), {script})", monkeypatch)
    assert main(["demo", "--no-vllm", "--prompts", "1", "--store", "demo_store:open_store", "--location", str(tmp_path / "records")]) == 1
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert any(line[:2] == ["breaches", "get"] for line in lines)
    assert any(line[:2] == ["loads", "failed"] for line in lines)
    assert "BreachError" in printed.partition("The first warnings of engine B:")[2]


def test_a_folder_that_the_demo_made_is_named_for_deletion_and_gone_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--no-vllm", "--prompts", "1"]) == 0
    [made] = tmp_path.iterdir()
    assert f"To delete what the demo left: rm -r {made}\n" in capsys.readouterr().out
    shutil.rmtree(made)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--no-vllm", "--prompts", "1"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_equal_tokens_have_equal_keys_only_after_equal_tokens() -> None:
    tokens = demo_synthetic.prompts(1)[0]
    keys = demo_synthetic.keys_of(tokens)
    assert len(set(keys)) == len(keys) == len(tokens) // demo_synthetic.BLOCK_TOKENS
    assert demo_synthetic.keys_of(tokens[:40]) == keys[:2]
    other = demo_synthetic.keys_of([tokens[0] + 1, *tokens[1:]])
    assert not set(other) & set(keys)
