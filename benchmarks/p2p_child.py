"""One end of `p2p.py`: `python p2p_child.py owner|asker ours|zmq|sockets MEMORY_BYTES ADDRESS DATA TLS`.

An owner has memory full of records, and answers {"op": "fill", "bytes", "count"} with {"address"}. An asker is asked for batches of `count`
records, {"op": "get", "bytes", "count", "seconds"}, or whether they are there, {"op": "ask", ...}, for so long; the answer is {"rate":
MB/s, or round trips a second, "each": seconds of a batch}. *Ours* verifies what it gets, the others take it as it comes.

Of ours alone: {"op": "hit"} is what an engine does, from the first look-up to the verified records in its rows, in steps of 1 ms; {"op":
"idle", "seconds"}: how many cores a node that does nothing takes, with its child; {"op": "paused", "pids"}: how long a load takes to fail
whose owner was stopped.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from child import serve

from kvstore_sdk.backend import Buffer, Deadline, Get, GetStatus, Put, PutStatus, Region
from kvstore_sdk.format import record_bytes, seal, verify
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier import Lookup, Tier, TierSettings
from kvstore_sdk_backends.p2p import open_p2p

WAIT_S = 60.0
SHELF_BYTES = 2 << 30
REQUEST = struct.Struct("!QQ")
NAME_BYTES = 106
"""Of a chunk with a hash of 32 bytes and a group below 10."""


def identity(size: int) -> KVIdentity:
    group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=size, heads=1, head_size=1)
    fixed = {"model": "m", "weights": "w", "model_config": "c", "kv_dtype": "bfloat16", "layout": "bench", "layout_version": 1}
    sizes = {"block_tokens": 16, "hash_tokens": 16, "blocks_per_chunk": 1}
    return KVIdentity(**fixed, **sizes, groups=(group,), hash_algorithm="sha256")


def engine_keys(count: int) -> list[bytes]:
    return [hashlib.sha256(f"chunk {number}".encode()).digest() + bytes(4) for number in range(count)]


def timed(step: Callable[[], object], seconds: float) -> list[float]:
    """How long each call took, of as many as fit; one at least."""
    each: list[float] = []
    began_s = time.perf_counter()
    while not each or time.perf_counter() < began_s + seconds:
        at_s = time.perf_counter()
        step()
        each.append(time.perf_counter() - at_s)
    return each


def cpu_s(pid: int) -> float:
    """What a process has used, in user space and for it in the kernel."""
    with open(f"/proc/{pid}/stat") as file:
        after_name = file.read().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def cores_of(pids: list[int], seconds: float) -> float:
    before_s = sum(map(cpu_s, pids))
    time.sleep(seconds)
    return (sum(map(cpu_s, pids)) - before_s) / seconds


def pids_of(backend: Any) -> list[int]:
    """This process, and the one of the data plane."""
    plane = backend._node.plane
    return [os.getpid(), *([plane.pid] if plane is not None else [])]


class OurOwner:
    def __init__(self, memory_bytes: int, _: str, data: str, tls: str) -> None:
        # Half of a shelf may be on its way, an eighth of it to one peer. What holds nothing takes no memory.
        self._node: Any = open_p2p("127.0.0.1:0", serve_bytes=max(memory_bytes, SHELF_BYTES), data=data, ucx_tls=tls)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        size, keys = (
            question["bytes"],
            [ChunkKey.from_engine(identity(question["bytes"]).namespace, key) for key in engine_keys(question["count"])],
        )
        region = Region(record_bytes(size))
        buffer = region.buffer(0, record_bytes(size))
        for key in keys:
            buffer.view[4096 : 4096 + size] = random.Random(key.name).randbytes(4096) * (size // 4096)
            seal(buffer.view, key, "bench", size)
            [result] = self._node.put([Put(key.name, (buffer,))], Deadline.after(WAIT_S))
            assert result.status in (PutStatus.STORED, PutStatus.EXISTS), result
        region.close()
        return {"address": str(self._node.address), "pids": pids_of(self._node)}


class Rows:
    """An engine's rows, which are records: a `RecordMemory`."""

    def __init__(self, size: int, count: int) -> None:
        self._size, self._stride = size, record_bytes(size)
        self.region = Region(count * self._stride)
        self.row_count = count

    def payload_bytes(self, group: int) -> int | None:
        return self._size if group == 0 else None

    def record(self, row: int) -> Buffer:
        return self.region.buffer(row * self._stride, self._stride)


