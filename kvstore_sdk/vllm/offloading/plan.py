"""The first pages of the shared region: what the scheduler's side tells the workers about everything behind them.

Layout: a header of 32 bytes and the plan as JSON in the first `PLAN_BYTES`; then the marks, a `uint32` for each slot and rank; then, from
`slots_start`, the slots. The scheduler's side writes the plan once, before its first transfer; a worker reads it at its first transfer.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import xxhash

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.layout import LayoutError, Shape, Topology, payload_bytes, shape_from_plain, shape_to_plain

__all__ = [
    "PLAN_BYTES",
    "PLAN_VERSION",
    "GroupPlan",
    "Plan",
    "claim_region",
    "control_bytes",
    "least_bytes",
    "most_slots",
    "read_plan",
    "write_plan",
]

PLAN_VERSION = 1
PLAN_BYTES = 256 << 10
"""Room for the plan: 60 opaque groups of 8 ranks with 80 layers of different lengths take less."""

_MAGIC = b"KVSPLAN\x1a"
_HEADER = struct.Struct("<8sII16s")
_PAGE = 4096
_WHERE = "kvstore offloading"


def most_slots(region_bytes: int, sizes: Collection[int]) -> int:
    """A bound of the numbers of slots of these lengths, wherever they start, however the host tier divides the region among them.

    A number belongs to one place and one length. There are no more places of a length than fit one after another.
    """
    return sum(region_bytes // size for size in set(sizes))


def control_bytes(slot_count: int, world_size: int) -> int:
    """What the plan and the marks of `slot_count` slots take at the start of a region: where the slots start, a multiple of 4,096."""
    return PLAN_BYTES + -(-4 * slot_count * world_size // _PAGE) * _PAGE


def least_bytes(sizes: Collection[int], world_size: int) -> int:
    """The smallest region for slots of these lengths: it holds two of the longest, which is the least that a host tier takes."""
    slots_bytes = 2 * max(sizes)
    found, needed = 0, PLAN_BYTES + slots_bytes
    while found < needed:
        # What is needed grows with the region, for the marks, and much less than it.
        found, needed = needed, control_bytes(most_slots(needed, sizes), world_size) + slots_bytes
    return found


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of the engine: what its chunks are made of, and how the ranks cut them."""

    shape: Shape
    topology: Topology

    @property
    def payload_bytes(self) -> int:
        return payload_bytes(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What lies where in the region.

    Attributes:
        world_size: Ranks that write and read chunks.
        blocks_per_chunk: Blocks of a chunk, the same in every group.
        slot_count: Slot numbers are below it.
        slots_start: Where the first slot may start.
        groups: In the order of the engine's list, which a transfer follows; not by the number in a key.
    """

    world_size: int
    blocks_per_chunk: int
    slot_count: int
    slots_start: int
    groups: tuple[GroupPlan, ...]

    def check(self, region_bytes: int) -> None:
        """Raises ConfigError unless everything lies within the region and belongs together."""
        if min(self.world_size, self.blocks_per_chunk, self.slot_count, len(self.groups)) < 1:
            raise ConfigError(_WHERE, "plan", f"{self.world_size} ranks, {self.slot_count} slots and {len(self.groups)} groups are no plan")
        if self.slots_start % _PAGE or not control_bytes(self.slot_count, self.world_size) <= self.slots_start < region_bytes:
            problem = f"slots at {self.slots_start} do not lie between the marks and the end of a region of {region_bytes} bytes"
            raise ConfigError(_WHERE, "plan", problem)
        for place, group in enumerate(self.groups):
            if group.topology.world_size != self.world_size or group.shape.blocks != self.blocks_per_chunk:
                problem = f"group {place} is of {group.topology.world_size} ranks and {group.shape.blocks} blocks a chunk, the engine of "
                raise ConfigError(_WHERE, "plan", problem + f"{self.world_size} and {self.blocks_per_chunk}")


def claim_region(region: Region) -> None:
    """Take the region for this scheduler's side, until the region is closed. Of two that ask at once one gets it.

    Raises:
        ConfigError: another one has it.
    """
    try:
        # Of the open file, not of the process: one that builds two engines is told as well. And no lock that a look at the file takes.
        fcntl.fcntl(region.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        problem = "another engine of this id serves the region; give each engine an id of its own, or end the other one"
        raise ConfigError(_WHERE, "engine_id", problem) from None


def write_plan(region: Region, plan: Plan) -> None:
    """Write the plan of a new region; the scheduler's side, once.

    Raises:
        ConfigError: the plan does not fit the region, or the region has one: another engine uses it.
    """
    plan.check(region.size_bytes)
    body = json.dumps(_to_plain(plan), sort_keys=True, separators=(",", ":")).encode()
    if _HEADER.size + len(body) > PLAN_BYTES:
        raise ConfigError(_WHERE, "plan", f"the groups of this engine take {len(body)} bytes to describe, the region has {PLAN_BYTES}")
    if bytes(region.view[: len(_MAGIC)]) == _MAGIC:
        raise ConfigError(
            _WHERE, "engine_id", "the region has a plan already: another engine of this id uses it, or this one was built twice"
        )
    region.view[_HEADER.size : _HEADER.size + len(body)] = body
    region.view[: _HEADER.size] = _HEADER.pack(_MAGIC, PLAN_VERSION, len(body), xxhash.xxh3_128_digest(body))


def read_plan(region: Region) -> Plan:
    """The plan of a region; a worker, when its first transfer says that there is one.

    Raises:
        ConfigError: there is none, it is of another version, its bytes are not those that were written, or it leaves the region.
    """
    if region.size_bytes < PLAN_BYTES:
        raise ConfigError(_WHERE, "plan", f"a region of {region.size_bytes} bytes has no room for a plan")
    magic, version, length, checksum = _HEADER.unpack_from(region.view)
    if magic != _MAGIC:
        raise ConfigError(
            _WHERE, "plan", "the region has no plan though a transfer came; does the scheduler run this version of kvstore-sdk?"
        )
    if version != PLAN_VERSION:
        raise ConfigError(
            _WHERE, "plan", f"the plan is of version {version}, this is {PLAN_VERSION}; run one version of kvstore-sdk everywhere"
        )
    # A copy: what is checked is what is decoded.
    body = bytes(region.view[_HEADER.size : min(_HEADER.size + length, PLAN_BYTES)])
    if xxhash.xxh3_128_digest(body) != checksum:
        raise ConfigError(_WHERE, "plan", "the bytes of the plan changed since they were written; something else writes into the region")
    try:
        plan = _from_plain(json.loads(body))
    except (LayoutError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as cause:
        raise ConfigError(_WHERE, "plan", f"cannot be decoded: {type(cause).__name__}: {cause}") from cause
    plan.check(region.size_bytes)
    return plan


def _to_plain(plan: Plan) -> dict[str, Any]:
    return {
        "world_size": plan.world_size,
        "blocks_per_chunk": plan.blocks_per_chunk,
        "slot_count": plan.slot_count,
        "slots_start": plan.slots_start,
        "groups": [
            {"shape": shape_to_plain(group.shape), "tp": group.topology.tp, "stage_layers": list(group.topology.stage_layers)}
            for group in plan.groups
        ],
    }


def _from_plain(plain: dict[str, Any]) -> Plan:
    return Plan(
        world_size=int(plain["world_size"]),
        blocks_per_chunk=int(plain["blocks_per_chunk"]),
        slot_count=int(plain["slot_count"]),
        slots_start=int(plain["slots_start"]),
        groups=tuple(
            GroupPlan(shape_from_plain(group["shape"]), Topology(group["tp"], tuple(group["stage_layers"]))) for group in plain["groups"]
        ),
    )
