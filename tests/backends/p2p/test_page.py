"""What docs/backends/p2p.md shows is run, and what it quotes is what the code says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

from kvstore_sdk.vllm.hints import parse_hint
from kvstore_sdk.vllm.options import parse_tier_options
from kvstore_sdk_backends.p2p.backend import P2PBackend

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "backends" / "p2p.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_program_prints_what_the_page_says() -> None:
    [program] = blocks("python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    [said] = re.findall(r"^It prints (.*)\.$", PAGE, re.MULTILINE)
    assert done.stdout.split("\n")[:-1] == re.findall(r"`([^`]+)`", said)


def test_the_entries_are_accepted_and_the_requests_understood() -> None:
    entries = [json.loads(block) for block in blocks("json")]
    for entry in entries:
        if "kv_transfer_params" in entry:
            hint, problem = parse_hint(entry["kv_transfer_params"], 10.0)
            assert hint is not None, problem
        else:
            # What of a node is shown alone is a part of its entry.
            tier = {"type": "kvstore", "module_path": "kvstore_sdk.vllm", "backend": "p2p", "location": "10.0.0.1:7400"}
            parse_tier_options("the entry", tier | entry)
    assert len(entries) == 5


def test_all_that_is_counted_is_in_the_table(open_node: Callable[..., P2PBackend]) -> None:
    table = PAGE.partition("| `what` | counts |\n|---|---|\n")[2].partition("\n\n")[0]
    described = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(described) == sorted(open_node().counters())


def test_the_lines_of_the_log_are_in_the_code() -> None:
    table = PAGE.partition("| line | meaning |")[2].partition("\n\n")[0]
    quoted = re.findall(r"`([^`]+)`", table)
    assert len(quoted) > 8
    code = "".join(path.read_text() for path in (ROOT / "backends" / "kvstore_sdk_backends" / "p2p").glob("*.py"))
    code += (ROOT / "kvstore_sdk" / "vllm" / "opening.py").read_text()
    for line in quoted:
        for part in re.split(r"\.\.\.|HOST:PORT|ADDRESS|\(\w+\)|, ", line):
            assert part.strip(" :") in code, line