class OurAsker:
    def __init__(self, memory_bytes: int, address: str, data: str, tls: str) -> None:
        self._options = {"peers": address, "data": data, "ucx_tls": tls, "answer_timeout_s": WAIT_S}
        self._backend: Any = open_p2p("127.0.0.1:0", **self._options)
        self._region = Region(memory_bytes)
        self._backend.register_region(self._region)
        self._engines: dict[int, Engine] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "idle":
            return {"cores": cores_of(pids_of(self._backend), question["seconds"])}
        if question["op"] == "paused":
            engine = Engine(open_p2p("127.0.0.1:0", **self._options), question["bytes"], question["count"], question["timeout_s"])
            engine.load()
            return {"seconds": engine.load_of_paused(question["pids"])}
        if question["op"] == "hit":
            size = question["bytes"]
            if size not in self._engines:
                self._engines[size] = Engine(open_p2p("127.0.0.1:0", **self._options), size, question["count"])
            each = [self._engines[size].load()]
            while sum(each) < question["seconds"]:
                each.append(self._engines[size].load())
            return {"rate": len(each) * question["count"] * size / sum(each) / 1e6, "each": each}
        size, count = question["bytes"], question["count"]
        keys = [ChunkKey.from_engine(identity(size).namespace, key) for key in engine_keys(count)]
        if question["op"] == "ask":
            names = [key.name for key in keys]

            def ask() -> None:
                assert all(found is True for found in self._backend.exists(names, Deadline.after(WAIT_S)))

            each = timed(ask, question["seconds"])
            return {"rate": len(each) / sum(each), "each": each}
        stride = record_bytes(size)
        gets = [Get(key.name, (self._region.buffer(at * stride, stride),)) for at, key in enumerate(keys)]

        def get() -> None:
            results = self._backend.get(gets, Deadline.after(WAIT_S))
            assert all(result.status is GetStatus.FOUND for result in results), results
            assert not any(verify(get.into[0].view, key, "bench", size) for get, key in zip(gets, keys, strict=True))

        each = timed(get, question["seconds"])
        return {"rate": len(each) * count * size / sum(each) / 1e6, "each": each}


class Engine:
    """What an engine does with a Tier."""

    def __init__(self, backend: Any, size: int, count: int, timeout_s: float = WAIT_S) -> None:
        self._size, self._keys = size, engine_keys(count)
        self._tier = Tier(
            backend,
            Rows(size, 2 * count),
            identity=identity(size),
            settings=TierSettings(load_timeout_s=timeout_s, lookup_timeout_s=WAIT_S, hit_ttl_s=0.001),
        )
        self._requests = 0

    def load(self) -> float:
        """Seconds from the first look-up to the last verified record."""
        began_s = time.perf_counter()
        self._look_up()
        assert self._load(), "a load failed"
        took_s = time.perf_counter() - began_s
        # What was found is known no longer, so that the next request asks again.
        time.sleep(0.01)
        return took_s

    def load_of_paused(self, pids: list[int]) -> float:
        """Seconds until a load fails whose owner's processes are stopped when everything was found."""
        self._look_up()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.perf_counter()
        try:
            assert not self._load(), "a stopped owner has sent its records"
            return time.perf_counter() - began_s
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _look_up(self) -> None:
        self._requests += 1
        request = f"r{self._requests}"
        until_s = time.perf_counter() + WAIT_S
        self._tier.begin_request(request)
        # What is found is known for 1 ms alone, so a key is not asked for again.
        left = self._keys
        while left := [key for key in left if self._found(request, key) is Lookup.PENDING]:
            assert time.perf_counter() < until_s
            self._tier.flush()
            time.sleep(0.001)
            self._tier.poll()
        self._tier.end_request(request)

    def _found(self, request: str, key: bytes) -> Lookup:
        answer = self._tier.lookup(request, key)
        assert answer is not Lookup.MISS
        return answer

    def _load(self) -> bool:
        self._tier.submit_load(self._requests, self._keys, range(len(self._keys)))
        while not (results := self._tier.poll()):
            self._tier.flush()
            time.sleep(0.001)
        return results[0].success


