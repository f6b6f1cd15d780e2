"""`kvstore demo` fails unless reuse is whole, answers agree, and the control proves that they could have differed.

`make demo` runs it with real engines. Here the engines' answers are given.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.cli import demo_vllm, main
from kvstore_sdk.cli.demo_engine import BLOCK_TOKENS, LOG_MARK, Answer, Answers
from kvstore_sdk.format import HEADER_BYTES

PLAIN = "an engine without offloading answers"
ENGINE_B = "engine B answers from the store"
CONTROL = "control: as B, one record replaced, unverified"


class Engines:
    """Stands for four engines: answers are right unless a test says otherwise, and A leaves two records in every tier."""

    changes: dict[tuple[str, int], dict[str, Any]]

    def __init__(self, work: Path, asked: Sequence[Sequence[int]]) -> None:
        self.asked = asked
        self.work = work

    def warnings_of(self, what: str) -> str:
        return f"a warning of {what}\n"

    def run(self, what: str, tiers: Sequence[dict[str, Any]] = (), wait_for_stores: int = 0) -> Answers:
        if wait_for_stores:
            for tier in tiers:
                folder = Path(tier["backend"].removeprefix("file://")) / "v1" / ("0" * 32) / "00"
                folder.mkdir(parents=True)
                for number in range(2):
                    (folder / f"{number}-g0").write_bytes(bytes([number]) * (HEADER_BYTES + 4096))
        self.check_control(what, tiers)
        answers = []
        for number, tokens in enumerate(self.asked):
            reused = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if tiers else 0
            answer = Answer([number, 7], [-1.0, -2.0], reused, 100.0)
            answers.append(dataclasses.replace(answer, **self.changes.get((what, number), {})))
        (self.work / f"{what}.log").touch()
        (self.work / f"{what}.request").write_text("hunter2")
        return Answers(answers, [["loads", "failed", 3]])

    @staticmethod
    def check_control(what: str, tiers: Sequence[dict[str, Any]]) -> None:
        if what == CONTROL:
            (tier,) = tiers
            assert tier["verify"] is False
            first, last = sorted(Path(tier["backend"].removeprefix("file://")).rglob("*-g0"))
            # The header of its own with the payload of the other.
            assert first.read_bytes() == bytes(HEADER_BYTES) + last.read_bytes()[HEADER_BYTES:]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[tuple[str, int], dict[str, Any]]) -> int:
    monkeypatch.setattr(Engines, "changes", {(CONTROL, 1): {"logprobs": [-1.0, -2.3]}, **changes}, raising=False)
    monkeypatch.setattr(demo_vllm, "_Engines", Engines)
    monkeypatch.setattr(demo_vllm, "missing_packages", list)
    work, store = tmp_path / "work", tmp_path / "store"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    return main(["demo", "--prompts", "2", "--store", f"file://{store}"])


def test_all_checks_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, monkeypatch, {}) == 0
    printed = capsys.readouterr().out
    assert "reuse 1.000" in printed
    assert f"file://{tmp_path}/store now holds 2 records in all, manifests among them, 16.0 KiB." in printed
    assert f"give the same store to kvstore prune --namespace {'0' * 32}\n" in printed
    assert "FAILED" not in printed
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({(ENGINE_B, 2): {"reused_tokens": 0}}, "reuse"),
        ({(ENGINE_B, 1): {"tokens": [1, 8]}}, "tokens and log-probabilities"),
        ({(ENGINE_B, 1): {"logprobs": [-1.0, -2.1]}}, "tokens and log-probabilities"),
        ({(CONTROL, 1): {}}, "control"),
    ],
    ids=["a chunk was computed again", "another token", "another log-probability", "the control found nothing"],
)
def test_one_check_that_does_not_hold_fails_the_demo(
    change: dict[tuple[str, int], dict[str, Any]],
    failed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, monkeypatch, change) == 1
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert len(lines) == 1
    assert failed in lines[0]
    assert "What engine B counted:\n  loads  failed  3\n" in printed
    assert f"a warning of {ENGINE_B}" in printed
    [work] = (tmp_path / "work").iterdir()
    assert f"The logs of the engines are in {work}\n" in printed
    assert {file.suffix for file in work.iterdir()} == {".log"}


def test_answers_without_reuse_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, monkeypatch, {(ENGINE_B, number): {"reused_tokens": 0} for number in range(3)}) == 1
    printed = capsys.readouterr().out
    assert "not checked  whether answers with and without reuse agree: nothing was reused\n" in printed
    assert "FAILED       reuse 0.000" in printed


def test_a_model_that_answers_every_prompt_alike_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {(engine, number): {"tokens": [0, 7]} for engine in (PLAIN, ENGINE_B, CONTROL) for number in (1, 2)}
    same[CONTROL, 1]["logprobs"] = [-1.0, -2.3]
    assert run(tmp_path, monkeypatch, same) == 1
    assert "FAILED       different prompts have different answers" in capsys.readouterr().out


def test_a_store_that_cannot_serve_is_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_vllm, "missing_packages", list)
    assert main(["demo", "--store", "memory:"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("kvstore: demo: store: its capabilities say shared=False")


def test_warnings_of_the_sdk_are_found_in_an_engines_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine itself is stood in for by a process that logs, and prints what it is to answer."""
    answers = json.dumps({"answers": [], "counted": [["loads", "failed", 3]]})
    said = f"'{LOG_MARK}first'; echo Triton is old; echo '{LOG_MARK}second'"
    (tmp_path / "engine").write_text(f"#!/bin/sh\necho {said}\necho '{answers}' > {tmp_path}/1.answers\n")
    (tmp_path / "engine").chmod(0o755)
    monkeypatch.setattr(demo_vllm.sys, "executable", str(tmp_path / "engine"))
    engines = demo_vllm._Engines(tmp_path, [])
    assert engines.run("engine").counted == [["loads", "failed", 3]]
    assert engines.warnings_of("engine") == "first\nsecond"


def test_an_engine_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_vllm, "missing_packages", list)
    monkeypatch.setattr(demo_vllm, "prompts", lambda number: "not a list of prompts")
    monkeypatch.setattr(demo_vllm.sys, "executable", "/bin/ls")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--store", f"file://{tmp_path}/store"]) == 1
    printed, error = capsys.readouterr()
    [work] = tmp_path.glob("kvstore-demo-work-*")
    assert f"The logs of the engines are in {work}\n" in printed
    assert [file.name for file in work.iterdir()] == ["1.log"]
    assert "the engine failed with exit code 2" in error
    assert "kvstore_sdk.cli.demo_engine" not in error.splitlines()[0]
