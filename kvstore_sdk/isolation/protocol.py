"""A backend that can be driven without a thread that waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kvstore_sdk.backend import Deadline

__all__ = ["PolledBackend"]


@runtime_checkable
class PolledBackend(Protocol):
    """Three methods beside the blocking ones, over the same store and under the same rules.

    A thread that waits for a reply beside a busy Python thread pays a switch interval for each system call. Who has to come by anyway
    asks here instead, and nobody waits.
    """

    def begin(self, op: str, items: Sequence[Any], deadline: Deadline) -> int:
        """Ask for `exists`, `put`, `get`, `delete` or `settle` of `items`. Never waits, never raises.

        Buffers of the items are in use until the answer was taken, and beyond that for items that answer IN_DOUBT.

        Returns:
            The number under which `take_answers` gives the answer, once.
        """
        ...

    def take_answers(self) -> list[tuple[int, object]]:
        """What has ended since: the number of a call, and the list that the method would have returned, or the exception that it would
        have raised. Never waits. A call that its store does not answer ends here half a second after its deadline at the latest, if
        somebody comes by."""
        ...

    def wait_answers(self, until_s: float) -> None:
        """Wait for at least one answer, or until `time.monotonic()` is `until_s`. Returns at once when nothing is asked."""
        ...
