"""Stores with records in them, and every kind of damage that can be done to one: a folder's, or a bucket's.

A store is filled and damaged behind the back of its backend, file by file or object by object. Each damage says what a tool must find.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import xxhash

from kvstore_sdk.format import HEADER_BYTES, Flaw, record_bytes, seal
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey, manifest_name

__all__ = [
    "DAMAGES",
    "FOLDER_DAMAGES",
    "LAYOUT",
    "BucketTree",
    "Damage",
    "Damaged",
    "Filled",
    "FolderTree",
    "Tree",
    "Verdict",
    "Wreck",
    "chunk_key",
    "fill",
    "identity_of",
    "payload_of",
    "record_of",
    "wreck",
]

LAYOUT = "lbhnc"
PAYLOADS = (5000, 3000)
"""Of the two groups of a namespace: neither is a multiple of a page, so that records have padding."""

Verdict = Flaw | Literal["foreign", "manifest", "unseen", "fine"]
"""What a tool finds: a record with this flaw; what is no record and no manifest; a manifest that is none; nothing, because a listing does
not show it; a good record."""


class Tree(Protocol):
    """What lies in a store, by name, without its backend."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class FolderTree:
    """A folder of the fs backend."""

    root: Path

    def names(self) -> list[str]:
        """Plain files, but for what is kept below `.kvstore`."""
        files = (Path(folder) / name for folder, _, names in os.walk(self.root) for name in names)
        found = (file.relative_to(self.root).as_posix() for file in files if file.is_file() and not file.is_symlink())
        return sorted(name for name in found if not name.startswith(".kvstore/"))

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole, as a backend does it, for others may be reading.
        temp = path.with_name(f".{path.name}.damage")
        temp.write_bytes(content)
        temp.replace(path)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def set_time(self, name: str, unix_s: float) -> None:
        """Have `name` look as if it had been written at this time."""
        os.utime(self.root / name, (unix_s, unix_s))


