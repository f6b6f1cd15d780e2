"""What a reader needs to judge figures: the machine they were taken on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

__all__ = ["filesystem_of", "free_memory_bytes", "machine_facts"]


def machine_facts() -> dict[str, str]:
    """Date, processors, memory, kernel and Python. Nothing that names the host."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{_memory_kib('MemTotal') / 2**20:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def free_memory_bytes() -> int:
    """What programs can still have without others losing theirs; 0 where the kernel does not say."""
    return _memory_kib("MemAvailable") * 1024


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`."""
    found = [line.split()[1:3] for line in _lines("/proc/mounts")]
    return max((mount for mount in found if path.resolve().is_relative_to(mount[0])), key=lambda mount: len(mount[0]), default=["", "?"])[1]


def _memory_kib(name: str) -> int:
    return next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith(f"{name}:")), 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
