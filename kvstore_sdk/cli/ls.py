"""`kvstore ls`: the names in a store."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kvstore_sdk.backend import ListEntry
from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.table import human_age, human_bytes
from kvstore_sdk.cli.target import add_filter, add_output, add_target, prefix_of, retry_of, target_of
from kvstore_sdk.tools.facts import Kind, Named, named, shown
from kvstore_sdk.tools.walk import walk

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = "Lists what is in a store, one line a name: size, age, name. With --json one object a line. The order is the store's own."
    parser: argparse.ArgumentParser = commands.add_parser("ls", help="list the names in a store", description=text)
    add_target(parser)
    add_filter(parser)
    parser.add_argument(
        "--kind", choices=[kind.value for kind in Kind], action="append", default=[], help="only what is of this kind; repeatable"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print each name as soon as it is known, in memory for one page."""
    kinds = {Kind(kind) for kind in arguments.kind} or {*Kind}
    # Once: asking for the time costs more than the rest of a line on some machines.
    now_s = time.time()
    listed = 0
    with target_of(arguments, "ls").open(writes=False) as backend, Progress(arguments) as progress:
        for entry in walk(backend, prefix_of(arguments), retry_of(arguments)):
            listed += 1
            if progress.due:
                progress.show(f"{listed} names")
            what = named(entry.name)
            if what.kind in kinds:
                progress.clear()
                print(_json(entry, what) if arguments.json else _text(entry, now_s))
    return 0


def _text(entry: ListEntry, now_s: float) -> str:
    age = "-" if entry.modified_s is None else human_age(now_s - entry.modified_s)
    return f"{human_bytes(entry.size_bytes):>10}  {age:>8}  {shown(entry.name, 1024)}"


def _json(entry: ListEntry, what: Named) -> str:
    facts: dict[str, Any] = {"name": entry.name, "kind": what.kind.value, "size_bytes": entry.size_bytes, "modified_s": entry.modified_s}
    if what.namespace:
        facts["namespace"] = what.namespace
    if what.key is not None:
        facts |= {"hash": what.key.chain_hash.hex(), "group": what.key.group}
    return json.dumps(facts)
