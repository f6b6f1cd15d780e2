"""What a process does to run vLLM engines over a location, one after another, and to spoil what they stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvstore_sdk.backend import Backend, Deadline, GetStatus
from kvstore_sdk.cli.demo_engine import ENVIRONMENT, Request, answer
from kvstore_sdk.format import HEADER_BYTES, read_header, seal
from kvstore_sdk.keys import ChunkKey, parse_name
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_conformance.failure import ConformanceFailure, require
from kvstore_sdk_conformance.target import Place
from kvstore_sdk_conformance.tier_driver import overwrite, read
from kvstore_sdk_conformance.view import View

__all__ = ["Engines", "open_noted"]

TIER = {
    "type": "kvstore",
    "module_path": "kvstore_sdk.vllm",
    "backend": "kvstore_sdk_conformance.engines:open_noted",
    # A slow store that answers one name after another needs its time.
    "lookup_timeout_s": 20.0,
    "load_timeout_s": 30.0,
}
_UNDER_TEST = "under-test"

_ENVIRONMENT = {
    **ENVIRONMENT,
    # On a machine that does something else as well, threads that wait for each other take many times as long as one alone.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Before vLLM 0.29 keys are random for each engine otherwise.
    "PYTHONHASHSEED": "0",
}

_places: dict[str, Place] = {}
_noted: dict[str, int] = {}
"""Names and sizes of what engines put."""


class _Noted(BackendWrapper):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "put":
            _noted.update((put.name, put.size_bytes) for put in items)
        return proceed(items)


def open_noted(location: str) -> Backend:
    """The factory that engines are given: opens the place under test, whose options do not pass through an engine's logs that way."""
    return _Noted(_places[location].open())


class Engines:
    """Programs of `child.Programs`: arguments and answers are JSON."""

    view: View
    place: Place

    def run_engine(self, model: str, prompts: list[list[int]], wait_for_stores: int = 0) -> dict[str, Any]:
        """Start an engine, let it answer, end it. Returns its `Answers`."""
        _places[_UNDER_TEST] = self.place
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        request = Request(model, prompts, "", [TIER | {"location": _UNDER_TEST}], wait_for_stores)
        try:
            return asdict(answer(request))
        except TimeoutError as error:
            raise ConformanceFailure("every chunk of the prompts to be stored", str(error)) from error

    def engine_names(self) -> list[str]:
        """What engines put so far."""
        return sorted(_noted)

    def rotate_payloads(self) -> int:
        """Give every chunk the payload of another, sealed as its own. Returns how many there are."""
        found = list(self._chunks())
        for (key, name, record), (_, _, other) in zip(found, found[1:] + found[:1], strict=True):
            header = read_header(record[:HEADER_BYTES])
            assert header is not None
            wrong = bytearray(record[:HEADER_BYTES] + other[HEADER_BYTES:])
            seal(memoryview(wrong), key, header.layout, header.payload_bytes)
            overwrite(self.view, name, bytes(wrong), "has another payload")
        return len(found)

    def flip_payload_bits(self, every: int) -> int:
        """Invert one bit in the payload of every so many of the chunks. Returns in how many."""
        found = list(self._chunks())[::every]
        for _, name, record in found:
            at = HEADER_BYTES + len(record) // 3
            wrong = record[:at] + bytes([record[at] ^ 0x10]) + record[at + 1 :]
            overwrite(self.view, name, wrong, "has one other bit in its payload, and the header page and length of the record before it")
        return len(found)

    def _chunks(self) -> Iterator[tuple[ChunkKey, str, bytes]]:
        for name, size in sorted(_noted.items()):
            if (key := parse_name(name)) is not None:
                got = read(self.view, name, size)
                require(got.result.status is GetStatus.FOUND, f"FOUND for {name}, which an engine stored", got.result, breaks="KV-CORE-01")
                yield key, name, got.bytes
