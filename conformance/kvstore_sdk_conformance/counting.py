"""What `usage` may say of the records that are there."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore_sdk.backend import Usage

__all__ = ["is_counted", "most_bytes"]

BESIDE_BYTES = 64 << 10
"""What a record may cost beside its bytes: a block that is not full, its name, an index."""


def most_bytes(sizes: Mapping[str, int], empty_bytes: int) -> int:
    """The most that may be counted for these records, with what is counted where there are none."""
    return empty_bytes + sum(sizes.values()) + BESIDE_BYTES * len(sizes)


def is_counted(usage: Usage, sizes: Mapping[str, int], empty_bytes: int) -> bool:
    """Whether these records, and no others, are counted, each of them once."""
    return usage.records == len(sizes) and sum(sizes.values()) <= usage.used_bytes <= most_bytes(sizes, empty_bytes)
