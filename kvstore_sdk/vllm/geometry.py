"""Where the bytes of a chunk lie in a row, and how the scheduler's side learns it from the workers.

Each worker leaves a geometry record beside the region it maps when it registers its caches; the scheduler's side, which sees a fraction
of the facts, opens nothing before it has one of every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.host import is_abandoned, sweep_regions
from kvstore_sdk.vllm.pairing import used_pages

__all__ = [
    "Extent",
    "RankGeometry",
    "group_extents",
    "host_id",
    "is_abandoned",
    "read_records",
    "record_path",
    "refuse_other_regions",
    "region_id",
    "sweep",
    "write_record",
]

Extent = tuple[int, int]
"""(offset in the row, length), in bytes."""

GEOMETRY_VERSION = 1
MAX_RECORD_BYTES = 16 << 20
"""80 layers of 16 pages of 32 digits each are less than a tenth of it."""

SHM = "/dev/shm"
"""Where regions and what belongs to them lie."""
RECORDS_TIMEOUT_S = 30.0
"""How long the scheduler's side waits for the workers: they have written before it starts, so this only ends a broken start."""

_MOST = 1 << 62
"""Of rows and bytes: more than any machine has."""

_WHERE = "kvstore tier"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGeometry:
    """What one worker knows.

    Attributes:
        rank: Of this worker, 0 to `world_size` - 1.
        world_size: Workers of the engine.
        host: The machine, as `host_id` names it.
        rows: Rows of the region.
        row_bytes: Length of a row.
        extents: Of each group, where this rank's bytes of a chunk lie in the row, in the order of the payload.
        groups: Of each group, the facts that only this rank has: layers, heads, head size, window.
        facts: What must be the same on every rank: engine, model, weights, ...
        region: The file that the worker mapped, as `region_id` names it.
    """

    rank: int
    world_size: int
    host: str
    rows: int
    row_bytes: int
    extents: Mapping[int, Sequence[Extent]]
    groups: Mapping[int, Mapping[str, Any]]
    facts: Mapping[str, Any]
    region: str

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "geometry": GEOMETRY_VERSION,
                "rank": self.rank,
                "world_size": self.world_size,
                "host": self.host,
                "rows": self.rows,
                "row_bytes": self.row_bytes,
                "extents": {str(group): list(map(list, extents)) for group, extents in self.extents.items()},
                "groups": {str(group): dict(facts) for group, facts in self.groups.items()},
                "facts": dict(self.facts),
                "region": self.region,
            },
            sort_keys=True,
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankGeometry:
        """Decode a record.

        Raises:
            ValueError: it is no geometry record of this version.
        """
        try:
            plain = json.loads(text)
            if plain["geometry"] != GEOMETRY_VERSION:
                raise ValueError(f"geometry record of version {plain['geometry']}, this is {GEOMETRY_VERSION}")
            return cls(
                rank=_number(plain["rank"], 0),
                world_size=_number(plain["world_size"], 1),
                host=str(plain["host"]),
                rows=_number(plain["rows"], 1),
                row_bytes=_number(plain["row_bytes"], 1),
                extents={
                    int(group): [(_number(at, 0), _number(size, 1)) for at, size in extents] for group, extents in plain["extents"].items()
                },
                groups={int(group): dict(facts) for group, facts in plain["groups"].items()},
                facts=dict(plain["facts"]),
                region=str(plain["region"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as cause:
            raise ValueError(f"not a geometry record: {type(cause).__name__}: {cause}") from cause


def _number(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"not a geometry record: {reprlib.repr(value)} is no number from {least} on")
    return value


def group_extents(refs: Sequence[tuple[int, int]], pages: Sequence[int], blocks_per_chunk: int, slot_offset: int) -> list[Extent]:
    """Where one rank's bytes of a chunk of one group lie in a row.

    A slot holds the engine's KV tensors one after another; a tensor's part holds `blocks_per_chunk` pages; a layer of a group fills the
    start of each page of its tensor. What no layer of the group fills belongs to other groups, or to nobody.

    Args:
        refs: (tensor, bytes of a page that are used) of each layer of the group; layers that share a page count once.
        pages: Length of a page of each tensor.
        blocks_per_chunk: Blocks of a chunk.
        slot_offset: Where the rank's slot starts in the row.

    Returns:
        Extents in ascending order; neighbours are merged, none overlap.
    """
    used = used_pages(refs)
    merged: list[Extent] = []
    for tensor in sorted(used):
        start = slot_offset + blocks_per_chunk * sum(pages[:tensor])
        for block in range(blocks_per_chunk):
            at = start + block * pages[tensor]
            if merged and merged[-1][0] + merged[-1][1] == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + used[tensor])
            else:
                merged.append((at, used[tensor]))
    return merged


def host_id() -> str:
    """Names this machine until it boots again; the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def region_id(fd: int) -> str:
    """Names the file behind `fd` among all of this machine, whatever has its name by now."""
    status = os.fstat(fd)
    return f"{status.st_dev}:{status.st_ino}"


def record_path(region_path: str, rank: int) -> str:
    """Where the record of `rank` lies: beside the region, named after it."""
    folder, name = os.path.split(region_path)
    return os.path.join(folder, f"kvstore_{name.removesuffix('.mmap')}.rank{rank}.json")


def write_record(region_path: str, record: RankGeometry) -> int:
    """Write a record atomically.

    Returns:
        A file descriptor of it. The record counts as abandoned once this is closed, at the latest by the kernel when the process ends.
    """
    path = record_path(region_path, record.rank)
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        body = memoryview(record.to_json())
        while body:
            body = body[os.write(fd, body) :]
        os.rename(temporary, path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return fd


def read_records(region_path: str, world_size: int, timeout_s: float) -> list[RankGeometry]:
    """Wait for the record of every rank. One whose writer ended is none: it is of an engine that is gone.

    Raises:
        ConfigError: some did not come in time, or two of them do not belong together.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[int, RankGeometry] = {}
    while True:
        for rank in range(world_size):
            if rank not in found and (record := _read(record_path(region_path, rank))) is not None:
                if record.rank != rank:
                    raise ConfigError(_WHERE, "geometry", f"{record_path(region_path, rank)} is a record of rank {record.rank}")
                found[rank] = record
        missing = [rank for rank in range(world_size) if rank not in found]
        if not missing:
            return _agreed([found[rank] for rank in range(world_size)])
        if time.monotonic() >= deadline:
            ended = "".join(
                f"; the process that wrote that of rank {rank} ended" for rank in missing if is_abandoned(record_path(region_path, rank))
            )
            raise ConfigError(
                _WHERE,
                "geometry",
                f"no record of rank {', '.join(map(str, missing))} of {world_size} beside {region_path} after {timeout_s:g} s{ended}; "
                "all workers must run on this machine, see the same /dev/shm, and use the same spec of kvstore_sdk.vllm",
            )
        time.sleep(_POLL_S)


def refuse_other_regions(records: Sequence[RankGeometry], fd: int) -> None:
    """What one rank wrote into another region would be read as something else.

    Args:
        records: Of all ranks.
        fd: Of the region that the scheduler's side mapped.

    Raises:
        ConfigError: a rank mapped another one.
    """
    for record in records:
        if record.region != region_id(fd):
            problem = f"rank {record.rank} mapped another region of this name; give each engine an id of its own, or end the other engine"
            raise ConfigError(_WHERE, "engine_id", problem)


def _read(path: str) -> RankGeometry | None:
    """The record in `path`; None when there is none, or none of a process of this user that runs."""
    try:
        # Of a pipe the opening would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise ConfigError(_WHERE, "geometry", f"{path} cannot be read: {cause.strerror}") from cause
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or is_abandoned(path, fd):
            return None
        if status.st_size > MAX_RECORD_BYTES:
            raise ConfigError(_WHERE, "geometry", f"{path} has {status.st_size} bytes, which is no record of this adapter")
        text = b""
        while len(text) <= MAX_RECORD_BYTES and (piece := os.read(fd, MAX_RECORD_BYTES)):
            text += piece
        return RankGeometry.from_json(text)
    except ValueError as cause:
        raise ConfigError(_WHERE, "geometry", f"{path}: {cause}; do all workers run this version of kvstore-sdk?") from cause
    finally:
        os.close(fd)


def _agreed(records: list[RankGeometry]) -> list[RankGeometry]:
    first = records[0]
    here = host_id()
    for record in records:
        if record.host != here:
            raise ConfigError(_WHERE, "nnodes", f"rank {record.rank} runs on another machine; vLLM's host tier spans one machine only")
        if record.world_size != len(records):
            problem = f"rank {record.rank} belongs to an engine of {record.world_size} ranks, not {len(records)}"
            raise ConfigError(_WHERE, "geometry", problem)
        if (record.rows, record.row_bytes) != (first.rows, first.row_bytes):
            raise ConfigError(
                _WHERE,
                "pipeline_parallel_size",
                f"rank {record.rank} has {record.rows} rows of {record.row_bytes} bytes and rank 0 {first.rows} of {first.row_bytes}: "
                "stages of unequal size do not fit one region; choose a size that divides the layers evenly",
            )
        if set(record.extents) != set(first.extents):
            raise ConfigError(_WHERE, "geometry", f"rank {record.rank} and rank 0 have different KV cache groups")
        for name in sorted(set(record.facts) | set(first.facts)):
            there, expected = record.facts.get(name), first.facts.get(name)
            if there != expected:
                raise ConfigError(_WHERE, name, f"rank {record.rank} says {there!r} and rank 0 {expected!r}; they must be equal")
    return records


# --- what dead engines leave behind ------------------------------------------------------------------------------------------------

_LEFT_BEHIND = r"(vllm|kvstore)_offload_.+\.mmap(\.\d+)?|kvstore_(vllm|kvstore)_offload_.+\.rank\d+\.(json(\.\d+)?|rows)"


def sweep(folder: str, *, keep: str | None) -> list[str]:
    """Remove the regions and geometry records of engines that are gone, whatever ended them. Never one that a process still uses.

    Args:
        folder: Where they lie, `/dev/shm`.
        keep: Path of this engine's own region. It and its records are left alone: its workers may be about to open it. None once they all
            have: what is there of this engine's id then is of one that is gone, or in use.

    Returns:
        The paths that were removed.
    """
    if keep is None:
        return sweep_regions(folder, _LEFT_BEHIND)
    own = (os.path.basename(keep), os.path.basename(record_path(keep, 0)).rsplit(".rank", 1)[0] + ".rank")
    return sweep_regions(folder, _LEFT_BEHIND, own)
