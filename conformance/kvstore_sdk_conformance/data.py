"""Records that can be told from each other, and are the same in every process."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Record", "pieces", "which"]

_FILLS = {-1: b"\0", -2: b"\xff", -3: b"\r\n", -4: b" "}

_PAGE = 4096
_BLOCK = 16 * _PAGE
_CACHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """`size` bytes that belong to `tag`. Any two pages of it differ, and so do equal places of two tags.

    Negative tags are records that stores like to make shorter: zeros, ones, line ends and spaces (-1 to -4).
    """

    size: int
    tag: int

    @property
    def bytes(self) -> bytes:
        return _cached(self.size, self.tag) if self.size <= _CACHED_BYTES else _made(self.size, self.tag)


def which(seen: bytes, tags: Iterable[int]) -> int | None:
    """The tag whose record this is; None: it is none of them, whole."""
    return next((tag for tag in tags if Record(len(seen), tag).bytes == seen), None)


def pieces(seen: bytes, tags: Iterable[int]) -> str:
    """Which of these records there are pages of, for people to read."""
    tags = list(dict.fromkeys(tags))
    if (whole := which(seen, tags)) is not None:
        return f"the whole record with tag={whole}"
    of = []
    records = {tag: Record(len(seen), tag).bytes for tag in tags}
    for at in range(0, len(seen), _PAGE):
        page = seen[at : at + _PAGE]
        of.append(next((f"tag={tag}" for tag, record in records.items() if record[at : at + _PAGE] == page), "bytes that nobody put"))
    return f"{len(of)} pages: {', '.join(f'{of.count(what)} of {what}' for what in dict.fromkeys(of))}"


def _made(size: int, tag: int) -> bytes:
    if tag < 0:
        return (_FILLS[tag] * size)[:size]
    block = random.Random(tag).randbytes(min(size, _BLOCK))
    whole = bytearray((block * (size // max(1, len(block)) + 1))[:size])
    for start in range(0, size - 15, _PAGE):
        whole[start : start + 16] = tag.to_bytes(8, "little") + start.to_bytes(8, "little")
    if 0 < size < 16:
        whole[0] = tag % 256
    return bytes(whole)


_cached = functools.lru_cache(maxsize=256)(_made)
