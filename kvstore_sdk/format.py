"""The record: one chunk as bytes. The same in host memory, a file, an object and a peer.

A header page of 4,096 bytes, then the payload, padded with zeros to a multiple of 4,096. `docs/format.md` is the specification;
this module is its implementation. There is no time and no host name in a record: equal chunks are equal bytes.
"""

from __future__ import annotations

import struct
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import xxhash

from kvstore_sdk.keys import FORMAT_VERSION, LAYOUT_BYTES, MAX_HASH_BYTES, ChunkKey, is_layout_id, is_namespace

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LAYOUT_BYTES",
    "MAGIC",
    "Flaw",
    "Header",
    "is_header",
    "padded_bytes",
    "read_header",
    "record_bytes",
    "seal",
    "verify",
]

MAGIC = b"KVSTORE\x1a"
HEADER_BYTES = 4096

_PAGE = 4096
_CHECKSUM_XXH3_128 = 1
_FIELDS = struct.Struct("<8sIIII16sIH2x64sQ64s16s32s")
_CHECKSUM_AT = HEADER_BYTES - 16
_GAP = bytes(_CHECKSUM_AT - _FIELDS.size)
_NO_MAC = bytes(32)
_PAYLOAD_CHECKSUM = slice(_FIELDS.size - 48, _FIELDS.size - 32)


class Flaw(Enum):
    """Why bytes are not the record that was asked for. Any of them makes the record corrupt, and corrupt is a miss."""

    HEADER = "header"
    """The header is not one: zeros, garbage, a flipped bit, or another version of the format."""
    KEY = "key"
    """A whole record, of another chunk: hash or group differ."""
    NAMESPACE = "namespace"
    """A whole record, of another namespace."""
    LAYOUT = "layout"
    """A whole record whose bytes are laid out in another way."""
    LENGTH = "length"
    """The record is shorter or longer than it should be, or its payload length differs."""
    PAYLOAD = "payload"
    """The payload or its padding changed after it was sealed."""


class Header(NamedTuple):
    """The fields of an intact header page."""

    key: ChunkKey
    payload_bytes: int
    layout: str
    payload_checksum: bytes


