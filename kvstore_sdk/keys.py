"""Names of chunks: equal tokens under equal meaning have equal names, in every process."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "FORMAT_VERSION",
    "GROUP_BYTES",
    "LAYOUT_BYTES",
    "MAX_HASH_BYTES",
    "ChunkKey",
    "is_layout_id",
    "is_namespace",
    "manifest_name",
    "parse_name",
]

FORMAT_VERSION = 1
"""Of names, identity and record together. It is in every identity, so that records of two versions never share a namespace."""

GROUP_BYTES = 4
LAYOUT_BYTES = 64
MAX_HASH_BYTES = 64
"""SHA-512 would fit; vLLM's hashes are 32 bytes (SHA-256) or 16 (xxHash)."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_LAYOUT = re.compile(rf"[!-~]{{1,{LAYOUT_BYTES}}}")
_NAME = re.compile(r"v1/([0-9a-f]{32})/([0-9a-f]{2})/([0-9a-f]{2,128})-g(0|[1-9][0-9]{0,9})")


def is_namespace(text: str) -> bool:
    """Whether `text` is 32 lower-case hex digits."""
    return _NAMESPACE.fullmatch(text) is not None


def is_layout_id(text: str) -> bool:
    """Whether `text` has 1 to 64 characters, all of them printable ASCII other than the space."""
    return _LAYOUT.fullmatch(text) is not None


class ChunkKey(NamedTuple):
    """What a chunk is called. Made by `from_engine` and `parse_name`, which check it; the constructor does not.

    Attributes:
        namespace: 32 lower-case hex digits, from the identity of what the bytes mean.
        chain_hash: Hash of all tokens up to the end of the chunk, as the engine gives it; 1 to 64 bytes.
        group: Number of the KV cache group, 0 to 2**32 - 1.
    """

    namespace: str
    chain_hash: bytes
    group: int

    @property
    def name(self) -> str:
        """`v1/<namespace>/<2 hex>/<hash>-g<group>`: path-safe ASCII, at most 179 bytes, 115 for a 32-byte hash.

        The folder of two digits is the start of the hash: it spreads records over 256 folders.
        """
        digest = self.chain_hash.hex()
        return f"v1/{self.namespace}/{digest[:2]}/{digest}-g{self.group}"

    @classmethod
    def from_engine(cls, namespace: str, key: bytes) -> ChunkKey:
        """Decode an engine's key: the chain hash followed by the group, 4 bytes, big-endian.

        This is vLLM's `OffloadKey` (`vllm/v1/kv_offload/base.py`, `make_offload_key`).

        Raises:
            ValueError: the hash is empty or too long, or the namespace is not 32 hex digits.
        """
        chain_hash = key[:-GROUP_BYTES]
        if not 0 < len(chain_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"ChunkKey: a chain hash has 1 to {MAX_HASH_BYTES} bytes, this one {len(chain_hash)}")
        if not is_namespace(namespace):
            raise ValueError(f"ChunkKey: namespace {namespace!r} is not 32 lower-case hex digits")
        return cls(namespace, chain_hash, int.from_bytes(key[-GROUP_BYTES:], "big"))

    def to_engine(self) -> bytes:
        """The inverse of `from_engine`."""
        return self.chain_hash + self.group.to_bytes(GROUP_BYTES, "big")


def parse_name(name: str) -> ChunkKey | None:
    """The key that has this name, or None when it is no name of a chunk."""
    match = _NAME.fullmatch(name)
    if match is None or len(match[3]) % 2 or match[3][:2] != match[2] or int(match[4]) >= 2**32:
        return None
    return ChunkKey(match[1], bytes.fromhex(match[3]), int(match[4]))


def manifest_name(namespace: str) -> str:
    """Name of the manifest of a namespace, which lies beside its records."""
    return f"v1/{namespace}/manifest.json"
