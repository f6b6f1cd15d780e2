"""One end of `p2p_nixl.py`'s raw NIXL: an agent with memory that it writes from, or that another one writes into."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from child import serve

from kvstore_sdk_backends.p2p.nixl_driver import BRISK_S, IDLE_S
from kvstore_sdk_backends.p2p.nixl_plane import UCX_SETTINGS


def places_of(memory_bytes: int, batch_bytes: int) -> Iterator[int]:
    """Where batches go, one after another through all of the memory, and again."""
    return itertools.cycle(range(0, memory_bytes - batch_bytes + 1, batch_bytes))


def sleep_exactly() -> None:
    """As the driver's thread does: Linux has a thread sleep 50 us longer than it asked for."""
    ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)


class End:
    """All calls to the agent are made under one lock: by who writes, and by the thread that looks for what others write."""

    def __init__(self, memory_bytes: int) -> None:
        from nixl import _api

        self._memory_bytes = memory_bytes
        self._memory = mmap.mmap(-1, memory_bytes)
        self._memory[:] = os.urandom(1 << 20) * (memory_bytes >> 20)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._nixl = _api.nixl_agent(f"raw-{uuid.uuid4().hex}", _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._nixl.create_backend("UCX", {})
        self._nixl.register_memory([(self._base, memory_bytes, 0, "")], "DRAM")
        self._peer, self._peer_base = "", 0
        self._look_until_s = 0.0
        self._wake = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "target":
            with self._lock:
                return {"agent": self._nixl.get_agent_metadata().hex(), "base": self._base}
        if question["op"] == "look":
            self._look_until_s = time.monotonic() + question["seconds"]
            self._wake.set()
            return {}
        if question["op"] == "load":
            with self._lock:
                self._peer = self._nixl.add_remote_agent(bytes.fromhex(question["agent"])).decode()
            self._peer_base = question["base"]
            return {}
        return self._write(question["size_bytes"], question["count"], question["seconds"])

    def _write(self, size_bytes: int, count: int, seconds: float) -> dict[str, Any]:
        sleep_exactly()
        each: list[float] = []
        with self._lock:
            began_s = time.perf_counter()
            for first in places_of(self._memory_bytes, count * size_bytes):
                at_s = time.perf_counter()
                places = range(first, first + count * size_bytes, size_bytes)
                local = self._nixl.get_xfer_descs([(self._base + place, size_bytes, 0) for place in places], "DRAM")
                remote = self._nixl.get_xfer_descs([(self._peer_base + place, size_bytes, 0) for place in places], "DRAM")
                handle = self._nixl.initialize_xfer("WRITE", local, remote, self._peer)
                state = self._nixl.transfer(handle)
                while state == "PROC":
                    time.sleep(BRISK_S)
                    state = self._nixl.check_xfer_state(handle)
                self._nixl.release_xfer_handle(handle)
                assert state == "DONE", state
                now_s = time.perf_counter()
                each.append(now_s - at_s)
                if now_s >= began_s + seconds:
                    break
            return {"bytes": len(each) * count * size_bytes, "seconds": time.perf_counter() - began_s, "each": each}

    def _look(self) -> None:
        sleep_exactly()
        while True:
            with self._lock:
                self._nixl.get_new_notifs()
            self._wake.wait(BRISK_S if time.monotonic() < self._look_until_s else IDLE_S)
            self._wake.clear()


if __name__ == "__main__":
    # What NIXL logs on standard output is none of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= UCX_SETTINGS | {"UCX_TLS": sys.argv[1], "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}
    serve(End(int(sys.argv[2])).answer, answers)
