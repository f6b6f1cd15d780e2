"""What a child process may take, with the reason of each default beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore_sdk.backend import Bounds

__all__ = ["IsolationLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationLimits:
    """Bounds of one isolated backend. Each of them ends in the child being killed, and never in an answer that is wrong."""

    memory_bytes: Annotated[int, Bounds(ge=64 << 20), "memory of the child's own, beside the regions; with more it is restarted"] = 4 << 30
    # An order above what clients of object stores hold for hundreds of requests.
    restarts: Annotated[int, Bounds(ge=0, le=10_000), "within ten minutes; after more the backend is left alone for ten minutes"] = 30
    # A backend that dies with every 50th call stays in use at some hundred calls a minute.
    hang_kill_s: Annotated[float, Bounds(ge=0.1, le=3600), "how late a call may be before the child is killed"] = 5.0
    # Ten times what the contract allows: whatever a busy machine delays has come by then.
