"""What a name, a manifest and the bytes of a record say, each checked and believed no further than it proves itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvstore_sdk.format import HEADER_BYTES, Flaw, read_header, record_bytes, verify
from kvstore_sdk.identity import canonical_json
from kvstore_sdk.keys import ChunkKey, is_layout_id, is_namespace, manifest_name, parse_name

__all__ = ["MAX_MANIFEST_BYTES", "Kind", "Manifest", "Named", "flaw_of", "named", "parse_manifest", "shown", "size_flaw"]

MAX_MANIFEST_BYTES = 1 << 20
"""Longest manifest that is read: a model of a thousand layers has one of some 100 KiB."""
_SHOWN = 120
_NAMESPACE_DIGITS = 32


class Kind(Enum):
    """What a name is of."""

    RECORD = "record"
    MANIFEST = "manifest"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Named:
    """What a name says. `namespace` is empty for what is foreign; `key` is that of a record."""

    kind: Kind
    namespace: str = ""
    key: ChunkKey | None = None


_FOREIGN = Named(Kind.FOREIGN)


def named(name: str) -> Named:
    """What `name` says."""
    key = parse_name(name)
    if key is not None:
        return Named(Kind.RECORD, key.namespace, key)
    namespace = name[3 : 3 + _NAMESPACE_DIGITS]
    if is_namespace(namespace) and name == manifest_name(namespace):
        return Named(Kind.MANIFEST, namespace)
    return _FOREIGN


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the manifest of a namespace says. Its identity has the digest that names the namespace, so it says what the writer meant.

    The texts are as they stand there: whoever prints one passes it through `shown`.

    Attributes:
        namespace: 32 hex digits.
        model: The model's name.
        weights: Fingerprint of the weights; empty only in a private namespace.
        kv_dtype: Type of the KV cache.
        layout: Id of the byte order in every record.
        payload_bytes: Length of a chunk of each group, in the order of their numbers.
        identity: All of the identity.
    """

    namespace: str
    model: str
    weights: str
    kv_dtype: str
    layout: str
    payload_bytes: tuple[int, ...]
    identity: dict[str, Any]


def parse_manifest(data: bytes | memoryview, namespace: str) -> Manifest | str:
    """Read a manifest.

    Returns:
        What it says, or in one clause why it is not the manifest of `namespace`: torn, garbage, or another one's.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        return f"is longer than {MAX_MANIFEST_BYTES} bytes"
    try:
        body = json.loads(str(data, "utf-8"))
        identity = body["identity"]
        digest = hashlib.sha256(canonical_json(identity)).hexdigest()[:_NAMESPACE_DIGITS]
        said = body["format"], body["namespace"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is no manifest: torn, or something else"
    if said != ("kvstore-sdk", namespace):
        return "is the manifest of another namespace, or of something else"
    if digest != namespace:
        return "holds an identity that is not the one of its namespace"
    try:
        texts = [identity[name] for name in ("model", "weights", "kv_dtype", "layout")]
        sizes = tuple(group["payload_bytes"] for group in identity["groups"])
    except (KeyError, TypeError):
        return "holds an identity that lacks what every identity has"
    if not all(isinstance(text, str) for text in texts) or not is_layout_id(texts[3]):
        return "holds an identity whose fields are not what they must be"
    if not all(type(size) is int and size >= 1 for size in sizes):
        return "holds an identity whose fields are not what they must be"
    model, weights, kv_dtype, layout = texts
    return Manifest(namespace, model, weights, kv_dtype, layout, sizes, identity)


def size_flaw(size_bytes: int, key: ChunkKey, manifest: Manifest | None) -> Flaw | None:
    """What the size of a record alone says is wrong with it; None: nothing. No backend need be able to read a record with a flaw here."""
    if size_bytes < record_bytes(1) or size_bytes % HEADER_BYTES:
        return Flaw.LENGTH
    if manifest is not None and key.group < len(manifest.payload_bytes) and size_bytes != record_bytes(manifest.payload_bytes[key.group]):
        return Flaw.LENGTH
    return None


def flaw_of(record: memoryview, key: ChunkKey, manifest: Manifest | None) -> Flaw | None:
    """Why the bytes are not the record that `key` names; None: they are.

    With the namespace's manifest the layout and the length are compared as an engine does it. Without, they are taken from the record, and
    only that it holds together, in its right place, is known.
    """
    if (flaw := size_flaw(len(record), key, manifest)) is not None:
        return flaw
    if manifest is not None:
        if key.group >= len(manifest.payload_bytes):
            return Flaw.KEY
        return verify(record, key, manifest.layout, manifest.payload_bytes[key.group])
    header = read_header(record[:HEADER_BYTES])
    if header is None:
        return Flaw.HEADER
    return verify(record, key, header.layout, header.payload_bytes)


def shown(value: object, most: int = _SHOWN) -> str:
    """A value out of a store as text for a terminal: one line, printable ASCII, bounded. Names of models, files and keys are anybody's."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= most and text.isascii() and text.isprintable():
        return text
    cut = text[: most + 1]
    safe = "".join(char if " " <= char <= "~" else char.encode("unicode_escape", "replace").decode("ascii") for char in cut[:most])
    return safe + ("..." if len(cut) > most else "")
