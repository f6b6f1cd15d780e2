"""`kvstore stat`: what is in a store, by namespace."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.table import columns, human_age, human_bytes
from kvstore_sdk.cli.target import Target, add_filter, add_output, add_target, prefix_of, retry_of, target_of
from kvstore_sdk.tools.facts import shown
from kvstore_sdk.tools.stat import NamespaceStat, StoreStat, Tally, stat

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = "Says by namespace what a store holds: model, weights, type and layout, as the manifest has them; records, bytes and ages."
    parser: argparse.ArgumentParser = commands.add_parser("stat", help="what is in a store, by namespace", description=text)
    add_target(parser)
    add_filter(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it when all of it is known."""
    target = target_of(arguments, "stat")
    with target.open(writes=False) as backend, Progress(arguments) as progress:

        def seen(found: StoreStat) -> None:
            if progress.due:
                progress.show(f"{found.records.count} records, {human_bytes(found.records.size_bytes)}")

        found = stat(backend, prefix_of(arguments), retry_of(arguments), seen)
    namespaces = sorted(found.namespaces.values(), key=lambda one: (-one.records.size_bytes, one.namespace))
    if arguments.json:
        print(json.dumps(_json(target, found, namespaces), indent=2))
    else:
        print("\n".join(_text(target, found, namespaces)))
    return 0


def _text(target: Target, found: StoreStat, namespaces: list[NamespaceStat]) -> Iterator[str]:
    yield f"{target}: {len(namespaces)} namespace{'s' * (len(namespaces) != 1)}, {_count(found.records, 'record')}{_ages(found.records)}"
    if found.foreign.count:
        names = [*map(shown, found.foreign_names), *(["..."] if found.foreign.count > len(found.foreign_names) else [])]
        yield f"{_count(found.foreign, 'foreign name')}{_ages(found.foreign)}: {', '.join(names)}"
    if found.untold:
        yield f"{found.untold} names are of more namespaces and groups than are told apart; look at some of them with --namespace"
    for namespace in namespaces:
        yield ""
        yield namespace.namespace
        yield columns(list(_rows(namespace)), indent="  ")


def _rows(namespace: NamespaceStat) -> Iterator[tuple[str, str]]:
    if namespace.problem:
        yield "manifest", shown(namespace.problem, 300)
    else:
        yield "model", shown(namespace.model)
        yield "weights", shown(namespace.weights) or "(not known)"
        yield "dtype", shown(namespace.kv_dtype)
        yield "layout", namespace.layout
        yield "chunk", f"{namespace.blocks_per_chunk} x {namespace.block_tokens} tokens"
        if kept := [word for word, is_so in (("one tenant", namespace.tenant), ("one process", namespace.private)) if is_so]:
            yield "kept to", ", ".join(kept)
    yield "records", _count(namespace.records) + _ages(namespace.records)
    for number, group in sorted(namespace.groups.items()):
        facts = f", {shown(group.kind)}, {group.payload_bytes} bytes of KV each" if group.payload_bytes else ""
        yield f"group {number}", _count(group.records) + facts


def _count(tally: Tally, what: str = "") -> str:
    words = f"{tally.count} {what}{'s' * (tally.count != 1)}" if what else str(tally.count)
    return f"{words}, {human_bytes(tally.size_bytes)}" if tally.count else words


def _ages(tally: Tally) -> str:
    if tally.oldest_s is None or tally.newest_s is None:
        return ""
    now_s = time.time()
    return f", oldest {human_age(now_s - tally.oldest_s)}, newest {human_age(now_s - tally.newest_s)}"


def _json(target: Target, found: StoreStat, namespaces: list[NamespaceStat]) -> dict[str, Any]:
    return {
        "store": str(target),
        "now_s": time.time(),
        "records": _tally(found.records),
        "manifests": _tally(found.manifests),
        "foreign": _tally(found.foreign) | {"names": found.foreign_names},
        "untold": found.untold,
        "namespaces": [_namespace(namespace) for namespace in namespaces],
    }


def _namespace(namespace: NamespaceStat) -> dict[str, Any]:
    facts = {
        name: getattr(namespace, name)
        for name in ("model", "weights", "kv_dtype", "layout", "block_tokens", "blocks_per_chunk", "tenant", "private")
    }
    return {
        "namespace": namespace.namespace,
        "manifest": {"size_bytes": namespace.manifest_bytes, "problem": namespace.problem or None},
        **(dict.fromkeys(facts) if namespace.problem else facts),
        "records": _tally(namespace.records),
        "groups": [
            {"group": number, "kind": group.kind or None, "payload_bytes": group.payload_bytes or None, "records": _tally(group.records)}
            for number, group in sorted(namespace.groups.items())
        ],
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {"count": tally.count, "size_bytes": tally.size_bytes, "oldest_s": tally.oldest_s, "newest_s": tally.newest_s}
