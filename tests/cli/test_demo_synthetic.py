"""`kvstore demo --no-vllm`: through a store into another process, and honest about it."""

from __future__ import annotations

import subprocess
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
    assert f"file://{tmp_path} under v1/{demo_synthetic.identity().namespace}; {chunks} of them are new" in printed
    assert len(records(tmp_path)) == chunks
    assert all(file.stat().st_size > 8192 for file in records(tmp_path))
    assert demo(tmp_path) == 0
    assert "; 0 of them are new" in capsys.readouterr().out
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
    assert "FAILED" in capsys.readouterr().out
    assert demo(tmp_path) == 0
    assert "; 1 of them are new" in capsys.readouterr().out


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
    assert "of them are new" in capsys.readouterr().out


def test_equal_tokens_have_equal_keys_only_after_equal_tokens() -> None:
    tokens = demo_synthetic.prompts(1)[0]
    keys = demo_synthetic.keys_of(tokens)
    assert len(set(keys)) == len(keys) == len(tokens) // demo_synthetic.BLOCK_TOKENS
    assert demo_synthetic.keys_of(tokens[:40]) == keys[:2]
    other = demo_synthetic.keys_of([tokens[0] + 1, *tokens[1:]])
    assert not set(other) & set(keys)
