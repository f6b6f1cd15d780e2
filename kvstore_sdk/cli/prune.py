"""`kvstore prune`: make a store smaller by age, namespace or size."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Annotated, Any

from kvstore_sdk.backend import Bounds, parse_options
from kvstore_sdk.backend.options import options_of
from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.table import human_bytes
from kvstore_sdk.cli.target import add_output, add_target, retry_of, target_of
from kvstore_sdk.errors import ConfigError, text_of
from kvstore_sdk.keys import is_namespace
from kvstore_sdk.tools.facts import Kind
from kvstore_sdk.tools.prune import Prune, Rule

__all__ = ["add_command"]

COMMAND = "prune"
_CENTURY_S = 100 * 366 * 86400


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Removes the records of namespaces, those that are older than an age, or the oldest until a size is reached; combined: of these "
        "namespaces, first by age, then by size. One of the three must be said. The store may be in use: what is removed is a miss."
    )
    parser: argparse.ArgumentParser = commands.add_parser(COMMAND, help="remove records by age, namespace or size", description=text)
    add_target(parser)
    parser.add_argument("--namespace", metavar="N", action="append", default=[], help="32 hex digits, as kvstore stat shows; repeatable")
    parser.add_argument("--older-than", metavar="AGE", help="such as 7d, 12h or 90min")
    parser.add_argument("--to-bytes", metavar="SIZE", help="such as 100GiB: the oldest go until no more than this is left")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, and say what would be removed")
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prune. Names what was removed, a line each, and their sum; returns 1 when something that had to go is there."""
    target = target_of(arguments, COMMAND)
    rule = _rule(arguments)
    dry_run = arguments.dry_run
    done: Counter[str] = Counter()
    with target.open(writes=not dry_run, creates=False) as backend, Progress(arguments) as progress:

        def seen() -> None:
            if progress.due:
                progress.show(f"prune: {prune.listed} names listed, {done['records']} records removed")

        prune = Prune(backend, rule, retry_of(arguments), dry_run=dry_run, seen=seen)
        with Report(COMMAND, as_json=arguments.json, dry_run=dry_run) as report:
            for item in prune:
                progress.clear()
                result = "would remove" if dry_run else "removed" if item.error is None else "failed"
                problem = "" if item.error is None else f"  ({text_of(item.error)})"
                report.item(
                    f"{result}  {item.name}  {human_bytes(item.size_bytes)}{problem}",
                    result=result.replace(" ", "_"),
                    name=item.name,
                    namespace=item.namespace,
                    kind=item.kind.value,
                    size_bytes=item.size_bytes,
                    modified_s=item.modified_s,
                    error=None if item.error is None else text_of(item.error),
                )
                if item.error is not None:
                    done["failed"] += 1
                else:
                    done["manifests" if item.kind is Kind.MANIFEST else "records"] += 1
                    done["bytes"] += item.size_bytes
            progress.clear()
            ageless = bool(prune.unknown_age)
            report.end(
                *_sentences(done, prune, dry_run),
                records=done["records"],
                manifests=done["manifests"],
                used_bytes=done["bytes"],
                failed=done["failed"],
                gone=prune.gone,
                kept_records=prune.kept_records,
                kept_bytes=prune.kept_bytes,
                unknown_age=prune.unknown_age,
                foreign=prune.foreign,
            )
    return 1 if done["failed"] or ageless else 0


def _sentences(done: Counter[str], prune: Prune, dry_run: bool) -> list[str]:
    verb = "would be removed" if dry_run else "removed"
    found = [f"{done['records']} records and {done['manifests']} manifests {verb}, {human_bytes(done['bytes'])} together"]
    found.append(f"{prune.kept_records} records are left, {human_bytes(prune.kept_bytes)} with their manifests")
    if prune.gone:
        found.append(f"{prune.gone} were removed by somebody else first")
    if done["failed"]:
        found.append(f"{done['failed']} could not be removed")
    if prune.unknown_age:
        found.append(f"{prune.unknown_age} were kept: this store does not say when they were stored; --namespace alone needs no ages")
    return found


def _limits(
    *,
    older_than_s: Annotated[float, Bounds(ge=0, le=_CENTURY_S)] = math.inf,
    to_bytes: Annotated[int, Bounds(ge=0)] = 0,
) -> None:
    """Types and bounds of the limits, which are written as options of a backend are."""


def _rule(arguments: argparse.Namespace) -> Rule:
    if wrong := [text for text in arguments.namespace if not is_namespace(text)]:
        raise ConfigError(COMMAND, "--namespace", f"{wrong[0]!r} is not 32 lower-case hex digits; kvstore stat lists them")
    texts = {"older_than_s": arguments.older_than, "to_bytes": arguments.to_bytes}
    given = {name: text for name, text in texts.items() if text is not None}
    if not given and not arguments.namespace:
        raise ConfigError(COMMAND, "--older-than", "say what is to go, by --older-than, --to-bytes or --namespace")
    try:
        return Rule(namespaces=frozenset(arguments.namespace), **parse_options(COMMAND, options_of(_limits), given))
    except ConfigError as error:
        flag = {"older_than_s": "--older-than", "to_bytes": "--to-bytes"}[error.field]
        raise ConfigError(COMMAND, flag, error.problem) from None
