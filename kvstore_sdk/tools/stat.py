"""What is in a store, by namespace: what it is of, how much, and how old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore_sdk.backend import Backend, ListEntry
from kvstore_sdk.errors import BackendError, text_of
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.tools.facts import Kind, Manifest, named
from kvstore_sdk.tools.reading import Reader, read_manifest
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["GroupStat", "NamespaceStat", "StoreStat", "Tally", "stat"]

_ROWS = 20_000
"""Namespaces and groups that are told apart: anybody may write a million names with a namespace each."""
_EXAMPLES = 10
_TEXT = 300


@dataclass(slots=True)
class Tally:
    """How many, how large together, and when the first and the last of them were stored as far as the store says."""

    count: int = 0
    size_bytes: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None

    def add(self, entry: ListEntry) -> None:
        self.count += 1
        self.size_bytes += entry.size_bytes
        at_s = entry.modified_s
        if at_s is not None:
            self.oldest_s = at_s if self.oldest_s is None else min(self.oldest_s, at_s)
            self.newest_s = at_s if self.newest_s is None else max(self.newest_s, at_s)


@dataclass(slots=True)
class GroupStat:
    """Records of one KV cache group. `kind` and `payload_bytes` are the manifest's; empty and 0 without one."""

    records: Tally = field(default_factory=Tally)
    kind: str = ""
    payload_bytes: int = 0


@dataclass(slots=True)
class NamespaceStat:
    """One namespace. Texts are as the manifest has them, cut at 300 characters, and not fit for a terminal as they are.

    Attributes:
        namespace: 32 hex digits.
        records: All its records.
        groups: The same by the number of the group.
        manifest_bytes: Length of its manifest; 0: it has none.
        problem: What is wrong with the manifest, as one clause; empty: nothing.
        model: The model's name.
        weights: Fingerprint of the weights.
        kv_dtype: Type of the KV cache.
        layout: Id of the byte order.
        block_tokens: Tokens of a block.
        blocks_per_chunk: Blocks of a chunk.
        tenant: Whether it is one tenant's.
        private: Whether it is one process's.
    """

    namespace: str
    records: Tally = field(default_factory=Tally)
    groups: dict[int, GroupStat] = field(default_factory=dict)
    manifest_bytes: int = 0
    problem: str = ""
    model: str = ""
    weights: str = ""
    kv_dtype: str = ""
    layout: str = ""
    block_tokens: int = 0
    blocks_per_chunk: int = 0
    tenant: bool = False
    private: bool = False


@dataclass(slots=True)
class StoreStat:
    """All of it.

    Attributes:
        records: All records.
        manifests: All manifests.
        foreign: What is neither; `foreign_names` are the first few.
        namespaces: By their digits. Those beyond the first 20,000 namespaces and groups are in `records` alone, and counted in `untold`.
    """

    records: Tally = field(default_factory=Tally)
    manifests: Tally = field(default_factory=Tally)
    foreign: Tally = field(default_factory=Tally)
    foreign_names: list[str] = field(default_factory=list)
    namespaces: dict[str, NamespaceStat] = field(default_factory=dict)
    untold: int = 0


def stat(backend: Backend, prefix: str, retry: Retry, seen: Callable[[StoreStat], object] = lambda _: None) -> StoreStat:
    """Walk through a store, and read the manifest of every namespace in it. No record is read.

    Args:
        backend: Open.
        prefix: Of the names that are looked at.
        retry: How patient to be with each call.
        seen: Called now and then with what was counted so far.

    Raises:
        BackendError: it could not be listed. A manifest that could not be read is told in its namespace.
    """
    found = StoreStat()
    rows = 0
    for number, entry in enumerate(walk(backend, prefix, retry), 1):
        if number % 1000 == 0:
            seen(found)
        rows += _count(found, entry, rows < _ROWS)
    reader = Reader(backend, retry)
    try:
        for namespace in found.namespaces.values():
            seen(found)
            _describe(namespace, reader)
    finally:
        reader.close()
    return found


def _count(found: StoreStat, entry: ListEntry, room: bool) -> int:
    """Count one entry.

    Returns:
        How many namespaces and groups are new.
    """
    what = named(entry.name)
    if what.kind is Kind.FOREIGN:
        found.foreign.add(entry)
        if len(found.foreign_names) < _EXAMPLES:
            found.foreign_names.append(entry.name)
        return 0
    (found.records if what.key else found.manifests).add(entry)
    rows = 0
    if (namespace := found.namespaces.get(what.namespace)) is None:
        if not room:
            found.untold += 1
            return 0
        namespace = found.namespaces[what.namespace] = NamespaceStat(what.namespace)
        rows = 1
    if what.key is None:
        namespace.manifest_bytes = entry.size_bytes
        return rows
    namespace.records.add(entry)
    group = namespace.groups.get(what.key.group)
    if group is None and room:
        group = namespace.groups[what.key.group] = GroupStat()
        rows += 1
    if group is None:
        found.untold += 1
    else:
        group.records.add(entry)
    return rows


def _describe(namespace: NamespaceStat, reader: Reader) -> None:
    manifest: Manifest | str | None = None
    if namespace.manifest_bytes:
        try:
            name = manifest_name(namespace.namespace)
            manifest = read_manifest(reader, name, namespace.namespace, namespace.manifest_bytes)
        except BackendError as error:
            manifest = f"could not be read ({text_of(error)})"
    if not isinstance(manifest, Manifest):
        namespace.problem = manifest or "is missing"
        return
    identity = manifest.identity
    namespace.model, namespace.weights = manifest.model[:_TEXT], manifest.weights[:_TEXT]
    namespace.kv_dtype, namespace.layout = manifest.kv_dtype[:_TEXT], manifest.layout
    namespace.block_tokens, namespace.blocks_per_chunk = _number(identity.get("block_tokens")), _number(identity.get("blocks_per_chunk"))
    namespace.tenant, namespace.private = bool(identity.get("tenant")), bool(identity.get("private"))
    for number, group in namespace.groups.items():
        if number < len(manifest.payload_bytes):
            group.payload_bytes = manifest.payload_bytes[number]
            group.kind = str(identity["groups"][number].get("kind", ""))[:_TEXT]


def _number(value: object) -> int:
    return value if type(value) is int else 0
