"""How the engine hashes token chains."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import vllm.v1.core.kv_cache_utils as hashing

__all__ = [
    "expected_none_hash",
    "hash_seed",
    "is_none_hash",
]


def _hash_function(algorithm: str) -> Callable[[Any], bytes]:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(algorithm)


def hash_seed(algorithm: str) -> str | None:
    """The seed that all hashes of this process will hang on, or None when it is random for each process.

    Known before the engine has drawn it: this is how the engine decides.
    """
    if (given := os.environ.get("PYTHONHASHSEED")) is not None:
        return given
    if hasattr(hashing, "resolve_none_hash_seed") and algorithm in ("sha256", "sha256_cbor"):
        return str(hashing.DEFAULT_NONE_HASH_SEED)
    return None


def expected_none_hash(algorithm: str, seed: str) -> bytes:
    """The hash before the first block that `seed` leads to."""
    return bytes(_hash_function(algorithm)(seed))


def is_none_hash(expected: bytes) -> bool:
    """Whether the engine hashes from `expected`. Only true once the engine has initialised its hashing, after the tiers are built."""
    return bytes(getattr(hashing, "NONE_HASH", b"")) == expected
