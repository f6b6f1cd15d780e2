"""What a run says on the terminal: who is tested, what is broken and how to see it again, and the verdicts."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from kvstore_sdk_conformance.offer import DEFAULT_PROFILES
from kvstore_sdk_conformance.outcome import Result, Status, Verdict
from kvstore_sdk_conformance.plugin import PACKAGE
from kvstore_sdk_conformance.report.report import Report
from kvstore_sdk_conformance.requirement import CONTRACT_VERSION, Level, Profile
from kvstore_sdk_conformance.run import Run

__all__ = ["block", "header", "rerun", "summary"]

_WIDTH = 100


def header(run: Run, redact: Callable[[str], str]) -> list[str]:
    """For the head of the run."""
    offered = ", ".join(run.offer.surfaces) or "no optional surface"
    profiles = ", ".join(profile.value for profile in Profile if profile in run.profiles)
    return [
        f"kvstore-sdk conformance {version('kvstore-sdk')}, contract {CONTRACT_VERSION}, seed {run.seed}",
        f"backend: {redact(run.target.target)} ({run.offer.name}; {offered})",
        f"profiles: {profiles}",
    ]


def rerun(run: Run, redact: Callable[[str], str], result: Result, *, by_command: bool) -> str:
    """The command that runs the check of a result again, by the door through which it ran.

    Secrets are not in it: those come from environment variables that are called like the options.
    """
    target = run.target
    # Each in one word: pytest looks for its settings beside whatever argument is the path of something.
    given = [("location", target.location)] if target.location is not None else []
    secret = target.secrets()
    given += [("option", f"{option}={f'env:{option.upper()}' if option in secret else value}") for option, value in target.options.items()]
    if run.profiles - DEFAULT_PROFILES:
        # The check may be one of those that are not looked at without being asked for.
        given.append(("profile", "all"))
    if run.largest_bytes != Run.largest_bytes:
        given.append(("largest", str(run.largest_bytes)))
    if run.examples != Run.examples:
        given.append(("examples", str(run.examples)))
    given.append(("seed", str(run.seed)))
    start = (
        ["kvstore", "conformance", target.target] if by_command else ["pytest", "--pyargs", PACKAGE, f"--kvstore-backend={target.target}"]
    )
    prefix = "--" if by_command else "--kvstore-"
    name = result.check.rpartition("::")[2].partition("[")[0]
    words = [*start, *(f"{prefix}{flag}={value}" for flag, value in given), "-k", name]
    return redact(shlex.join(words))


def block(result: Result, run: Run, redact: Callable[[str], str], again: str) -> str:
    """The failure of one requirement, in the vendor's words; `again` runs its check once more."""
    requirement = result.requirement
    lines = [f"{requirement.id} ({requirement.level.value}, {requirement.profile.value})", *_wrapped(requirement.sentence, "  ")]
    if result.status is Status.ERROR:
        lines += [
            "",
            "  The suite could not judge this, which says nothing about the backend:",
            *_indented(result.traceback or result.seen, "    "),
        ]
        return "\n".join(lines)
    lines += [*_wrapped(f"Why: {requirement.why}", "  "), ""]
    lines += [f"  expected  {result.expected}", f"  seen      {result.seen}"]
    if result.note:
        lines += ["", *_indented(result.note, "  ")]
    if result.traceback:
        lines += ["", "  Raised by the backend:", *_indented(result.traceback, "    ")]
    if result.replays:
        lines += ["", "  Replay without pytest:", "    from kvstore_sdk_conformance.replay import Mode, Record, Store"]
        lines += [f"    store = {redact(_store(run))}", *(f"    {line}" for line in result.replay)]
    elif result.replay:
        lines += ["", "  Last calls (not a script):", *(f"    {line}" for line in result.replay)]
    lines += ["", f"  Run it alone: {again}"]
    lines += [f"  Rule: kvstore conformance --explain {requirement.id}   (docs/requirements.md#{requirement.anchor})"]
    return "\n".join(lines)


def summary(report: Report) -> Iterator[str]:
    """The end of the run: counts, what is not good or was not looked at, figures, and a verdict for each profile."""
    for level in Level:
        if counts := report.counts(level):
            yield f"{level.value:<6}  " + ", ".join(f"{count} {status}" for status, count in counts.items())
    for result in report.results.values():
        if result.status in (Status.FAIL, Status.ADVISORY, Status.DEVIATION, Status.BLOCKED, Status.ERROR):
            text = result.reason or f"expected {result.expected}; seen {result.seen}" if result.expected or result.reason else result.seen
            yield f"  {result.requirement.id:<13} {result.status.value:<10} {_short(text)}"
    for id_ in report.stale:
        yield f"  {id_:<13} stale      declared as a deviation, but it did not happen, which fails the run; take it out of the file"
    claimed = [profile for profile, (found, _) in report.verdicts.items() if found is not Verdict.NOT_CLAIMED]
    for reason, ids in _not_applicable(report, claimed).items():
        yield from textwrap.wrap(f"{', '.join(ids)}: {reason}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
    measured = [result for result in report.results.values() if result.requirement.profile is Profile.PERFORMANCE and result.figures]
    if measured:
        yield "Figures, measured on this machine in this run:"
    for result in measured:
        yield from (f"  {result.requirement.id:<13} {name:<34} {value:.6g}" for name, value in result.figures.items())
    limit = report.capabilities["max_record_bytes"]
    if report.largest_bytes < limit:
        why = "the largest is half of the capacity" if report.is_bounded else "--largest sets this, or --kvstore-largest by pytest"
        yield f"Records up to {report.largest_bytes} bytes were tried, {limit} are declared; {why}."
    for profile, (found, note) in report.verdicts.items():
        if found is not Verdict.NOT_CLAIMED:
            yield f"{profile.value + ':':<13} {found.value}{f' ({note})' if note else ''}"
    if unclaimed := [profile.value for profile, (found, _) in report.verdicts.items() if found is Verdict.NOT_CLAIMED]:
        yield f"not claimed:  {', '.join(unclaimed)}"


def _not_applicable(report: Report, claimed: Sequence[Profile]) -> dict[str, list[str]]:
    """By reason, the MUSTs of the claimed profiles that were not looked at."""
    found: dict[str, list[str]] = {}
    for result in report.results.values():
        if result.status is Status.NOT_APPLICABLE and result.requirement.level is Level.MUST and result.requirement.profile in claimed:
            found.setdefault(result.reason, []).append(result.requirement.id)
    return found


def _store(run: Run) -> str:
    target = run.target
    arguments = [repr(target.target)]
    if target.options:
        arguments.append(repr(dict(target.options)))
    if target.location is not None:
        arguments.append(f"location={target.location!r}")
    return f"Store({', '.join(arguments)})"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _indented(text: str, indent: str) -> list[str]:
    return [indent + line for line in text.splitlines()]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
