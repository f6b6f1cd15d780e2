"""The report for a README or a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore_sdk_conformance.outcome import Result, Status
from kvstore_sdk_conformance.report.report import Report
from kvstore_sdk_conformance.requirements import BY_ID
from kvstore_sdk_conformance.words import PROFILES

__all__ = ["markdown"]

_DEPARTS = (Status.FAIL, Status.ADVISORY, Status.ERROR)


def markdown(report: Report) -> str:
    """Verdicts, requirements, capabilities, deviations, and what was measured."""
    return "\n\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    yield f"# Conformance of `{report.backend}`"
    run = [
        f"kvstore-sdk {report.suite_version}",
        f"contract {report.contract_version}",
        f"seed {report.seed}",
        f"records up to {report.largest_bytes} bytes",
        report.at,
        f"Python {report.python}",
        report.platform,
    ]
    yield f"{report.implementation}: {', '.join(run)}{', strict' if report.strict else ''}."
    yield _table(
        ("profile", "verdict", "what it says"),
        [
            (profile.value, f"**{verdict.value}**{f' ({note})' if note else ''}", PROFILES[profile])
            for profile, (verdict, note) in report.verdicts.items()
        ],
    )
    yield "## Requirements"
    yield _table(
        ("id", "level", "requirement", "status"),
        [(r.requirement.id, r.requirement.level.value, r.requirement.sentence, _status(r)) for r in report.results.values()],
    )
    departures = [result for result in report.results.values() if result.status in _DEPARTS]
    if departures:
        yield "## What is broken"
        yield _table(("id", "expected", "seen"), [(result.requirement.id, result.expected, result.seen) for result in departures])
    deviations = [result for result in report.results.values() if result.status is Status.DEVIATION]
    if deviations or report.stale:
        yield "## Declared deviations"
        rows = [(result.requirement.id, result.requirement.sentence, result.reason) for result in deviations]
        rows += [(id_, BY_ID[id_].sentence, "**stale: it did not happen, which fails the run**") for id_ in report.stale]
        yield _table(("id", "requirement", "reason"), rows)
    yield "## Capabilities"
    offered = [(name, str(value)) for name, value in report.capabilities.items()]
    yield _table(("capability", "declared"), [*offered, ("optional surfaces", ", ".join(report.surfaces) or "none")])
    measured = [result for result in report.results.values() if result.figures]
    figures = [(result.requirement.id, name, f"{value:.6g}") for result in measured for name, value in result.figures.items()]
    if figures:
        yield "## Figures"
        yield "Measured on one machine, in this run; nothing is judged by them."
        yield _table(("id", "figure", "value"), figures)


def _status(result: Result) -> str:
    # Those two begin with the status.
    if result.status in (Status.BLOCKED, Status.NOT_APPLICABLE):
        return result.reason
    return "**fail**" if result.status is Status.FAIL else result.status.value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    # A line break or a bar would end the cell, and a tag would be taken for one of the page.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
