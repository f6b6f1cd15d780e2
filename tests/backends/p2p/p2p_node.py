"""A process with one node: does what it is told, a line of JSON at a time, and ends with its input.

A command is `{"id": 7, "do": "get", ...}`; its answer `{"id": 7, "answer": ...}`, or `{"id": 7, "error": "..."}`. Commands run beside each
other, so a load can be under way while something else is asked.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvstore_sdk.backend import (
    Buffer,
    Deadline,
    Failure,
    Get,
    GetStatus,
    KVStoreError,
    Put,
    Region,
    SupportsRegions,
    open_backend,
)

PATTERN = 0x5A
"""Of memory that nobody may write into."""

EMPTY = 0xEE
"""Of buffers before they are filled: in no record, often enough to be one."""

PR_SET_PDEATHSIG = 1
_PERIOD = 4099
_SETTLE_EVERY_S = 0.05


@functools.lru_cache(maxsize=512)
def record(name: str, size: int) -> bytes:
    """What is stored under a name: decided by the name alone. A part of another record, or a shifted one, differs from it."""
    piece = hashlib.shake_128(name.encode()).digest(_PERIOD)
    return (piece * (size // _PERIOD + 1))[:size]


class Slots:
    """Equal parts of one region: free, in use by a call, or in doubt."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.region = Region(count * slot_bytes)
        self.slot_bytes = slot_bytes
        self._lock = threading.Condition()
        self._settling = threading.Lock()
        self._free = list(range(count))
        self._doubts: list[tuple[Any, int]] = []
        self._doubted: set[int] = set()
        self._filled: set[int] = set()

    def take(self, count: int, timeout_s: float = 60.0) -> list[int]:
        """So many that are free, the longest free first."""
        with self._lock:
            if not self._lock.wait_for(lambda: len(self._free) >= count, timeout_s):
                raise TimeoutError(f"{count} slots wanted, {len(self._free)} free, {len(self._doubts)} in doubt")
            taken, self._free = self._free[:count], self._free[count:]
            self._filled.difference_update(taken)
            return taken

    def buffer(self, slot: int, size: int) -> Buffer:
        return self.region.buffer(slot * self.slot_bytes, size)

    def give_back(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(slots)
            self._lock.notify_all()

    def doubt(self, ticket: Any, slot: int) -> None:
        """Out of use until `settle`."""
        with self._lock:
            self._doubts.append((ticket, slot))
            self._doubted.add(slot)

    @property
    def doubts(self) -> int:
        with self._lock:
            return len(self._doubts)

    def settle(self, backend: Any, deadline: Deadline) -> int:
        """Ask about all that are in doubt; how many still are."""
        with self._settling:
            with self._lock:
                asked = list(self._doubts)
            if asked:
                over = backend.settle([ticket for ticket, _ in asked], deadline)
                settled = [doubt for doubt, is_over in zip(asked, over, strict=True) if is_over]
                with self._lock:
                    for doubt in settled:
                        self._doubts.remove(doubt)
                self.give_back([slot for _, slot in settled])
        return self.doubts

    def fill(self) -> int:
        """Write the pattern into every free slot, and say how many that were."""
        with self._lock:
            for slot in self._free:
                self.buffer(slot, self.slot_bytes).view[:] = bytes((PATTERN,)) * self.slot_bytes
            self._filled = set(self._free)
            return len(self._filled)

    def changed(self) -> int:
        """Bytes that are not the pattern any more, in slots that were filled and not used since."""
        right = bytes((PATTERN,)) * self.slot_bytes
        with self._lock:
            seen = [bytes(self.buffer(slot, self.slot_bytes).view) for slot in self._filled]
        return sum(sum(byte != PATTERN for byte in one) for one in seen if one != right)

    @property
    def doubted_and_filled(self) -> int:
        """Slots that were in doubt at some time, and hold the pattern now."""
        with self._lock:
            return len(self._doubted & self._filled)


class Node:
    """What the process can be told. Every method is a command."""

    def __init__(self) -> None:
        self._backend: Any = None
        self._stop = threading.Event()
        self.closes = True

    def open(self, target: str, options: dict[str, Any], slots: int, slot_bytes: int) -> dict[str, Any]:
        """Open a backend by its URL, with memory for records beside it."""
        self._slots = Slots(slots, slot_bytes)
        self._backend = open_backend(target, options)
        if isinstance(self._backend, SupportsRegions):
            self._backend.register_region(self._slots.region)
        return {"address": str(getattr(self._backend, "address", ""))}

    def put(self, names: list[str], size: int, timeout_s: float = 20.0) -> list[str]:
        return [status for batch in self._batches(names) for status in self._put(batch, size, timeout_s)]

    def _put(self, names: Sequence[str], size: int, timeout_s: float) -> list[str]:
        taken = self._slots.take(len(names))
        try:
            puts = []
            for name, slot in zip(names, taken, strict=True):
                buffer = self._slots.buffer(slot, size)
                buffer.view[:] = record(name, size)
                puts.append(Put(name, (buffer,)))
            return [result.status.name for result in self._backend.put(puts, Deadline.after(timeout_s))]
        finally:
            self._slots.give_back(taken)

    def exists(self, names: list[str], timeout_s: float = 5.0) -> dict[str, Any]:
        """For each name True, False, or the text of the failure; and how long it took."""
        began_s = time.monotonic()
        try:
            answers = self._backend.exists(names, Deadline.after(timeout_s))
        except KVStoreError as error:
            answers = [Failure(error)] * len(names)
        told = [str(answer.error) if isinstance(answer, Failure) else answer for answer in answers]
        return {"answers": told, "took_s": time.monotonic() - began_s}

    def get(self, names: list[str], size: int, timeout_s: float = 20.0) -> dict[str, Any]:
        """One call. What became of each, how many bytes of those that were FOUND are wrong, how many others were written to, and how long
        it took."""
        taken = self._take(len(names))
        gets = []
        for name, slot in zip(names, taken, strict=True):
            buffer = self._slots.buffer(slot, size)
            buffer.view[:] = bytes((EMPTY,)) * size
            gets.append(Get(name, (buffer,)))
        began_s = time.monotonic()
        try:
            results = self._backend.get(gets, Deadline.after(timeout_s))
        except KVStoreError as error:
            self._slots.give_back(taken)
            return {
                "statuses": [type(error).__name__] * len(names),
                "errors": [str(error)],
                "wrong": 0,
                "took_s": time.monotonic() - began_s,
            }
        took_s = time.monotonic() - began_s
        wrong, touched, errors = 0, 0, []
        for name, slot, result in zip(names, taken, results, strict=True):
            if result.status is GetStatus.FOUND:
                wrong += self._wrong_bytes(name, slot, size)
            elif self._slots.buffer(slot, size).view != bytes((EMPTY,)) * size:
                touched += 1
            if result.error is not None:
                errors.append(str(result.error))
            if result.status is GetStatus.IN_DOUBT:
                self._slots.doubt(result.ticket, slot)
            else:
                self._slots.give_back([slot])
        statuses = [result.status.name for result in results]
        return {"statuses": statuses, "errors": sorted(set(errors)), "wrong": wrong, "touched": touched, "took_s": took_s}

    def _take(self, count: int, timeout_s: float = 30.0) -> list[int]:
        """Slots; what is in doubt is settled meanwhile, as a tier does."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._slots.settle(self._backend, Deadline.after(0.0))
            try:
                return self._slots.take(count, _SETTLE_EVERY_S)
            except TimeoutError:
                if time.monotonic() >= until_s:
                    raise

    def _wrong_bytes(self, name: str, slot: int, size: int) -> int:
        seen, right = self._slots.buffer(slot, size).view, record(name, size)
        if seen == right:
            return 0
        return sum(one != other for one, other in zip(seen, right, strict=True))

    def hint(self, names: list[str], peer: str, wait_s: float = 0.0) -> None:
        from kvstore_sdk.backend import Hint

        self._backend.hint(names, Hint(peer, wait_s))

    def traffic(self, names: list[str], size: int, batch: int, timeout_s: float, threads: int = 2, most_s: float = 100.0) -> dict[str, Any]:
        """Look up and load, on so many threads, until `stop` or for `most_s`; doubts are settled all the while. Counts what came
        of it, and says how long the longest call took."""
        counts: Counter[str] = Counter()
        lock, longest_s = threading.Lock(), [0.0]
        self._stop.clear()
        until_s = time.monotonic() + most_s

        def load(first: int) -> None:
            at = first
            while not self._stop.is_set() and time.monotonic() < until_s:
                some = [names[(at + number) % len(names)] for number in range(batch)]
                at += batch * threads
                seen = self.exists(some, timeout_s)
                there = [name for name, answer in zip(some, seen["answers"], strict=True) if answer is True]
                done = self.get(there, size, timeout_s) if there else {"statuses": [], "wrong": 0, "took_s": 0.0}
                with lock:
                    counts.update(done["statuses"])
                    counts["wrong"] += done["wrong"]
                    counts["there"] += len(there)
                    counts["not there"] += seen["answers"].count(False)
                    counts["not told"] += sum(isinstance(answer, str) for answer in seen["answers"])
                    longest_s[0] = max(longest_s[0], seen["took_s"], done["took_s"])
                if not there:
                    time.sleep(0.01)

        crew = [threading.Thread(target=load, args=(number * batch,)) for number in range(threads)]
        for thread in crew:
            thread.start()
        while any(thread.is_alive() for thread in crew):
            self._slots.settle(self._backend, Deadline.after(0.0))
            time.sleep(_SETTLE_EVERY_S)
        return {"counts": counts, "longest_s": longest_s[0]}

    def stop(self) -> None:
        """End the traffic, or the computing."""
        self._stop.set()

    def settle(self, timeout_s: float) -> int:
        """Until nothing is in doubt, or the time is over; how many still are."""
        until_s = time.monotonic() + timeout_s
        while left := self._slots.settle(self._backend, Deadline.after(min(1.0, timeout_s))):
            if time.monotonic() >= until_s:
                return left
            time.sleep(_SETTLE_EVERY_S)
        return 0

    def fill(self) -> int:
        return self._slots.fill()

    def changed(self) -> dict[str, int]:
        return {"bytes": self._slots.changed(), "doubted": self._slots.doubted_and_filled}

    def compute(self, most_s: float = 60.0) -> None:
        """Do nothing but compute, in Python, as a step of an engine at its worst, until `stop` or for `most_s`."""
        self._stop.clear()
        until_s = time.monotonic() + most_s
        while not self._stop.is_set() and time.monotonic() < until_s:
            pass

    def stats(self) -> dict[str, int]:
        """Numbers of the node, and how many slots are in doubt."""
        counters = getattr(self._backend, "counters", dict)
        return {"doubts": self._slots.doubts} | counters()

    def never_close(self) -> None:
        """When the input ends the process does, and leaves the backend as it is."""
        self.closes = False

    def close(self) -> float:
        """How long it took."""
        began_s = time.monotonic()
        if self._backend is not None:
            self._backend.close()
        return time.monotonic() - began_s

    def _batches(self, names: list[str]) -> list[list[str]]:
        most = self._backend.capabilities.max_batch
        return [names[start : start + most] for start in range(0, len(names), most)]


def main() -> None:
    # A process that is stopped does not see that its input ended.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    answers, lock = os.fdopen(os.dup(sys.stdout.fileno()), "w"), threading.Lock()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    node = Node()

    def carry_out(number: int, method: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            said = {"id": number, "answer": method(**arguments)}
        except Exception as error:  # the test is told, and judges
            logging.exception("command %s", number)
            said = {"id": number, "error": f"{type(error).__name__}: {error}"}
        with lock, suppress(BrokenPipeError):
            answers.write(json.dumps(said) + "\n")
            answers.flush()

    for line in sys.stdin:
        command = json.loads(line)
        number, method = command.pop("id"), getattr(node, command.pop("do"))
        threading.Thread(target=carry_out, args=(number, method, command), daemon=True, name=f"command {number}").start()
    if node.closes:
        node.close()


if __name__ == "__main__":
    main()
