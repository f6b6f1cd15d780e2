"""Bent frames, at the decoder and at a node that serves; `make fuzz` runs a million.

    python tests/backends/p2p/fuzz.py [--decoder N] [--socket N] [--seed S]

The same seed makes the same frames. It ends with an error at the first frame that does what none may do.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.monitor

sys.path.insert(0, str(Path(__file__).parent))

from p2p_frames import Frames

from kvstore_sdk.backend import Deadline, Get, GetStatus, Put, PutStatus, Region
from kvstore_sdk_backends.p2p import open_p2p
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import (
    VERSIONS,
    ForeignHello,
    Found,
    Hello,
    Lookup,
    MessageError,
    Refused,
    encode,
)

__all__ = ["Besieged", "fuzz_decoder", "fuzz_socket"]

BATCH = 500
"""Frames between two loads of a good client."""
PATIENCE_S = 60.0
RECORD_BYTES = 1 << 16
NAMES = [f"v1/fuzz/{number}" for number in range(8)]


def fuzz_decoder(count: int, seed: int) -> Counter[str]:
    """Decode bent frames. What is read as a message, and no other version's, is the same when it is sent on. Returns what they were."""
    frames, seen = Frames(seed), Counter[str]()
    for _ in range(count):
        frame = frames.bent()
        try:
            message = decode(frame)
        except MessageError:
            seen["refused"] += 1
            continue
        assert isinstance(message, ForeignHello | Refused) or decode(encode(message)) == message, frame.hex()
        seen[type(message).__name__] += 1
    return seen


class Besieged:
    """A node that serves, a good client of it, and a stranger who sends what he likes."""

    def __init__(self, seed: int) -> None:
        self._frames = Frames(seed)
        self._random = random.Random(seed)
        self._node: Any = open_p2p("127.0.0.1:0", serve_bytes=16 * RECORD_BYTES, data="zmq")
        self._client: Any = open_p2p("127.0.0.1:0", peers=str(self._node.address), data="zmq", answer_timeout_s=10)
        self._memory = Region(2 * RECORD_BYTES * len(NAMES))
        self._context = zmq.Context()
        self._socket: Any = None
        self._monitor: Any = None
        self._number = 0
        for at, name in enumerate(NAMES):
            buffer = self._memory.buffer(at * RECORD_BYTES, RECORD_BYTES)
            buffer.view[:] = random.Random(name).randbytes(RECORD_BYTES)
            [stored] = self._node.put([Put(name, (buffer,))], Deadline.after(PATIENCE_S))
            assert stored.status is PutStatus.STORED

    def __enter__(self) -> Besieged:
        return self

    def __exit__(self, *cause: object) -> None:
        self._part()
        self._context.destroy(0)
        self._client.close()
        self._node.close()
        self._memory.close()

    @property
    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self._node.counters()
        return counters

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def attack(self, count: int) -> None:
        """Have the node read so many frames that are no message."""
        before = self.counters["served_bad_frames"]
        while self.counters["served_bad_frames"] - before < count:
            if not self._in_session():
                continue
            # One fewer than end a session, so that all of them are read in it.
            for _ in range(Limits().bad_frames - 1):
                parts = [self._frames.bent() for _ in range(1 if self._random.random() < 0.95 else self._random.randint(2, 4))]
                try:
                    self._socket.send_multipart(parts, zmq.NOBLOCK)
                except zmq.ZMQError:
                    self._part()
                    break

    def load(self) -> None:
        """The good client finds all records, and has them."""
        deadline = Deadline.after(PATIENCE_S)
        assert self._client.exists(NAMES, deadline) == [True] * len(NAMES)
        into = [self._memory.buffer((len(NAMES) + at) * RECORD_BYTES, RECORD_BYTES) for at in range(len(NAMES))]
        for buffer in into:
            buffer.view[:] = bytes(RECORD_BYTES)
        results = self._client.get([Get(name, (buffer,)) for name, buffer in zip(NAMES, into, strict=True)], deadline)
        assert [result.status for result in results] == [GetStatus.FOUND] * len(NAMES)
        for name, buffer in zip(NAMES, into, strict=True):
            assert buffer.view == random.Random(name).randbytes(RECORD_BYTES)

    def _in_session(self) -> bool:
        """Begin a session, which also shows that all that was sent before was read; now and then leave it out."""
        if self._socket is None:
            self._meet()
        if self._random.random() < 0.1:
            return True
        self._number += 1
        hello = Hello(self._number, VERSIONS, self._random.randbytes(16), "", "", ("zmq",))
        try:
            self._socket.send(encode(hello), zmq.NOBLOCK)
            self._number += 1
            self._socket.send(encode(Lookup(self._number, 0, ("v1/fuzz/0",))), zmq.NOBLOCK)
            while not isinstance(answer := self._answer(), Found) or answer.number != self._number:
                refused = isinstance(answer, Refused) and answer.number in (hello.number, self._number)
                assert not refused, answer
        except (ConnectionError, zmq.ZMQError):
            self._part()
            return False
        return True

    def _answer(self) -> Any:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(PATIENCE_S * 1000))
        assert ready, "the node does not answer"
        if self._socket not in ready:
            raise ConnectionError
        return decode(self._socket.recv())

    def _meet(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(f"tcp://{self._node.address}")

    def _part(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(0)
            self._monitor.close(0)
            self._socket = None


def fuzz_socket(count: int, seed: int) -> Counter[str]:
    """Have a node read bent frames; a good client loads from it after each batch, and nothing stays open. Returns its counters."""
    with Besieged(seed) as besieged:
        for batch in range(-(-count // BATCH)):
            besieged.attack(BATCH)
            besieged.load()
            if not batch:
                descriptors = besieged.descriptors()
        # Those of the last connections are closed by threads of libzmq's.
        until = Deadline.after(PATIENCE_S)
        while besieged.descriptors() > descriptors + 16:
            assert not until.expired, f"{besieged.descriptors()} descriptors, {descriptors} after the first frames"
            time.sleep(0.05)
        return Counter(besieged.counters)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decoder", type=int, default=1_000_000, help="frames through the decoder")
    parser.add_argument("--socket", type=int, default=20_000, help="frames to a node")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    for what, fuzz, count in (("decoder", fuzz_decoder, chosen.decoder), ("socket", fuzz_socket, chosen.socket)):
        seen = fuzz(count, chosen.seed)
        sys.stdout.write(f"{what}: {count} bent frames, seed {chosen.seed}: {dict(seen.most_common())}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
