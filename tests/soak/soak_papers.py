"""What is left of a soak: every second as a line of CSV, a picture, and the findings as JSON."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from soak_judge import Finding, Run, Sample
from soak_plot import Band, Panel, draw

__all__ = ["write_papers"]

_MIB = 1 << 20


def write_papers(run: Run, findings: Sequence[Finding], lanes: Mapping[str, Sequence[Band]], kills_s: Sequence[float]) -> list[Path]:
    """Write `soak.csv`, `soak.svg` and `soak.json` into the plan's folder, and return their paths."""
    out = Path(run.plan.out)
    paths = [out / "soak.csv", out / "soak.svg", out / "soak.json"]
    _write_csv(paths[0], run)
    paths[1].write_text(_picture(run, findings, lanes, kills_s))
    said = {
        "plan": dataclasses.asdict(run.plan),
        "good": all(finding.good for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "kills": run.kills,
        "child_kills": run.child_kills,
        "network_episodes": run.network_episodes,
        "counts": {name: run.total(name) for name in sorted({name for report in run.reports for name in report.get("counts", {})})},
        "ends": run.ends,
    }
    paths[2].write_text(json.dumps(said, indent=1) + "\n")
    return paths


def _write_csv(path: Path, run: Run) -> None:
    sources = ("host", *run.plan.tiers)
    names = [field.name for field in dataclasses.fields(Sample) if field.name != "hits"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *(f"hits_{source}" for source in sources)])
        for sample in run.samples:
            writer.writerow([*(getattr(sample, name) for name in names), *(sample.hits.get(source, 0) for source in sources)])


def _picture(run: Run, findings: Sequence[Finding], lanes: Mapping[str, Sequence[Band]], kills_s: Sequence[float]) -> str:
    samples = run.samples

    def line(name: str, unit: float = 1.0) -> list[float]:
        return [getattr(sample, name) / unit for sample in samples]

    hits = {source: _rates(samples, source) for source in ("host", *run.plan.tiers)}
    memory = {
        "own": line("anonymous_bytes", _MIB),
        "regions": line("shared_bytes", _MIB),
        "child": line("child_memory_bytes", _MIB),
    }
    panels = [
        Panel("memory", memory, "MiB"),
        Panel("descriptors", {"worker": line("descriptors"), "child": line("child_descriptors")}),
        Panel("threads", {"worker": line("threads")}),
        Panel("open jobs, and slots that late calls hold", {"jobs": line("open_jobs"), "held slots": line("held_slots")}),
        Panel("longest wait", {"of a job": line("oldest_job_s"), "of a request": line("oldest_wait_s")}, "s"),
        Panel("hits, each looked at", hits, "1/s"),
        Panel("calls abandoned, records found corrupt", {"abandoned": line("abandoned"), "corrupt": line("corrupt")}),
        Panel("wrong bytes, stuck", {"wrong": line("wrong"), "stuck": line("stuck")}),
    ]
    bad = [finding.what for finding in findings if not finding.good]
    title = f"Soak of {run.plan.seconds:g} s, seed {run.plan.seed}: {'all is well' if not bad else 'bad: ' + ', '.join(bad)}"
    return draw(
        title,
        [sample.t_s for sample in samples],
        panels,
        lanes=dict(lanes),
        marks_s=kills_s,
        from_s=run.plan.seconds * run.plan.warm_up,
    )


def _rates(samples: Sequence[Sample], source: str) -> list[float]:
    rates, before = [], 0
    for sample in samples:
        rates.append(float(max(0, sample.hits.get(source, 0) - before)))
        before = sample.hits.get(source, 0)
    return rates
