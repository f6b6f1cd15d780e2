"""`kvstore repair`: remove what is corrupt."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.table import human_bytes
from kvstore_sdk.cli.target import add_filter, add_output, add_target, add_threads, prefix_of, retry_of, target_of
from kvstore_sdk.tools.check import Verdict
from kvstore_sdk.tools.facts import Kind, shown
from kvstore_sdk.tools.repair import Mended, Outcome, Repair

__all__ = ["add_command"]

COMMAND = "repair"
_LEFT = (Outcome.TOO_LARGE, Outcome.CHANGED, Outcome.UNREADABLE, Outcome.FAILED)


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Reads every record, then looks again at what was bad and removes it if it still is: records whose bytes are not what their name "
        "says, and manifests that are none. Good records and manifests are never touched. The store may be in use; engines store again "
        "what is missing. Exit code 0: nothing bad is left; 1: something is, or a dry run found something."
    )
    parser: argparse.ArgumentParser = commands.add_parser(COMMAND, help="remove what is corrupt", description=text)
    add_target(parser)
    add_filter(parser)
    parser.add_argument("--foreign", action="store_true", help="remove what is no record and no manifest as well")
    parser.add_argument("--even-most", action="store_true", help="remove although most records look corrupt")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, and say what would be removed")
    add_threads(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Repair. Names what was not fine, a line each, and their sum."""
    target = target_of(arguments, COMMAND)
    dry_run = arguments.dry_run
    counts: Counter[Outcome] = Counter()
    removed_bytes = removed_foreign = 0
    with target.open(writes=not dry_run, creates=False) as backend, Progress(arguments) as progress:

        def seen() -> None:
            if progress.due:
                run = repair.verification
                progress.show(f"repair: {run.records} records, {human_bytes(run.read_bytes)} read; {repair.suspects} to be looked at again")

        repair = Repair(
            backend,
            retry_of(arguments),
            prefix=prefix_of(arguments),
            foreign=arguments.foreign,
            even_most=arguments.even_most,
            threads=arguments.threads,
            dry_run=dry_run,
            seen=seen,
        )
        verification = repair.verification
        with Report(COMMAND, as_json=arguments.json, dry_run=dry_run) as report:
            for item in repair:
                progress.clear()
                report.item(_line(item, dry_run), **_fields(item, dry_run))
                counts[item.outcome] += 1
                if item.outcome is Outcome.REMOVED:
                    removed_bytes += item.size_bytes
                    removed_foreign += item.kind is Kind.FOREIGN
                if progress.due:
                    progress.show(f"repair: {sum(counts.values())} seen to, {repair.suspects} had to be looked at again")
            found = verification.counts
            progress.clear()
            report.end(
                *_sentences(repair, counts, removed_bytes, dry_run),
                refused=repair.is_refused,
                records=verification.records,
                read_bytes=verification.read_bytes,
                fine=found[Verdict.FINE] + found[Verdict.UNPROVEN],
                corrupt=found[Verdict.CORRUPT],
                bad_manifests=found[Verdict.BAD_MANIFEST],
                foreign=found[Verdict.FOREIGN],
                removed_bytes=removed_bytes,
                outcomes={outcome.value: counts[outcome] for outcome in Outcome},
            )
    would_remove = dry_run and counts[Outcome.REMOVED] > removed_foreign
    return 1 if repair.is_refused or would_remove or any(counts[outcome] for outcome in _LEFT) else 0


def _line(item: Mended, dry_run: bool) -> str:
    word = "would remove" if dry_run and item.outcome is Outcome.REMOVED else item.outcome.value.replace("_", " ")
    flaw = f" ({item.flaw.value})" if item.flaw else ""
    return f"{word}{flaw}: {shown(item.name, 1024)}" + (f": {shown(item.problem, 300)}" if item.problem else "")


def _fields(item: Mended, dry_run: bool) -> dict[str, Any]:
    return {
        "result": "would_remove" if dry_run and item.outcome is Outcome.REMOVED else item.outcome.value,
        "name": item.name,
        "kind": item.kind.value,
        "size_bytes": item.size_bytes,
        "flaw": item.flaw.value if item.flaw else None,
        "problem": item.problem,
    }


def _sentences(repair: Repair, counts: Counter[Outcome], removed_bytes: int, dry_run: bool) -> list[str]:
    run, found = repair.verification, repair.verification.counts
    bad = f"{found[Verdict.CORRUPT]} corrupt, {found[Verdict.BAD_MANIFEST]} bad manifests, {found[Verdict.FOREIGN]} foreign"
    said = [f"{run.records} records read, {human_bytes(run.read_bytes)}: {bad}"]
    if repair.is_refused:
        said.append(
            "nothing was removed, for most records look corrupt: another build may have written them, or this machine may read them "
            "wrong; look at some with kvstore verify, from another machine too, and remove them with --even-most"
        )
        return said
    verb = "would be removed" if dry_run else "removed"
    said.append(f"{counts[Outcome.REMOVED]} {verb}, {human_bytes(removed_bytes)} together")
    said += [f"{counts[outcome]} {_WORDS[outcome]}" for outcome in _WORDS if counts[outcome]]
    return said


_WORDS = {
    Outcome.RECOVERED: "were good when they were looked at again",
    Outcome.GONE: "were removed by somebody else first",
    Outcome.OTHER_VERSION: "are of another version of the format, and were left alone",
    Outcome.TOO_LARGE: "are left: open the store with a larger max_record_bytes to read them",
    Outcome.CHANGED: "are left: bad in another way when they were looked at again; run this once more, from another machine too",
    Outcome.UNREADABLE: "are left: they could not be read",
    Outcome.FAILED: "are left: they could not be removed",
}
