"""`kvstore copy`: the records of one store into another."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.table import human_bytes
from kvstore_sdk.cli.target import add_output, add_target, add_threads, retry_of, target_of
from kvstore_sdk.errors import BackendError, ConfigError, NoSpaceError
from kvstore_sdk.keys import is_namespace
from kvstore_sdk.tools.copy import Copied, Copy, Outcome
from kvstore_sdk.tools.facts import shown

__all__ = ["add_command"]

COMMAND = "copy"
_INCOMPLETE = (Outcome.CORRUPT, Outcome.REFUSED, Outcome.FAILED)


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Copies records and manifests, each verified on the way, into another store of any kind. What is there already, and as long, is "
        "left out, so a copy that was interrupted goes on when it is run again. Both stores may be in use. What is corrupt or foreign is "
        "not copied. Exit code 0: the destination has all that is good in the source; 1: something was not copied."
    )
    parser: argparse.ArgumentParser = commands.add_parser(COMMAND, help="copy a store into another", description=text)
    add_target(parser, "source", what="what to copy")
    add_target(parser, "destination", "to-", "where to")
    parser.add_argument("--namespace", metavar="N", action="append", default=[], help="32 hex digits, as kvstore stat shows; repeatable")
    parser.add_argument("--check", action="store_true", help="verify what is in the destination already, and replace it if it is bad")
    parser.add_argument("--dry-run", action="store_true", help="read and verify, store nothing, and say what would be copied")
    add_threads(parser, default=8)
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Copy. Names what was not copied and why, a line each, and the sum; in a dry run also what would be copied."""
    if wrong := [text for text in arguments.namespace if not is_namespace(text)]:
        raise ConfigError(COMMAND, "--namespace", f"{wrong[0]!r} is not 32 lower-case hex digits; kvstore stat lists them")
    source, destination = target_of(arguments, COMMAND, "source"), target_of(arguments, COMMAND, "destination")
    dry_run = arguments.dry_run
    done = _Sum()
    with source.open(writes=False) as first, destination.open(writes=not dry_run) as second:
        copy = Copy(
            first,
            second,
            retry_of(arguments),
            namespaces=frozenset(arguments.namespace),
            threads=arguments.threads,
            check=arguments.check,
            dry_run=dry_run,
        )
        with Progress(arguments) as progress, Report(COMMAND, as_json=arguments.json, dry_run=dry_run) as report:
            try:
                for item in copy:
                    done.add(item)
                    if item.outcome in _INCOMPLETE or (dry_run and item.outcome is Outcome.COPIED):
                        progress.clear()
                        report.item(_line(item, dry_run), **_fields(item, dry_run))
                    if progress.due:
                        progress.show(f"copy: {done.sentence('copied')}")
            except BackendError as error:
                raise _told(error, done) from error
            progress.clear()
            report.end(*done.sentences(dry_run), **done.fields())
    return 1 if any(done.counts[outcome] for outcome in _INCOMPLETE) else 0


class _Sum:
    """What was done so far."""

    def __init__(self) -> None:
        self.counts: Counter[Outcome] = Counter()
        self.copied_bytes = 0
        self._began_s = time.monotonic()

    def add(self, item: Copied) -> None:
        self.counts[item.outcome] += 1
        if item.outcome is Outcome.COPIED:
            self.copied_bytes += item.size_bytes

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self._began_s, 1e-9)

    def sentence(self, verb: str) -> str:
        rate = f"{self.copied_bytes / 1e6 / self.elapsed_s:.0f} MB/s"
        return f"{self.counts[Outcome.COPIED]} {verb}, {human_bytes(self.copied_bytes)} in {self.elapsed_s:.1f} s ({rate})"

    def sentences(self, dry_run: bool) -> list[str]:
        said = [self.sentence("would be copied" if dry_run else "copied")]
        return said + [f"{self.counts[outcome]} {words}" for outcome, words in _WORDS.items() if self.counts[outcome]]

    def fields(self) -> dict[str, Any]:
        rounded_s = round(self.elapsed_s, 3)
        return {
            "copied_bytes": self.copied_bytes,
            "elapsed_s": rounded_s,
            "mb_per_s": round(self.copied_bytes / 1e6 / self.elapsed_s, 3),
            "outcomes": {outcome.value: self.counts[outcome] for outcome in Outcome},
        }


def _told(error: BackendError, done: _Sum) -> BackendError:
    """The error that ends the copy, with what has become of it and what to do."""
    what = "make room there, by kvstore prune for example," if isinstance(error, NoSpaceError) else "mend that"
    make: Callable[[str], BackendError] = NoSpaceError if isinstance(error, NoSpaceError) else BackendError
    return make(f"copy: stopped after {done.sentence('copied')}: {error}; {what} and run the same command again: it goes on from there")


def _line(item: Copied, dry_run: bool) -> str:
    word = "would copy" if dry_run and item.outcome is Outcome.COPIED else item.outcome.value
    return f"{word}: {shown(item.name, 1024)}  {human_bytes(item.size_bytes)}" + (f": {shown(item.problem, 300)}" if item.problem else "")


def _fields(item: Copied, dry_run: bool) -> dict[str, Any]:
    return {
        "result": "would_copy" if dry_run and item.outcome is Outcome.COPIED else item.outcome.value,
        "name": item.name,
        "kind": item.kind.value,
        "size_bytes": item.size_bytes,
        "problem": item.problem,
    }


_WORDS = {
    Outcome.THERE: "were there already",
    Outcome.CORRUPT: "are corrupt in the source, and were not copied",
    Outcome.REFUSED: "are more than the destination takes",
    Outcome.FOREIGN: "are foreign, and were not copied",
    Outcome.GONE: "were removed from the source meanwhile",
    Outcome.FAILED: "failed",
}
