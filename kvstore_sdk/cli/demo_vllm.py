"""The demo with real engines: four of them, one after another, each a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore_sdk.backend import BackendError
from kvstore_sdk.cli.demo_engine import (
    BLOCK_TOKENS,
    ENVIRONMENT,
    LOG_MARK,
    TOLERANCE,
    VOCABULARY,
    Answer,
    Answers,
    Request,
    difference,
    reusable_tokens,
)
from kvstore_sdk.cli.demo_synthetic import why
from kvstore_sdk.cli.store import Store
from kvstore_sdk.cli.table import columns
from kvstore_sdk.format import HEADER_BYTES

__all__ = ["missing_packages", "run"]

ENGINE_TIMEOUT_S = 300.0
"""One engine takes 15 s on two cores; a cold disk or a busy machine may need many times that."""
VERDICTS = {True: "ok", False: "FAILED", None: "not checked"}


def missing_packages() -> list[str]:
    """What this demo needs and this environment lacks."""
    return [name for name in ("vllm", "torch", "transformers") if importlib.util.find_spec(name) is None]


def prompts(number: int) -> list[list[int]]:
    """A prompt to warm up with, then `number` more."""
    chance = random.Random(0)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randrange(1000, 2000))] for _ in range(number + 1)]


def run(store: Store, number: int) -> int:
    """Run the four engines, print the table and what was checked. Returns the exit code."""
    # Before half a minute of engines: what is wrong with the store is said now.
    store.open().close()
    asked = prompts(number)
    chunks = [len(tokens) // BLOCK_TOKENS for tokens in asked]
    ours = {"type": "kvstore", "module_path": "kvstore_sdk.vllm"}
    tier = ours | store.entry()
    work = Path(tempfile.mkdtemp(prefix="kvstore-demo-work-"))
    keep_logs = True
    try:
        spoilt = work / "spoilt"
        spoilt.mkdir()
        other = ours | Store(f"file://{spoilt}").entry()
        engines = _Engines(work, asked)
        plain = engines.run("an engine without offloading answers").answers
        # Twice: into the store, and into a folder that will be spoilt.
        engines.run("engine A answers and stores", [tier, other], sum(chunks))
        reuse = engines.run("engine B answers from the store", [tier])
        _replace_a_payload(spoilt)
        control = engines.run("control: as B, one record replaced, unverified", [other | {"verify": False}]).answers
        _print(asked, plain, reuse.answers)
        # Both tiers of engine A name the same chunks alike.
        namespaces = sorted(folder.name for folder in (spoilt / "v1").iterdir())
        print(f"\n{store.summary()}\n{store.how_to_delete(namespaces)}\n")
        checks = _checks(asked, plain, reuse.answers, control)
        for holds, text in checks:
            print(f"{VERDICTS[holds]:11}  {text}")
        keep_logs = any(holds is False for holds, _ in checks)
        if keep_logs:
            print(f"\n{why('engine B', reuse.counted, engines.warnings_of('engine B answers from the store'))}")
        return 1 if keep_logs else 0
    finally:
        _clean_up(work, keep_logs)


def _clean_up(work: Path, keep_logs: bool) -> None:
    """A failure is explained by the logs; the rest is 100 MB and more, and requests may hold secrets of the store."""
    for part in work.iterdir():
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        elif part.suffix != ".log" or not keep_logs:
            part.unlink()
    if any(work.iterdir()):
        print(f"The logs of the engines are in {work}", flush=True)
    else:
        work.rmdir()


class _Engines:
    """Starts engines as processes, one at a time."""

    def __init__(self, work: Path, asked: list[list[int]]) -> None:
        self._work = work
        self._asked = asked
        self._number = 0
        self._logs: dict[str, Path] = {}

    def warnings_of(self, what: str) -> str:
        """What the SDK's part of an engine logged."""
        lines = self._logs[what].read_text(errors="replace").splitlines()
        return "\n".join(line.removeprefix(LOG_MARK) for line in lines if line.startswith(LOG_MARK))

    def run(self, what: str, tiers: Sequence[Mapping[str, Any]] = (), wait_for_stores: int = 0) -> Answers:
        self._number += 1
        self._logs[what] = self._work / f"{self._number}.log"
        files = {kind: self._work / f"{self._number}.{kind}" for kind in ("request", "answers", "log")}
        request = Request(str(self._work / "model"), self._asked, str(files["answers"]), [dict(tier) for tier in tiers], wait_for_stores)
        files["request"].write_text(json.dumps(dataclasses.asdict(request)))
        print(f"{what} ... ", end="", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "kvstore_sdk.cli.demo_engine", str(files["request"])]
        # Before vLLM 0.29 keys are random in each process unless this is set.
        environment = ENVIRONMENT | os.environ | {"PYTHONHASHSEED": "0"}
        with open(files["log"], "w") as log:
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, timeout=ENGINE_TIMEOUT_S)
                ended = f"failed with exit code {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                ended = f"did not end within {ENGINE_TIMEOUT_S:.0f} s"
        if ended:
            print("failed", flush=True)
            raise BackendError(f"demo: {what}: the engine {ended}. The end of its log:\n{files['log'].read_text()[-4000:]}")
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        said = json.loads(files["answers"].read_text())
        return Answers([Answer(**answer) for answer in said["answers"]], said["counted"])


def _replace_a_payload(folder: Path) -> None:
    """Give one record the payload of another: what a store without verification might hand out."""
    records = sorted(file for file in folder.glob("v1/*/*/*") if file.is_file())
    first, last = records[0], records[-1]
    first.write_bytes(first.read_bytes()[:HEADER_BYTES] + last.read_bytes()[HEADER_BYTES:])


def _print(asked: Sequence[Sequence[int]], plain: Sequence[Answer], reused: Sequence[Answer]) -> None:
    rows: list[Sequence[object]] = [("prompt", "tokens", "reused", "first token without", "with")]
    for number, (tokens, before, after) in enumerate(zip(asked, plain, reused, strict=True)):
        # The first one warms the engines up, so its times say nothing.
        times = [f"{answer.first_token_ms:.0f} ms" if number else "" for answer in (before, after)]
        rows.append((number or "warm-up", len(tokens), after.reused_tokens, *times))
    print()
    print(columns(rows, numbers=True))


def _checks(
    asked: Sequence[Sequence[int]], plain: Sequence[Answer], reused: Sequence[Answer], control: Sequence[Answer]
) -> list[tuple[bool | None, str]]:
    """What holds, what does not, and what was not put to the test (None)."""
    possible = sum(map(reusable_tokens, asked))
    got = sum(answer.reused_tokens for answer in reused)
    off = difference(plain, reused)
    agree: tuple[bool | None, str] = (
        off <= TOLERANCE,
        f"tokens and log-probabilities with and without reuse agree (largest difference: {_shown(off)})",
    )
    if not got and off <= TOLERANCE:
        agree = None, "whether answers with and without reuse agree: nothing was reused"
    wrong = difference(plain, control)
    return [
        (got == possible, f"reuse {got / possible:.3f}: {got} of the {possible} tokens that can be reused were"),
        agree,
        (len({tuple(answer.tokens) for answer in plain}) == len(plain), "different prompts have different answers"),
        (
            wrong > TOLERANCE,
            f"control: with one record replaced and verification off, answers differ (largest difference: {_shown(wrong)})",
        ),
    ]


def _shown(difference: float) -> str:
    return "other tokens" if difference == float("inf") else f"{difference:.4f} in a log-probability"
