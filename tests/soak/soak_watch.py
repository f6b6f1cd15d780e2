"""What the kernel says about a process and its children."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Look", "children_of", "is_alive", "look_at"]


@dataclass(frozen=True, slots=True)
class Look:
    """A process at a moment.

    Attributes:
        anonymous_bytes: Resident memory of its own, without files and shared memory.
        shared_bytes: Resident shared memory: regions.
        descriptors: Open ones.
        threads: Of it.
    """

    anonymous_bytes: int
    shared_bytes: int
    descriptors: int
    threads: int

    @property
    def memory_bytes(self) -> int:
        return self.anonymous_bytes + self.shared_bytes


def look_at(pid: int) -> Look | None:
    """None: it is gone, or going."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        if "RssAnon" not in fields:
            return None
        kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "Threads")}
        return Look(kib["RssAnon"] << 10, kib["RssShmem"] << 10, len(os.listdir(f"/proc/{pid}/fd")), kib["Threads"])
    except (OSError, ValueError, KeyError):
        return None


def children_of(pid: int) -> list[int]:
    """Processes that it started, and that run."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _stat(int(name))[1:2] == [str(pid)] and is_alive(int(name))]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """State, parent and so on; nothing of a process that is not there."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
