"""What this process holds, to be compared before and after something that must leave nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from kvstore_sdk.vllm.geometry import is_abandoned

__all__ = ["held"]

_COUNTED = ("socket", "anon_inode")
_OURS = ("vllm_offload", "kvstore")


def held() -> dict[str, object]:
    """Children, also those not waited for; descriptors by what they are of; threads of the SDK; files in `/dev/shm` that
    nobody has open."""
    kinds: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{name}").partition("[")[0].partition(":")[0]
            if kind in _COUNTED or any(ours in kind for ours in _OURS):
                kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "children": _children(),
        "descriptors": kinds,
        "threads": sorted(thread.name for thread in threading.enumerate() if any(ours in thread.name for ours in ("kvstore", "backend"))),
        "memory": [name for name in os.listdir("/dev/shm") if any(ours in name for ours in _OURS) and is_abandoned(f"/dev/shm/{name}")],
    }


def _children() -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found
