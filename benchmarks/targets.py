"""What the benchmarks are to show, and what a run of them showed of it.

A script puts what it found into its JSON, as `"targets": [judge(...), ...]`; `run.py` collects these and says of the others that they were
not run. A target that several scripts or tables have a part of is met when all of them say so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TARGETS = {
    "fs": "fs, integrity on, direct: at least 1.0 of vLLM's C fs tier over all cells",
    "fs-sizes": "fs, integrity on, direct: at least 1.0 of vLLM's C fs tier over each record size",
    "fs-warm": "fs, integrity on, warm buffered reads: at least 0.9 of vLLM's C fs tier",
    "fs-fio": "fs, integrity on, direct: at least 0.9 of fio from 1 MiB",
    "fs-lmcache": "fs, integrity on, direct: ahead of LMCache's disk path",
    "calls": "time of the scheduler's thread, calls and whole steps: at most half of that of vLLM's fs tier",
    "gil": "a main loop in pure Python beside I/O in its process and in another: at most 5 points apart",
    "scale": "look-up, submit and memory at 10^3 to 10^6 keys: flat or logarithmic",
    "ttft": "time to first token with all chunks in a tier: below recomputing, and not above vLLM's tiering over fs",
    "survive": "a store that is dead, back again, or flooded: look-ups of 20 µs, used again in 2 probe intervals, loads in 3 times as long",
    "s3": "s3: at least 0.95 of raw NIXL, of vLLM's obj tier, of boto3 and of raw s3fs",
    "p2p-nixl": "p2p data plane, integrity on, from 1 MiB: at least 0.9 of raw NIXL",
    "p2p-vllm": "p2p, integrity on, from 256 KiB: at least 1.0 of vLLM's p2p tier",
}


@dataclass(frozen=True)
class Verdict:
    """What was found of one target. `met` is None when nothing was."""

    target: str
    met: bool | None
    found: str

    @property
    def word(self) -> str:
        return {True: "met", False: "**missed**", None: "not run"}[self.met]


def judge(name: str, met: bool, found: str) -> dict[str, str | bool]:
    """An entry of `targets` in a script's JSON: `found` is the figure with its interval.

    Raises:
        KeyError: no target has this name.
    """
    return {"name": name, "target": TARGETS[name], "met": met, "found": found}


def verdicts(files: Iterable[Path]) -> list[Verdict]:
    """One for each target, in order, from the JSON files of scripts. A file that is no JSON, or says nothing, is passed over."""
    found: dict[str, list[tuple[bool, str]]] = defaultdict(list)
    for file in sorted(files):
        for entry in _entries(file):
            found[entry["name"]].append((bool(entry["met"]), str(entry["found"])))
    return [
        Verdict(text, all(met for met, _ in found[name]), "; ".join(said for _, said in found[name]))
        if found[name]
        else Verdict(text, None, "")
        for name, text in TARGETS.items()
    ]


def table(rows: Iterable[Verdict]) -> str:
    """In Markdown."""
    lines = ["| target | verdict | found |", "|---|---|---|"]
    lines += [f"| {row.target} | {row.word} | {row.found} |" for row in rows]
    return "\n".join(lines) + "\n"


def _entries(file: Path) -> list[dict[str, str | bool]]:
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    listed = body.get("targets", []) if isinstance(body, dict) else []
    return [entry for entry in listed if isinstance(entry, dict) and entry.get("name") in TARGETS]