@dataclass(frozen=True)
class BucketTree:
    """A prefix of a bucket. `client` is a boto3 client."""

    client: Any
    bucket: str
    prefix: str

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return sorted(found["Key"].removeprefix(f"{self.prefix}/") for page in pages for found in page.get("Contents", ()))

    def read(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")["Body"].read()
        return body

    def write(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=content)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")


def identity_of(model: str, payloads: Sequence[int] = PAYLOADS, layout: str = LAYOUT) -> KVIdentity:
    """An identity with a group for each payload length."""
    groups = tuple(GroupIdentity(kind="full", layers=(f"layers.{n}",), payload_bytes=size) for n, size in enumerate(payloads))
    return KVIdentity(
        model=model,
        weights=f"commit of {model}",
        model_config="of the tests",
        kv_dtype="bfloat16",
        layout=layout,
        layout_version=1,
        block_tokens=16,
        hash_tokens=16,
        blocks_per_chunk=1,
        groups=groups,
        hash_algorithm="sha256",
    )


def chunk_key(identity: KVIdentity, number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(identity.namespace, hashlib.sha256(f"chunk {number}".encode()).digest(), group)


def payload_of(key: ChunkKey, payload_bytes: int) -> bytes:
    """What the chunk of this key holds."""
    return hashlib.shake_128(key.name.encode()).digest(payload_bytes)


def record_of(key: ChunkKey, payload_bytes: int, layout: str = LAYOUT) -> bytes:
    """The good record of a chunk."""
    record = bytearray(record_bytes(payload_bytes))
    record[HEADER_BYTES : HEADER_BYTES + payload_bytes] = payload_of(key, payload_bytes)
    seal(memoryview(record), key, layout, payload_bytes)
    return bytes(record)


@dataclass
class Filled:
    """What `fill` put into a tree: `records` holds every good record by its name, manifests not among them."""

    identities: list[KVIdentity]
    records: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifests(self) -> dict[str, bytes]:
        return {manifest_name(identity.namespace): identity.manifest() for identity in self.identities}


def fill(
    tree: Tree,
    models: Sequence[str] = ("acme/one", "acme/two"),
    chunks: int = 4,
    payloads: Sequence[int] = PAYLOADS,
    there: Collection[str] = (),
) -> Filled:
    """Put a namespace for each model into `tree`: its manifest, and `chunks` records of each group. What is `there` is not written."""
    filled = Filled([identity_of(model, payloads) for model in models])
    for identity in filled.identities:
        for group, payload_bytes in enumerate(payloads):
            for number in range(chunks):
                key = chunk_key(identity, number, group)
                filled.records[key.name] = record_of(key, payload_bytes)
    for name, content in (filled.records | filled.manifests).items():
        if name not in there:
            tree.write(name, content)
    return filled


@dataclass(frozen=True)
class Damaged:
    """What must be found at `name` afterwards."""

    name: str
    verdict: Verdict


@dataclass(frozen=True)
class Damage:
    """One kind of damage. `do` needs what `fill` put there; it damages as little as it can, and says what."""

    name: str
    do: Callable[[Any, Filled], list[Damaged]]

    def __str__(self) -> str:
        return self.name


def _victim(filled: Filled, number: int = 0) -> str:
    return sorted(filled.records)[number]


def _changed(verdict: Verdict, change: Callable[[bytearray], object]) -> Callable[[Tree, Filled], list[Damaged]]:
    def do(tree: Tree, filled: Filled) -> list[Damaged]:
        name = _victim(filled)
        record = bytearray(filled.records[name])
        change(record)
        tree.write(name, bytes(record))
        return [Damaged(name, verdict)]

    return do


def _flip(record: bytearray, at: int) -> None:
    record[at] ^= 0x10


def _zero(record: bytearray, start: int) -> None:
    record[start:] = bytes(len(record) - start)


def _to_version_2(record: bytearray) -> None:
    """As a writer of version 2 might seal it: the checksum is right, and no reader of this version takes it."""
    struct.pack_into("<I", record, 8, 2)
    record[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(record[: HEADER_BYTES - 16]))


def _swap(tree: Tree, filled: Filled) -> list[Damaged]:
    """Two records of one group, each in the other's place."""
    first, second = sorted(name for name in filled.records if name.startswith(f"v1/{filled.identities[0].namespace}/"))[::2][:2]
    assert first[-3:] == second[-3:]
    tree.write(first, filled.records[second])
    tree.write(second, filled.records[first])
    return [Damaged(first, Flaw.KEY), Damaged(second, Flaw.KEY)]


def _of_another_namespace(tree: Tree, filled: Filled) -> list[Damaged]:
    here, there = (chunk_key(identity, 0).name for identity in filled.identities[:2])
    tree.write(here, filled.records[there])
    return [Damaged(here, Flaw.NAMESPACE)]


def _other_layout(tree: Tree, filled: Filled) -> list[Damaged]:
    """Whole, of the same length, sealed with another layout than its namespace's."""
    key = chunk_key(filled.identities[0], 0)
    tree.write(key.name, record_of(key, PAYLOADS[0], "nhdlb"))
    return [Damaged(key.name, Flaw.LAYOUT)]


def _other_payload_bytes(tree: Tree, filled: Filled) -> list[Damaged]:
    """Whole, of the same length, with a payload of another length than its group's."""
    key = chunk_key(filled.identities[0], 0)
    tree.write(key.name, record_of(key, PAYLOADS[0] + 1))
    return [Damaged(key.name, Flaw.LENGTH)]


def _foreign(*names: str, content: bytes = b"somebody's notes\n") -> Callable[[Tree, Filled], list[Damaged]]:
    def do(tree: Tree, filled: Filled) -> list[Damaged]:
        placed = [name.format(namespace=filled.identities[0].namespace) for name in names]
        for name in placed:
            tree.write(name, content)
        return [Damaged(name, "foreign") for name in placed]

    return do


def _manifest(change: Callable[[bytes, Filled], bytes]) -> Callable[[Tree, Filled], list[Damaged]]:
    def do(tree: Tree, filled: Filled) -> list[Damaged]:
        name, content = next(iter(filled.manifests.items()))
        tree.write(name, change(content, filled))
        return [Damaged(name, "manifest")]

    return do


def _other_model(content: bytes, filled: Filled) -> bytes:
    model = filled.identities[0].model.encode()
    assert b'"%b"' % model in content
    return content.replace(b'"%b"' % model, b'"%b"' % model.swapcase())


def _odd_values(content: bytes, _: Filled) -> bytes:
    """JSON with the right format and namespace, and an identity that is none: what it holds is not for a terminal."""
    body = json.loads(content)
    body["identity"]["model"] = "\x1b[31mred\x07\u202e"
    body["identity"]["groups"] = {"payload_bytes": -1}
    body["identity"]["layout"] = ["\n"] * 10
    return json.dumps(body).encode().ljust(len(content))


def _manifest_missing(tree: Tree, filled: Filled) -> list[Damaged]:
    """The records are as good as before: readers never need it."""
    tree.remove(manifest_name(filled.identities[0].namespace))
    return [Damaged(name, "fine") for name in filled.records]


def _directory_in_place(tree: FolderTree, filled: Filled) -> list[Damaged]:
    name = _victim(filled)
    tree.remove(name)
    (tree.root / name).mkdir()
    return [Damaged(name, "unseen")]


def _temp_file(tree: FolderTree, filled: Filled) -> list[Damaged]:
    """Of a writer that died: nobody reads it, and the backend's own sweep removes it."""
    path = tree.root / ".kvstore/tmp/feedfeedfeedfeed/17"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half a record")
    return [Damaged(".kvstore/tmp/feedfeedfeedfeed/17", "unseen")]


def _link_in_place(tree: FolderTree, filled: Filled) -> list[Damaged]:
    name, other = _victim(filled), _victim(filled, 1)
    tree.remove(name)
    (tree.root / name).symlink_to(tree.root / other)
    return [Damaged(name, "unseen")]


DAMAGES = [
    Damage("flip in the header", _changed(Flaw.HEADER, lambda record: _flip(record, 60))),
    Damage("flip in the header's unused bytes", _changed(Flaw.HEADER, lambda record: _flip(record, 3000))),
    Damage("flip in the header's checksum", _changed(Flaw.HEADER, lambda record: _flip(record, HEADER_BYTES - 1))),
    Damage("flip in the payload", _changed(Flaw.PAYLOAD, lambda record: _flip(record, HEADER_BYTES + 100))),
    Damage("flip in the padding", _changed(Flaw.PAYLOAD, lambda record: _flip(record, len(record) - 1))),
    Damage("truncated by a byte", _changed(Flaw.LENGTH, lambda record: record.pop())),
    Damage("truncated by a page", _changed(Flaw.LENGTH, lambda record: record.__delitem__(slice(len(record) - 4096, None)))),
    Damage("truncated inside the header", _changed(Flaw.LENGTH, lambda record: record.__delitem__(slice(1000, None)))),
    Damage("truncated to nothing", _changed(Flaw.LENGTH, bytearray.clear)),
    Damage("appended a byte", _changed(Flaw.LENGTH, lambda record: record.append(0))),
    Damage("appended a page", _changed(Flaw.LENGTH, lambda record: record.extend(bytes(4096)))),
    Damage("zeros", _changed(Flaw.HEADER, lambda record: _zero(record, 0))),
    Damage("zeros at the end", _changed(Flaw.PAYLOAD, lambda record: _zero(record, HEADER_BYTES))),
    Damage("another version", _changed(Flaw.HEADER, _to_version_2)),
    Damage("two records swapped", _swap),
    Damage("a record of another namespace", _of_another_namespace),
    Damage("another layout of the same length", _other_layout),
    Damage("another payload length that pads to the same", _other_payload_bytes),
    Damage("foreign files", _foreign("notes.txt", "v1/notes.txt", "v1/{namespace}/notes.txt", "v2/{namespace}/manifest.json")),
    Damage("foreign files that look like records", _foreign(f"v1/{{namespace}}/00/{'ab' * 32}-g0", f"v1/{{namespace}}/ab/{'ab' * 32}-g00")),
    Damage("an empty foreign file", _foreign("empty", content=b"")),
    Damage("a torn manifest", _manifest(lambda content, _: content[: len(content.rstrip()) // 2])),
    Damage("an empty manifest", _manifest(lambda content, _: b"")),
    Damage("a manifest of zeros", _manifest(lambda content, _: bytes(len(content)))),
    Damage("a manifest of another namespace", _manifest(lambda _, filled: filled.identities[1].manifest())),
    Damage("a manifest whose identity is another", _manifest(_other_model)),
    Damage("a manifest that nests without end", _manifest(lambda content, _: b"[" * 100_000)),
    Damage("a manifest with odd values", _manifest(_odd_values)),
    Damage("a manifest that is missing", _manifest_missing),
]  # fmt: skip
"""What can be done to any store."""

FOLDER_DAMAGES = [
    Damage("a directory in a record's place", _directory_in_place),
    Damage("a temporary file", _temp_file),
    Damage("a link in a record's place", _link_in_place),
]
"""What can be done to a folder only, and to a `FolderTree`."""


@dataclass
class Wreck:
    """A store with every kind of damage: `good` are the records and manifests that have none, `damaged` is what must be found."""

    good: dict[str, bytes]
    damaged: dict[str, Verdict]

    def names(self, *verdicts: Verdict) -> list[str]:
        """What is damaged like this."""
        return sorted(name for name, verdict in self.damaged.items() if verdict in verdicts)

    @property
    def corrupt(self) -> list[str]:
        """Records with a flaw, and manifests that are none."""
        return self.names(*Flaw, "manifest")


def wreck(tree: Tree, damages: Sequence[Damage] = tuple(DAMAGES)) -> Wreck:
    """Fill a store, a namespace for each of `damages` and one beside them, and do them all."""
    good: dict[str, bytes] = {}
    damaged: dict[str, Verdict] = {}
    for number, damage in enumerate(damages):
        filled = fill(tree, (f"acme/one-{number}", "acme/two"), chunks=2, there=good)
        good |= filled.records | filled.manifests
        found = damage.do(tree, filled)
        damaged |= {one.name: one.verdict for one in found if one.verdict != "fine"}
    there = set(tree.names())
    return Wreck({name: content for name, content in good.items() if name in there and name not in damaged}, damaged)