def padded_bytes(payload_bytes: int) -> int:
    """Length of a payload with its padding."""
    return -(-payload_bytes // _PAGE) * _PAGE


def record_bytes(payload_bytes: int) -> int:
    """Length of the record of a payload: a multiple of 4,096."""
    return HEADER_BYTES + padded_bytes(payload_bytes)


def seal(record: memoryview, key: ChunkKey, layout: str, payload_bytes: int) -> None:
    """Turn `record`, whose payload is in place, into a record: zero the padding, then write the header page.

    Args:
        record: Writable, exactly `record_bytes(payload_bytes)` long, format `B`.
        key: What the chunk is called.
        layout: Id of the payload's byte order: 1 to 64 characters of printable ASCII without spaces.
        payload_bytes: Length of the payload, at least 1.

    Raises:
        ValueError: an argument is out of its limits; `record` was not touched.
    """
    if not is_layout_id(layout):
        raise ValueError(f"seal: layout: {layout!r} must be 1 to {LAYOUT_BYTES} characters of printable ASCII without spaces")
    if payload_bytes < 1 or len(record) != record_bytes(payload_bytes):
        raise ValueError(f"seal: a payload of {payload_bytes} bytes does not make a record of {len(record)} bytes")
    if not is_namespace(key.namespace):
        raise ValueError(f"seal: key: namespace {key.namespace!r} is not 32 lower-case hex digits")
    if not 0 < len(key.chain_hash) <= MAX_HASH_BYTES:
        raise ValueError(f"seal: key: a chain hash has 1 to {MAX_HASH_BYTES} bytes, this one {len(key.chain_hash)}")
    if not 0 <= key.group < 2**32:
        raise ValueError(f"seal: key: group {key.group} is not from 0 to 2**32 - 1")
    end = HEADER_BYTES + payload_bytes
    record[end:] = bytes(len(record) - end)
    record[:HEADER_BYTES] = _page(Header(key, payload_bytes, layout, xxhash.xxh3_128_digest(record[HEADER_BYTES:])))


def read_header(page: memoryview | bytes) -> Header | None:
    """The header in the first 4,096 bytes, or None when they are not an intact header of this version."""
    # A copy: memory that changes meanwhile must not be checked as one thing and decoded as another.
    whole = bytes(page[:HEADER_BYTES])
    if xxhash.xxh3_128_digest(whole[:_CHECKSUM_AT]) != whole[_CHECKSUM_AT:]:
        return None
    _, _, _, _, _, namespace, group, hash_bytes, chain_hash, payload_bytes, layout, checksum, _ = _FIELDS.unpack_from(whole)
    text = layout.rstrip(b"\0").decode("ascii", "replace")
    if not 0 < hash_bytes <= MAX_HASH_BYTES or payload_bytes < 1 or not is_layout_id(text):
        return None
    header = Header(ChunkKey(namespace.hex(), chain_hash[:hash_bytes], group), payload_bytes, text, checksum)
    # One header for one meaning: constants, unused bytes and padding are as `seal` writes them, or it is of another version.
    return header if whole == _page(header) else None


def verify(record: memoryview, key: ChunkKey, layout: str, payload_bytes: int) -> Flaw | None:
    """Say whether `record` is the chunk `key` with this layout and length, unchanged since it was sealed. None: it is.

    Binds key, namespace, layout and length to the bytes, so that a record in another's place is found, not only a changed one. It
    finds accidents, not attackers: whoever can write to the store can seal a record too.
    """
    if len(record) != record_bytes(payload_bytes):
        return Flaw.LENGTH
    page = bytes(record[:HEADER_BYTES])
    checksum = page[_PAYLOAD_CHECKSUM]
    if not _is_page(page, key, layout, payload_bytes):
        return _flaw(page, key, layout)
    return None if xxhash.xxh3_128_digest(record[HEADER_BYTES:]) == checksum else Flaw.PAYLOAD


def is_header(page: memoryview | bytes, key: ChunkKey, layout: str, payload_bytes: int) -> bool:
    """Whether the first 4,096 bytes are the header of this record, as `seal` writes it. Says nothing of the payload."""
    # A copy, as for `read_header`.
    return _is_page(bytes(page[:HEADER_BYTES]), key, layout, payload_bytes)


def _is_page(page: bytes, key: ChunkKey, layout: str, payload_bytes: int) -> bool:
    # The page that `seal` would write is the only right one, so the rule is one comparison; fields are looked at to name what is wrong.
    try:
        return page == _page(Header(key, payload_bytes, layout, page[_PAYLOAD_CHECKSUM]))
    except (ValueError, struct.error):
        # Nothing is ever sealed under such a key or layout.
        return False


def _flaw(page: bytes, key: ChunkKey, layout: str) -> Flaw:
    """What is wrong with a header page that is not the right one."""
    header = read_header(page)
    if header is None:
        return Flaw.HEADER
    if header.key.namespace != key.namespace:
        return Flaw.NAMESPACE
    if header.key != key:
        return Flaw.KEY
    return Flaw.LAYOUT if header.layout != layout else Flaw.LENGTH


@lru_cache(maxsize=64)
def _named(namespace: str, layout: str) -> tuple[bytes, bytes]:
    """The fields of a namespace and a layout. ValueError: they are none, and could look like others in fields of fixed length."""
    if not is_namespace(namespace) or not is_layout_id(layout):
        raise ValueError(f"{namespace!r} is no namespace, or {layout!r} no id of a layout")
    return bytes.fromhex(namespace), layout.encode("ascii")


def _page(header: Header) -> bytes:
    """The header page. ValueError or struct.error: there can be none."""
    key = header.key
    namespace, layout = _named(key.namespace, header.layout)
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        0,
        _CHECKSUM_XXH3_128,
        namespace,
        key.group,
        len(key.chain_hash),
        key.chain_hash,
        header.payload_bytes,
        layout,
        header.payload_checksum,
        _NO_MAC,
    )
    head = fields + _GAP
    return head + xxhash.xxh3_128_digest(head)
