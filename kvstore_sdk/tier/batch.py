"""What is done next: one call's worth of work, and what a call may leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_sdk.backend import Hint, Ticket
from kvstore_sdk.tier.jobs import Item, Kind
from kvstore_sdk.tier.probe import Probe

__all__ = ["Batch", "Doubt"]


@dataclass(slots=True)
class Doubt:
    """A slot whose last operation the backend calls in doubt. `item` is None for a manifest's."""

    ticket: Ticket
    slot: int
    item: Item | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """What one thread does next: one backend call's worth of keys of a probe, of items of one kind, or of tickets to settle.

    Attributes:
        keys: Of the probe, those that the backend is asked about.
        hint: Of the request whose probe it is.
        slots: The slots of the items, one each.
        started_s: When a thread took it.
        timeout_s: What the call is allowed when it does not have to wait for a thread first.
        deadline_s: When the call becomes late, set by who makes it; 0.0 before.
        unanswered_s: Until when its call certainly ran, set by who makes it without waiting, and so sees the answer only when it comes by.
        returned: Its call has returned, and what is left to do is not the store's: it cannot be late.
        abandoned: It is late, and was given up.
        failed: When the first of its items was found to be tried again, and by what their waits are stretched; None before.
    """

    probe: Probe | None = None
    keys: Sequence[bytes] = ()
    items: Sequence[Item] = ()
    doubts: Sequence[Doubt] = ()
    slots: Sequence[int] = ()
    kind: Kind | None = None
    operation: str = ""
    started_s: float = 0.0
    timeout_s: float = 0.0
    deadline_s: float = 0.0
    unanswered_s: float = float("inf")
    returned: bool = False
    abandoned: bool = False
    failed: tuple[float, float] | None = None
    namespace: str = ""
    hint: Hint | None = None

    @property
    def may_wait(self) -> bool:
        """Whether its call may wait for others than the store."""
        return self.hint is not None and self.hint.wait_s > 0
