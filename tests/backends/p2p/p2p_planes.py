"""Two data planes on one machine, and what the system knows of their children."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvstore_sdk.backend import Buffer, Deadline, PutResult, PutStatus, Region, TimedOutError
from kvstore_sdk_backends.p2p.plane import Plane, Target

LISTENING = "0A"
"""Of a TCP socket, as in /proc/net/tcp."""
LONG_S = 40.0
"""For what takes milliseconds on a machine that is not busy."""
MIB = 1 << 20


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s, f"in {LONG_S:g} s: {what}"
        time.sleep(0.02)


def target_of(plane: Plane) -> Target:
    """As soon as there is a child, and it has answered."""
    found: list[Target] = []

    def answered() -> bool:
        found[:] = [] if (target := plane.target()) is None else [target]
        return bool(found)

    until(answered, "the child says where peers may write")
    return found[0]


def noise(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


class Pair:
    """An owner whose memory holds records, and an asker that admitted it to write into its memory."""

    def __init__(self, tls: str, size_bytes: int) -> None:
        self.owner, self.asker = Plane(tls=tls, label="owner"), Plane(tls=tls, label="asker")
        self.records, self.slots = Region(size_bytes), Region(size_bytes)
        self.owner.add_region(self.records)
        self.asker.add_region(self.slots)
        self.session, self._sessions = b"", 0
        self.base = 0
        self.admit()

    def admit(self) -> None:
        """Anew, under a session of its own. Both children may have been started again since the last one."""
        _, agent, regions = target_of(self.asker)
        self.base = next(base for region, base, _ in regions if region is self.slots)
        self.owner.drop(self.session)
        self._sessions += 1
        self.session = self._sessions.to_bytes(16, "big")

        def admitted() -> bool:
            # A child that is held up for seconds has not refused it.
            with contextlib.suppress(TimedOutError):
                self.owner.admit(self.session, agent, [(base, size) for _, base, size in regions], Deadline.after(LONG_S))
                return True
            return False

        until(admitted, "it is admitted")

    def pieces(self, count: int, size_bytes: int, at: int = 0) -> list[tuple[Buffer, int]]:
        """Records of the owner, each to the same place in the asker's memory, from `at` on."""
        places = range(at, at + count * size_bytes, size_bytes)
        return [(self.records.buffer(place, size_bytes), self.base + place) for place in places]

    def send(self, pieces: Sequence[tuple[Buffer, int]], limit_s: float = LONG_S) -> list[PutResult]:
        self.asker.expect(time.monotonic() + limit_s + LONG_S)
        return self.owner.send(self.session, pieces, Deadline.after(limit_s))

    @contextlib.contextmanager
    def dying(self, plane: Plane) -> Iterator[None]:
        """Whatever ends the child of one of both; afterwards another one is up."""
        generation = plane.generation
        yield
        until(lambda: plane.generation not in (0, generation), "another child is up")

    def works(self) -> bool:
        """Whether a record arrives."""
        self.records.view[:4096] = noise(4096, self._sessions)
        self.slots.view[:4096] = bytes(4096)
        [result] = self.send(self.pieces(1, 4096))
        return result.status is PutStatus.STORED and self.slots.view[:4096] == self.records.view[:4096]

    def close(self) -> None:
        self.owner.close()
        self.asker.close()
        self.records.close()
        self.slots.close()


@contextlib.contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """A process that stands still."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: state_of(pid) in "Tt", "it stands still")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    """As in /proc: T when it is stopped; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_gone(pid: int | None) -> bool:
    return pid is None or state_of(pid) in ("", "Z", "X")


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def wake_ups(pid: int) -> int:
    """How often a thread of a process has waited for something and gone on. Unlike processor time, it is the same on any machine."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for status in statuses)


def sockets_of(pid: int) -> dict[str, list[tuple[str, int, str]]]:
    """Of each protocol the local address, port and state of the sockets that a process has; of unix sockets the name."""
    inodes = _inodes(pid)
    found: dict[str, list[tuple[str, int, str]]] = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                address, port = fields[1].split(":")
                found.setdefault(protocol, []).append((_address(address), int(port, 16), fields[3]))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and len(fields) > 7:
            found.setdefault("unix", []).append((fields[7], 0, fields[5]))
    return found


def unsent_bytes(pid: int) -> int:
    """What a process has given to its sockets and nobody has taken."""
    inodes = _inodes(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].partition(":")[0], 16) for fields in lines if fields[9] in inodes)


def _inodes(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kind, _, inode = os.readlink(path).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _address(text: str) -> str:
    words = [struct.pack("<I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    raw = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
