"""Host memory whose rows are records, as a host tier has it: for a tier in the direct mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tier_bench import HOLE, PAYLOAD_BYTES, identity, payload

from kvstore_sdk.backend import Backend, Buffer, Deadline, Get, Mode, Put, Region
from kvstore_sdk.format import HEADER_BYTES, record_bytes, seal
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper

__all__ = ["ROW_BYTES", "RecordRows", "Watched", "places"]

ROW_BYTES = max(map(record_bytes, PAYLOAD_BYTES.values()))
_PAGE = 4096


class RecordRows:
    """Rows that are guarded on both sides. Stands where `tier_bench.Memory` does."""

    def __init__(self, rows: int, of: KVIdentity | None = None) -> None:
        self.rows = rows
        # As `tier_bench.Memory` does.
        self.row_count = 4 * rows
        self.identity = of or identity()
        """Of the tier: what is written is sealed for it."""
        self.region = Region(_PAGE + rows * (ROW_BYTES + _PAGE))
        self.region.view[:] = bytes([HOLE]) * self.region.size_bytes
        self.groups = [0] * rows

    def payload_bytes(self, group: int) -> int | None:
        return PAYLOAD_BYTES.get(group)

    def record(self, row: int) -> Buffer:
        return self.region.buffer(self._start(row), record_bytes(PAYLOAD_BYTES[self.groups[row]]))

    def expect(self, row: int, of: bytes) -> None:
        """The row is for this chunk now."""
        self.groups[row] = int.from_bytes(of[-4:], "big")

    def spared(self, row: int) -> bool:
        """Whether a load that failed left the row as it may: with whatever in it, and nothing beside it."""
        return self.guarded(row)

    def view(self, row: int) -> memoryview:
        """The row without its guards."""
        return self.region.view[self._start(row) : self._start(row) + ROW_BYTES]

    def write(self, row: int, of: bytes, generation: int = 0) -> None:
        """Compute the chunk into the row, and seal it."""
        self.expect(row, of)
        record = self.sealed(of, generation)
        self.view(row)[: len(record)] = record

    def sealed(self, of: bytes, generation: int = 0) -> bytes:
        bytes_of = payload(of, generation)
        record = bytearray(record_bytes(len(bytes_of)))
        record[HEADER_BYTES : HEADER_BYTES + len(bytes_of)] = bytes_of
        seal(memoryview(record), ChunkKey.from_engine(self.identity.namespace, of), self.identity.layout, len(bytes_of))
        return bytes(record)

    def paint(self, row: int, fill: int = HOLE) -> None:
        self.view(row)[:] = bytes([fill]) * ROW_BYTES

    def holds(self, row: int, of: bytes, generation: int = 0) -> bool:
        """Whether the row is exactly this record, and nothing beside it was touched."""
        record, view = self.sealed(of, generation), self.view(row)
        return view[: len(record)] == record and set(view[len(record) :]) <= {HOLE} and self.guarded(row)

    def is_painted(self, row: int, fill: int = HOLE) -> bool:
        return self.view(row) == bytes([fill]) * ROW_BYTES and self.guarded(row)

    def guarded(self, row: int) -> bool:
        guard, start = bytes([HOLE]) * _PAGE, self._start(row)
        return self.region.view[start - _PAGE : start] == guard and self.region.view[start + ROW_BYTES :][:_PAGE] == guard

    def _start(self, row: int) -> int:
        return _PAGE + row * (ROW_BYTES + _PAGE)


class Watched(BackendWrapper):
    """Keeps the buffers of every put and get of a record, and when regions were made known and given up."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.buffers: dict[str, list[Buffer]] = {"put": [], "get": []}
        self.modes: list[Mode] = []
        self.regions: list[tuple[str, Region]] = []

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Any) -> Any:
        for item in items:
            if isinstance(item, (Put, Get)) and not item.name.endswith("manifest.json"):
                self.buffers[op] += item.parts if isinstance(item, Put) else item.into
                self.modes += [item.mode] if isinstance(item, Put) else []
        return super().around(op, items, deadline, proceed)

    def register_region(self, region: Region) -> None:
        self.regions.append(("register", region))

    def unregister_region(self, region: Region) -> None:
        self.regions.append(("unregister", region))


def places(buffers: list[Buffer], memory: RecordRows) -> set[tuple[int, int]]:
    """(offset, length) of buffers that all lie in the memory's own region."""
    assert all(buffer.region is memory.region for buffer in buffers)
    return {(buffer.offset, buffer.length) for buffer in buffers}
