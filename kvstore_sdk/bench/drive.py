"""One backend, driven as a tier drives it: sealed records, in batches within its capabilities, from several threads, each verified.

Whatever it answers is judged: a byte that is not what was stored, or an answer that is not what the contract allows, ends the run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    BreachError,
    Buffer,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Put,
    PutResult,
    PutStatus,
    Region,
    SupportsDelete,
    SupportsRegions,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk.bench.crew import Done, Watch, work_through
from kvstore_sdk.format import HEADER_BYTES, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tools.health import timed
from kvstore_sdk.tools.removal import remove
from kvstore_sdk.tools.retry import Retry

__all__ = ["Driver", "Shape", "shape_of"]

LAYOUT = "opaque-bench"
_BATCH_RECORDS = 16
_BATCH_BYTES = 4 << 20
_REGION_BYTES = 256 << 20
_VISIBLE_S = 10.0
"""A store without `read_after_write` may take so long to show a record."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of calls: bytes of a record's payload, threads, and records in a call."""

    payload_bytes: int
    threads: int
    batch: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def least_bytes(self) -> int:
        """One batch for each thread."""
        return self.record_bytes * self.threads * self.batch


def shape_of(backend: Backend, payload_bytes: int, threads: int) -> Shape:
    """As a tier with default settings would call this backend, in 4 MiB a call at most unless it wants more (`batch_bytes`)."""
    capabilities, size = backend.capabilities, record_bytes(payload_bytes)
    threads = min(threads, capabilities.max_concurrency)
    wanted = capabilities.batch_bytes // payload_bytes if capabilities.batch_bytes else min(_BATCH_RECORDS, _BATCH_BYTES // size)
    return Shape(payload_bytes, threads, max(1, min(wanted, capabilities.max_batch, _REGION_BYTES // (threads * size))))


class Driver:
    """Makes calls on one open backend, and remembers what it has stored until that is removed. One measurement at a time.

    Attributes:
        backend: That is driven.
        left: Names that may be in the store now.
        is_unsure: A put was given up while it ran, so what is removed may come back.
    """

    def __init__(self, backend: Backend, namespace: str, timeout_s: float) -> None:
        self.backend = backend
        self.left: set[str] = set()
        self.is_unsure = False
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._region: Region | None = None
        self._payload = b""
        self._broken = False
        self._watch = Watch(1, timeout_s)

    def keys(self, count: int) -> list[ChunkKey]:
        """New ones, in the same few folders each time: a store in use has its folders."""
        return [ChunkKey(self._namespace, bytes([number % 256]) + os.urandom(15), 0) for number in range(count)]

    def put(self, shape: Shape, keys: Sequence[ChunkKey], *, sealed: bool, limit_s: float) -> tuple[Done, list[ChunkKey]]:
        """Store records under as many of `keys` as the time allows; those are returned too."""
        buffers = self._buffers(shape)
        for buffer in [buffer for one in buffers for buffer in one]:
            buffer.view[HEADER_BYTES:] = self._payload
        stored: list[list[ChunkKey]] = []

        def work(thread: int, batch: Sequence[ChunkKey]) -> None:
            puts = []
            for key, buffer in zip(batch, buffers[thread], strict=False):
                _stamp(buffer, key)
                if sealed:
                    seal(buffer.view, key, LAYOUT, shape.payload_bytes)
                puts.append(Put(key.name, (buffer,)))
            self.left.update(put.name for put in puts)
            for put, result in zip(puts, self._call("put", puts, PutResult, thread), strict=True):
                _check_put(put.name, result)
            stored.append(list(batch))

        done = self._work("put", shape, keys, work, limit_s)
        return done, [key for batch in stored for key in batch]

    def wait_visible(self, shape: Shape, keys: Sequence[ChunkKey]) -> None:
        """Until a store that shows records later shows these."""
        end_s = time.monotonic() + _VISIBLE_S
        while not self.backend.capabilities.read_after_write:
            try:
                self.exists(shape, keys, limit_s=math.inf)
                return
            except BreachError:
                if time.monotonic() > end_s:
                    raise
                self._broken = False
                time.sleep(0.2)

    def get(self, shape: Shape, keys: Sequence[ChunkKey], *, sealed: bool, limit_s: float, repeat: bool) -> Done:
        """Read them. `sealed`: each is verified inside the time; otherwise both its ends are, and the last of each thread afterwards."""
        buffers = self._buffers(shape)
        for buffer in [buffer for one in buffers for buffer in one]:
            # What a get does not write must not look as if it had.
            view = buffer.view
            for at in range(0, len(view), 4096):
                view[at] ^= 0xFF
        last: dict[int, Sequence[ChunkKey]] = {}

        def work(thread: int, batch: Sequence[ChunkKey]) -> None:
            gets = [Get(key.name, (buffer,)) for key, buffer in zip(batch, buffers[thread], strict=False)]
            results = self._call("get", gets, GetResult, thread)
            for key, item, result in zip(batch, gets, results, strict=True):
                _check_get(item.name, result)
                view = item.into[0].view
                if sealed:
                    flaw = verify(view, key, LAYOUT, shape.payload_bytes)
                    if flaw is not None:
                        raise _corrupt(item.name, flaw.value)
                elif not _is_stamped(view, key):
                    raise _corrupt(item.name, "its ends")
            last[thread] = batch

        done = self._work("get", shape, keys, work, limit_s, repeat)
        inner = slice(HEADER_BYTES + 16, -16)
        for thread, batch in last.items():
            for key, buffer in zip(batch, buffers[thread], strict=False):
                if bytes(buffer.view[inner]) != self._payload[16:-16]:
                    raise _corrupt(key.name, "payload")
        return done

    def exists(self, shape: Shape, keys: Sequence[ChunkKey], *, limit_s: float) -> Done:
        """Ask for them, which are all there."""

        def work(thread: int, batch: Sequence[ChunkKey]) -> None:
            names = [key.name for key in batch]
            for name, answer in zip(names, self._call("exists", names, (bool, Failure), thread), strict=True):
                if isinstance(answer, Failure):
                    raise _error_of(answer.error, f"exists {name}: failed")
                if not answer:
                    raise BreachError(f"exists {name}: does not find what was stored")

        return self._work("exists", shape, keys, work, limit_s, repeat=not math.isinf(limit_s))

    def delete(self, shape: Shape, keys: Sequence[ChunkKey]) -> Done:
        """Remove them, all of them."""

        def work(thread: int, batch: Sequence[ChunkKey]) -> None:
            names = [key.name for key in batch]
            for name, answer in zip(names, self._call("delete", names, (DeleteStatus, Failure), thread), strict=True):
                if isinstance(answer, Failure):
                    raise _error_of(answer.error, f"delete {name}: failed")
                if answer is DeleteStatus.ABSENT:
                    raise BreachError(f"delete {name}: does not find what was stored")
            self.left.difference_update(names)

        done = self._work("delete", shape, keys, work, math.inf)
        self._check_gone(shape, keys[: shape.batch])
        return done

    def _check_gone(self, shape: Shape, keys: Sequence[ChunkKey]) -> None:
        """That these are no longer there, outside the time: DELETED is as much a promise as STORED."""

        def work(thread: int, batch: Sequence[ChunkKey]) -> None:
            names = [key.name for key in batch]
            for name, answer in zip(names, self._call("exists", names, (bool, Failure), thread), strict=True):
                if answer is True:
                    self.left.update(names)
                    raise BreachError(f"delete {name}: says that it removed what is still there")

        if self.backend.capabilities.read_after_write:
            self._work("exists", shape, keys, work, math.inf)

    def clean(self) -> None:
        """Remove what is left, if the backend can.

        Raises:
            BackendError: something may still be there.
        """
        if not self.left or not isinstance(self.backend, SupportsDelete):
            return
        names = sorted(self.left)
        step = self.backend.capabilities.max_batch
        for at in range(0, len(names), step):
            for name, answer in zip(
                names[at : at + step], remove(self.backend, names[at : at + step], Retry(self._timeout_s, 3)), strict=True
            ):
                if isinstance(answer, BackendError):
                    raise answer
                self.left.discard(name)

    def close(self) -> None:
        """Give the memory back. What a call that went wrong may still touch stays mapped until the process ends."""
        if self._region is None:
            return
        if self._broken:
            _kept.append(self._region)
        else:
            self._tell("unregister_region", self._region)
            self._region.close()
        self._region = None

    def _work(self, doing: str, shape: Shape, keys: Sequence[ChunkKey], work: Any, limit_s: float, repeat: bool = False) -> Done:
        # Every thread has something to do, if there is that much.
        step = max(1, min(shape.batch, -(-len(keys) // shape.threads)))
        batches = [keys[at : at + step] for at in range(0, len(keys), step)]
        threads = min(shape.threads, len(batches))
        self._watch = Watch(threads, self._timeout_s)
        try:
            return work_through(doing, batches, work, self._watch, limit_s=limit_s, repeat=repeat)
        except BaseException:
            self._broken = True
            self.is_unsure = self.is_unsure or (doing == "put" and self._watch.is_inside)
            raise

    def _call(self, operation: str, items: Sequence[Any], kind: Any, thread: int) -> list[Any]:
        self._watch.begins(thread)
        results = getattr(self.backend, operation)(items, Deadline.after(self._timeout_s))
        self._watch.ends(thread)
        if not isinstance(results, list | tuple) or len(results) != len(items) or not all(isinstance(result, kind) for result in results):
            raise BreachError(
                f"{operation}: the backend answered what is no list of an answer for each item; that is for its vendor to fix"
            )
        return list(results)

    def _tell(self, what: str, region: Region) -> str:
        """What went wrong, if the backend wants to know of memory at all."""
        backend: Any = self.backend
        return timed(what, self._timeout_s, lambda: getattr(backend, what)(region)).problem if isinstance(backend, SupportsRegions) else ""

    def _buffers(self, shape: Shape) -> list[list[Buffer]]:
        """For each thread those of a batch."""
        if self._region is None or self._region.size_bytes < shape.least_bytes:
            self.close()
            region = Region(shape.least_bytes, "kvstore-bench")
            if problem := self._tell("register_region", region):
                raise BackendError(problem)
            self._region = region
        if len(self._payload) != shape.payload_bytes:
            # Random: a store that compresses, or finds equal blocks, shall not look faster than it is with KV.
            self._payload = os.urandom(shape.payload_bytes)
        size, region = shape.record_bytes, self._region
        return [[region.buffer((t * shape.batch + i) * size, size) for i in range(shape.batch)] for t in range(shape.threads)]


_kept: list[Region] = []
"""A region that nobody refers to would be unmapped."""


def _stamp(buffer: Buffer, key: ChunkKey) -> None:
    """Both ends of the payload say whose it is, sealed or not."""
    view = buffer.view
    view[HEADER_BYTES : HEADER_BYTES + 16] = key.chain_hash
    view[-16:] = key.chain_hash


def _is_stamped(view: memoryview, key: ChunkKey) -> bool:
    return view[HEADER_BYTES : HEADER_BYTES + 16] == key.chain_hash and view[-16:] == key.chain_hash


def _check_put(name: str, result: PutResult) -> None:
    if result.status is PutStatus.EXISTS:
        raise BreachError(f"put {name}: says that there is a record that nobody has stored")
    if result.status is not PutStatus.STORED:
        kind = TimedOutError if result.status is PutStatus.TIMED_OUT else UnavailableError
        raise _error_of(result.error, f"put {name}: {getattr(result.status, 'value', 'no status')}", kind)


def _check_get(name: str, result: GetResult) -> None:
    if result.status is GetStatus.MISSING:
        raise BreachError(f"get {name}: does not find what was stored; a store that evicts needs fewer bytes (--bytes)")
    if result.status is GetStatus.WRONG_SIZE:
        raise _corrupt(name, "length")
    if result.status is not GetStatus.FOUND:
        kind = TimedOutError if result.status is GetStatus.TIMED_OUT else UnavailableError
        raise _error_of(result.error, f"get {name}: {getattr(result.status, 'value', 'no status')}", kind)


def _corrupt(name: str, what: str) -> BreachError:
    return BreachError(f"get {name}: corrupt ({what}): the bytes are not those that were stored")


def _error_of(error: object, text: str, kind: type[BackendError] = UnavailableError) -> BackendError:
    return error if isinstance(error, BackendError) else kind(text)
