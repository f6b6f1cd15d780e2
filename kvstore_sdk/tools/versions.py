"""Whether bytes that this version cannot read were written by another version of the format: then they are not ours to remove."""

from __future__ import annotations

import json

import xxhash

from kvstore_sdk.format import HEADER_BYTES, MAGIC
from kvstore_sdk.keys import FORMAT_VERSION

__all__ = ["is_manifest_of_other", "is_of_other", "is_record_of_other"]

_CHECKSUM_BYTES = 16


def is_record_of_other(page: memoryview | bytes) -> bool:
    """Whether a record's first 4,096 bytes are an intact header of another version."""
    head = bytes(page[:HEADER_BYTES])
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        return False
    version = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 4], "little")
    # A flipped bit in the number is no version.
    intact = xxhash.xxh3_128_digest(head[:-_CHECKSUM_BYTES]) == head[-_CHECKSUM_BYTES:]
    return intact and version != FORMAT_VERSION


def is_manifest_of_other(data: memoryview | bytes) -> bool:
    """Whether these bytes are a manifest of another version, as far as that can be known of one."""
    try:
        body = json.loads(bytes(data))
        return body["format"] == "kvstore-sdk" and is_of_other(body["identity"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def is_of_other(identity: object) -> bool:
    """Whether an identity, which may be anything that JSON can hold, is of another version."""
    version = identity.get("format_version") if isinstance(identity, dict) else None
    return type(version) is int and version != FORMAT_VERSION