class ZmqOwner:
    """Answers a request for a part of its memory with it, and anything else with as many zeros as it has names."""

    def __init__(self, memory_bytes: int, *_: str) -> None:
        self._memory = memoryview(mmap.mmap(-1, memory_bytes))
        self._memory[:] = os.urandom(1 << 20) * (memory_bytes >> 20)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"address": f"tcp://127.0.0.1:{self._port}"}

    def _serve(self) -> None:
        while True:
            to, request = self._socket.recv_multipart()
            if len(request) == REQUEST.size:
                offset, size = REQUEST.unpack(request)
                self._socket.send_multipart([to, request, self._memory[offset : offset + size]], copy=False)
            else:
                self._socket.send_multipart([to, bytes(len(request) // NAME_BYTES)])


class ZmqAsker:
    def __init__(self, memory_bytes: int, address: str, *_: str) -> None:
        self._memory = memoryview(mmap.mmap(-1, memory_bytes))
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        size, count = question["bytes"], question["count"]
        header = bytearray(REQUEST.size)
        if question["op"] == "ask":
            request = bytes(count * NAME_BYTES)

            def ask() -> None:
                self._socket.send(request)
                self._socket.recv()

            each = timed(ask, question["seconds"])
            return {"rate": len(each) / sum(each), "each": each}

        def get() -> None:
            for at in range(count):
                self._socket.send(REQUEST.pack(at * size, size))
            for _ in range(count):
                self._socket.recv_into(header)
                offset, length = REQUEST.unpack(header)
                assert self._socket.recv_into(self._memory[offset : offset + length]) == length

        each = timed(get, question["seconds"])
        return {"rate": len(each) * count * size / sum(each) / 1e6, "each": each}


class SocketOwner:
    def __init__(self, memory_bytes: int, *_: str) -> None:
        self._memory = memoryview(mmap.mmap(-1, memory_bytes))
        self._memory[:] = os.urandom(1 << 20) * (memory_bytes >> 20)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"address": f"127.0.0.1:{self._listener.getsockname()[1]}"}

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = bytearray(REQUEST.size)
        while receive(connection, memoryview(request)):
            offset, size = REQUEST.unpack(request)
            connection.sendall(self._memory[offset : offset + size])


class SocketAsker:
    def __init__(self, memory_bytes: int, address: str, *_: str) -> None:
        self._memory = memoryview(mmap.mmap(-1, memory_bytes))
        host, _, port = address.partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        size, count = question["bytes"], question["count"]
        requests = b"".join(REQUEST.pack(at * size, size) for at in range(count))

        def get() -> None:
            self._socket.sendall(requests)
            for at in range(count):
                assert receive(self._socket, self._memory[at * size : (at + 1) * size])

        each = timed(get, question["seconds"])
        return {"rate": len(each) * count * size / sum(each) / 1e6, "each": each}


def receive(connection: socket.socket, into: memoryview) -> bool:
    while into:
        if not (count := connection.recv_into(into)):
            return False
        into = into[count:]
    return True


ENDS: dict[tuple[str, str], Callable[..., Any]] = {
    ("owner", "ours"): OurOwner,
    ("asker", "ours"): OurAsker,
    ("owner", "zmq"): ZmqOwner,
    ("asker", "zmq"): ZmqAsker,
    ("owner", "sockets"): SocketOwner,
    ("asker", "sockets"): SocketAsker,
}


if __name__ == "__main__":
    # What libraries print is none of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(ENDS[sys.argv[1], sys.argv[2]](int(sys.argv[3]), *sys.argv[4:]).answer, answers)
