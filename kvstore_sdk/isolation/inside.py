"""Whether this process is the child of an isolated backend."""

from __future__ import annotations

__all__ = ["enter_child", "in_child"]

_entered = False


def in_child() -> bool:
    """Whether this process runs one backend for another process. Then whoever would isolate a backend has no need to."""
    return _entered


def enter_child() -> None:
    """From now on this process is such a child."""
    global _entered
    _entered = True
