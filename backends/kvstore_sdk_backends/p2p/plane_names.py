"""What the names mean that a node calls its data plane with, on both sides of the line to the child."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence

from kvstore_sdk.backend import BreachError, InvalidError, ListEntry, ListPage, Region

__all__ = [
    "MAX_AGENT_BYTES",
    "MAX_REGIONS",
    "SELF",
    "admission",
    "checked_regions",
    "expectation",
    "place",
    "read_admission",
    "read_expectation",
    "read_place",
    "read_self",
    "region_key",
    "self_page",
    "target_of",
]

SELF = "self"
"""The listing of what the child's own agent is: the agent, and each region."""
MAX_AGENT_BYTES = 64 << 10
MAX_REGIONS = 64

_ADMIT, _EXPECT = "admit", "expect"
_MAX_ADDRESS = 1 << 64


def region_key(region: Region) -> str:
    """Of a region, the same in every process that maps it: which file it is. Two with the same are the same memory."""
    found = os.fstat(region.fd)
    return f"{found.st_dev:x}-{found.st_ino:x}-{region.size_bytes:x}"


def checked_regions(agent: bytes, regions: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The regions of a peer, in the order of their addresses.

    Raises:
        InvalidError: there is no such memory, or too much of anything.
    """
    if not 0 < len(agent) <= MAX_AGENT_BYTES:
        raise InvalidError(f"p2p: admit: {len(agent)} bytes of metadata, from 1 to {MAX_AGENT_BYTES} are taken")
    if not 0 < len(regions) <= MAX_REGIONS:
        raise InvalidError(f"p2p: admit: {len(regions)} regions, from 1 to {MAX_REGIONS} are taken")
    if not all(base > 0 and size > 0 and base + size <= _MAX_ADDRESS for base, size in regions):
        raise InvalidError("p2p: admit: a region is empty, or lies outside all memory")
    return tuple(sorted((base, size) for base, size in regions))


def target_of(agent: bytes, regions: Iterable[tuple[int, int]]) -> str:
    """What tells one target of a session from another; of regions in the order of their addresses."""
    digest = hashlib.blake2b(agent, digest_size=8)
    digest.update(repr(list(regions)).encode())
    return digest.hexdigest()


def place(session: bytes, target: str, address: int) -> str:
    """An address at a peer, and by which of its targets."""
    return f"{session.hex()}/{target}/{address:x}"


def read_place(name: str) -> tuple[str, str, int]:
    session, target, address = name.split("/")
    return session, target, int(address, 16)


def admission(session: bytes, agent: bytes, regions: Iterable[tuple[int, int]]) -> str:
    """Whether this peer can be written to."""
    return "/".join([_ADMIT, session.hex(), agent.hex(), *(f"{base:x}-{size:x}" for base, size in regions)])


def read_admission(name: str) -> tuple[str, bytes, list[tuple[int, int]]] | None:
    """None: it is none."""
    kind, *rest = name.split("/")
    if kind != _ADMIT:
        return None
    session, agent, *regions = rest
    pairs = [region.split("-") for region in regions]
    return session, bytes.fromhex(agent), [(int(base, 16), int(size, 16)) for base, size in pairs]


def expectation(until_s: float) -> str:
    """Whether peers are expected to write until then."""
    return f"{_EXPECT}/{until_s!r}"


def read_expectation(name: str) -> float | None:
    """None: it is none."""
    kind, _, until_s = name.partition("/")
    return float(until_s) if kind == _EXPECT else None


def self_page(agent: bytes, regions: Iterable[Region]) -> ListPage:
    """The listing `SELF`: the agent's metadata, and each region with its address here."""
    entries = [ListEntry(f"agent/{agent.hex()}", len(agent))]
    entries += [ListEntry(f"{region_key(region)}/{region.address:x}", region.size_bytes) for region in regions]
    return ListPage(entries, None)


def read_self(page: ListPage) -> tuple[bytes, list[tuple[str, int, int]]]:
    """The agent, and key, address and size of each region.

    Raises:
        BreachError: the child listed something else.
    """
    try:
        (kind, agent), *rest = (entry.name.split("/") for entry in page.entries)
        if kind != "agent":
            raise ValueError(kind)
        sizes = [entry.size_bytes for entry in page.entries[1:]]
        return bytes.fromhex(agent), [(key, int(base, 16), size) for (key, base), size in zip(rest, sizes, strict=True)]
    except ValueError as cause:
        raise BreachError(f"p2p: the child lists itself as something else ({cause})") from None
