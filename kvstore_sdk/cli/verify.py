"""`kvstore verify`: whether a store holds what its names say."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.table import human_bytes
from kvstore_sdk.cli.target import Target, add_filter, add_output, add_target, add_threads, prefix_of, retry_of, target_of
from kvstore_sdk.tools.check import Finding, Verdict
from kvstore_sdk.tools.facts import shown
from kvstore_sdk.tools.verify import MAX_SAMPLE, Sample, Verification

__all__ = ["add_command"]

COMMAND = "verify"


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Reads records and holds each against its name and its namespace: header, key, layout, length and checksum. Prints what is wrong, "
        "one line each. Exit code 0: nothing is; 1: something is corrupt or could not be read. Foreign names are told, and not wrong."
    )
    parser: argparse.ArgumentParser = commands.add_parser(COMMAND, help="check what is in a store", description=text)
    add_target(parser)
    add_filter(parser)
    parser.add_argument("--sample", metavar="N|P%", type=_sample, help="so many records, or so many of each hundred (default: all)")
    parser.add_argument("--seed", metavar="N", type=_seed, help="of the sample; the same draws the same records (default: a new one)")
    add_threads(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong as it is found, and the sum of it."""
    target = target_of(arguments, COMMAND)
    sample: Sample | None = arguments.sample
    if sample is not None:
        sample = Sample(sample.records, sample.percent, secrets.randbelow(2**32) if arguments.seed is None else arguments.seed)
    with target.open(writes=False) as backend:
        run = Verification(backend, retry_of(arguments), prefix=prefix_of(arguments), sample=sample, threads=arguments.threads)
        with Progress(arguments) as progress, Report(COMMAND, as_json=arguments.json) as report:
            for finding in run.findings():
                if progress.due:
                    read = f"{run.records} records, {human_bytes(run.read_bytes)}, {_rate(run)}"
                    progress.show(f"verify: {read}, {run.counts[Verdict.CORRUPT]} corrupt")
                if finding.verdict not in (Verdict.FINE, Verdict.UNPROVEN, Verdict.GONE):
                    progress.clear()
                    report.item(_line(finding), **_fields(finding))
            progress.clear()
            report.end(_sum(target, sample, run), store=str(target), sample=_drawn(sample), **_sums(run))
    return 0 if run.is_clean else 1


def _line(finding: Finding) -> str:
    flaw = f" ({finding.flaw.value})" if finding.flaw else ""
    return f"{finding.verdict.value}{flaw}: {shown(finding.name, 1024)}: {shown(finding.problem, 300)}"


def _fields(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "kind": finding.kind.value,
        "size_bytes": finding.size_bytes,
        "verdict": finding.verdict.value,
        "flaw": finding.flaw.value if finding.flaw else None,
        "problem": finding.problem,
    }


def _rate(run: Verification) -> str:
    return f"{run.read_bytes / 1e6 / max(run.elapsed_s, 1e-9):.0f} MB/s"


def _sum(target: Target, sample: Sample | None, run: Verification) -> str:
    drawn = "" if sample is None else f" of a sample (--seed {sample.seed})"
    read = f"{run.records} records{drawn}, {human_bytes(run.read_bytes)} read in {run.elapsed_s:.1f} s ({_rate(run)})"
    counts = [f"{run.counts[verdict]} {_WORDS[verdict]}" for verdict in Verdict if run.counts[verdict]]
    flaws = ", ".join(f"{flaw.value} {count}" for flaw, count in run.flaws.items())
    return f"{target}: {read}: {', '.join(counts) or 'nothing there'}" + (f"; flaws: {flaws}" if flaws else "")


_WORDS = {
    Verdict.FINE: "fine",
    Verdict.UNPROVEN: "whole, of namespaces without a manifest",
    Verdict.CORRUPT: "corrupt",
    Verdict.BAD_MANIFEST: "no manifest where one should be",
    Verdict.FOREIGN: "foreign",
    Verdict.GONE: "removed meanwhile",
    Verdict.UNREADABLE: "unreadable",
}


def _drawn(sample: Sample | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    return {"records": sample.records, "percent": None if sample.records else sample.percent, "seed": sample.seed}


def _sums(run: Verification) -> dict[str, Any]:
    return {
        "ok": run.is_clean,
        "listed": run.listed,
        "records": run.records,
        "manifests": run.manifests,
        "read_bytes": run.read_bytes,
        "elapsed_s": round(run.elapsed_s, 3),
        "mb_per_s": round(run.read_bytes / 1e6 / max(run.elapsed_s, 1e-9), 3),
        "counts": {verdict.value: run.counts[verdict] for verdict in Verdict},
        "flaws": {flaw.value: count for flaw, count in run.flaws.items()},
    }


def _sample(text: str) -> Sample:
    try:
        if text.endswith("%"):
            percent = float(text[:-1])
            if 0 < percent <= 100:
                return Sample(percent=percent)
        elif text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_SAMPLE:
            return Sample(records=int(text))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of records, 1 to {MAX_SAMPLE}, or a share such as 5%")


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2**64 - 1")
    return int(text)
