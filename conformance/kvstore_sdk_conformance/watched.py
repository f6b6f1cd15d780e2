"""A backend whose every call is watched: made on a thread that can be left behind, bounded in time, judged by the form of its answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    Capabilities,
    Deadline,
    DeleteStatus,
    Failure,
    GetResult,
    GetStatus,
    PutResult,
    PutStatus,
    Region,
    SupportsRegions,
    SupportsSettle,
)
from kvstore_sdk_conformance.callers import Callers, HungError
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require
from kvstore_sdk_conformance.memory import Arena

__all__ = ["CALL_S", "GRACE_S", "STALL_S", "WatchedBackend"]

CALL_S = 10.0
"""Deadline of a call, unless its check is about deadlines: what a slow store over a network needs for a batch."""
GRACE_S = 5.0
"""After the deadline: then the call hangs. A busy machine needs some; a backend that is so late is late by any measure."""
STALL_S = 3.0
"""For which a machine may stand still, or be busy with others: what has no deadline of its own is not judged more closely than that."""
SETTLE_S = 30.0
SLOW_BYTES_PER_S = 20e6
ITEM_S = 0.05
"""What even a slow store moves, and takes for an item: the deadline of a call grows with its bytes and its items."""

_LOST_ARENAS: list[Arena] = []
_SHOWN = 2
"""Items of a call in a comment."""


class WatchedBackend:
    """An open backend under a letter, as the log calls it.

    A call has to be answered within its deadline and a grace, in the form that the contract gives it; otherwise the requirement that says
    so is broken, whatever was being checked.
    """

    def __init__(self, label: str, backend: Backend, log: Callable[[str], None]) -> None:
        self.backend = backend
        self.capabilities: Capabilities = backend.capabilities
        self._label = label
        self._log = log
        self._callers = Callers()
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        self._doubtful: set[int] = set()
        self.names: set[str] = set()
        self.hung = False
        self.closed = False

    def close(self, limit_s: float = 5.0) -> None:
        """Close the backend, once more if it is closed. The threads that called it end; memory that is not lent goes."""
        self._log(f"{self._label}.close()")
        with self._lock:
            arenas, self._arenas = self._arenas, []
        with contextlib.ExitStack() as steps:
            # In reverse, and each of them whatever the others do.
            steps.callback(self.drop)
            steps.callback(self._close_backend, limit_s)
            for arena in arenas:
                steps.callback(self._discard, arena)

    def drop(self) -> None:
        """End what belongs to this view, without closing the backend. Idempotent."""
        self._callers.stop()
        with self._lock:
            arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

    @contextlib.contextmanager
    def lend(self, lengths: Sequence[int], shift: int = 0, *, backwards: bool = False) -> Iterator[Arena]:
        """Memory with buffers of these lengths that nobody else uses; it comes back, unless a call that hangs may still touch it."""
        arena = self._take(Arena.size_for(lengths, shift))
        arena.lay_out(lengths[::-1] if backwards else lengths, shift)
        if backwards:
            arena.buffers.reverse()
        try:
            yield arena
        finally:
            self._give_back(arena)

    def raw(
        self,
        op: str,
        items: Sequence[Any],
        timeout_s: float | None = None,
        *,
        grace_s: float = GRACE_S,
        breaks: str = "KV-LIVE-03",
        settle: bool = True,
    ) -> Any:
        """One call of `exists`, `put`, `get` or `delete`, logged as a comment: its answer, of the contract's form.

        Args:
            op: Name of the method.
            items: As the method takes them.
            timeout_s: Of its deadline, from now; below zero it has passed.
            grace_s: After the deadline: then the call hangs.
            breaks: What a call that hangs breaks.
            settle: Wait until no item is in doubt any more.
        """
        when = "" if timeout_s is None else f", with a deadline {timeout_s:g} s away"
        self._log(f"# {self._label}.{op}({_short(items)}){when}")
        return self._call(op, items, timeout_s, grace_s=grace_s, breaks=breaks, settle=settle)

    def _call(
        self,
        op: str,
        items: Sequence[Any],
        timeout_s: float | None = None,
        *,
        grace_s: float = GRACE_S,
        breaks: str = "KV-LIVE-03",
        settle: bool = True,
    ) -> Any:
        """`raw`, without a line in the log."""
        if timeout_s is None:
            timeout_s = CALL_S + len(items) * ITEM_S + sum(getattr(item, "size_bytes", 0) for item in items) / SLOW_BYTES_PER_S
        deadline = Deadline.after(timeout_s)
        method = getattr(self.backend, op)
        if op == "put":
            self.names.update(item.name for item in items)
        results = self.watched(op, lambda: method(items, deadline), timeout_s, grace_s=grace_s, breaks=breaks)
        self._check_form(op, items, results)
        in_doubt = [(item, result) for item, result in zip(items, results, strict=True) if _is_in_doubt(result)]
        # Memory that was in doubt once is used no more: a backend that settles too early shall not break what is checked later.
        self._doubtful |= {buffer.region.id for item, _ in in_doubt for buffer in (item.parts if op == "put" else item.into)}
        if in_doubt and settle:
            self.settle([result.ticket for _, result in in_doubt])
        return results

    def watched(self, op: str, call: Callable[[], Any], timeout_s: float, *, grace_s: float = GRACE_S, breaks: str = "KV-LIVE-03") -> Any:
        """The result of a call of the backend.

        Raises:
            CallRaised: it raised.
            ConformanceFailure: it did not return in time.
        """
        try:
            return self._callers.run(call, max(0.0, timeout_s) + grace_s)
        except HungError:
            late = f"{grace_s:g} s after its deadline" if grace_s else f"after {timeout_s:g} s"
            self.hung = True
            raise ConformanceFailure(f"{op} to return by its deadline", f"no return {late}", breaks=breaks) from None
        except ConformanceFailure:
            raise
        except BaseException as error:
            raise CallRaised(op, error) from error

    def settle(self, tickets: Sequence[Any], within_s: float = SETTLE_S) -> None:
        """Wait until these operations are over.

        Raises:
            ConformanceFailure: they are not.
        """
        require(isinstance(self.backend, SupportsSettle), "settle beside IN_DOUBT", "no such method", breaks="KV-CORE-21")
        until = Deadline.after(within_s)
        left = list(tickets)
        while left and not until.expired:
            over = self.ask_settled(left, min(1.0, until.remaining_s()))
            left = [ticket for ticket, done in zip(left, over, strict=True) if not done]
        require(
            not left, f"settle to answer True within {within_s:g} s", f"{len(left)} tickets that are still in doubt", breaks="KV-LIVE-07"
        )

    def ask_settled(self, tickets: Sequence[Any], timeout_s: float) -> list[bool]:
        """One call of `settle`."""
        backend: Any = self.backend
        deadline = Deadline.after(timeout_s)
        try:
            over = self.watched("settle", lambda: backend.settle(tickets, deadline), timeout_s, breaks="KV-LIVE-07")
        except CallRaised as raised:
            raise ConformanceFailure("an answer from settle", raised.seen, breaks="KV-LIVE-07") from raised
        good = isinstance(over, list) and len(over) == len(tickets) and all(isinstance(one, bool) for one in over)
        require(good, f"a list of {len(tickets)} bools from settle", over, breaks="KV-LIVE-07")
        found: list[bool] = over
        return found

    def _check_form(self, op: str, items: Sequence[Any], results: object) -> None:
        kinds: dict[str, tuple[type, ...]] = {
            "exists": (bool, Failure),
            "put": (PutResult,),
            "get": (GetResult,),
            "delete": (DeleteStatus, Failure),
        }
        kind = kinds[op]
        wanted = f"a list of {len(items)} {' or '.join(one.__name__ for one in kind)} from {op}"
        require(isinstance(results, list), wanted, f"a {type(results).__name__}", breaks="KV-CORE-02")
        assert isinstance(results, list)
        require(len(results) == len(items), wanted, f"a list of {len(results)}", breaks="KV-CORE-02")
        for result in results:
            require(isinstance(result, kind), wanted, f"one of {type(result).__name__}: {result!r}", breaks="KV-CORE-02")
            if isinstance(result, (PutResult, GetResult)):
                status = PutStatus if isinstance(result, PutResult) else GetStatus
                require(isinstance(result.status, status), f"a status of {status.__name__}", result, breaks="KV-CORE-02")
                if result.status in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT):
                    require(self.capabilities.in_doubt, "IN_DOUBT only with in_doubt declared", result, breaks="KV-LIVE-06")
                    require(
                        result.ticket is not None and _is_hashable(result.ticket),
                        "a hashable ticket with IN_DOUBT",
                        result,
                        breaks="KV-LIVE-06",
                    )
            if isinstance(result, Failure) or getattr(result, "status", None) in (PutStatus.FAILED, GetStatus.FAILED):
                require(isinstance(result.error, BackendError), f"a BackendError with the failure of {op}", result, breaks="KV-ERR-01")

    def _take(self, size_bytes: int) -> Arena:
        with self._lock:
            for index, arena in enumerate(self._arenas):
                if arena.region.size_bytes >= size_bytes:
                    return self._arenas.pop(index)
            smaller, self._arenas = self._arenas, []
        for arena in smaller:
            self._discard(arena)
        arena = Arena(max(size_bytes, 1 << 20))
        self._announce("register_region", arena.region, "KV-REG-01")
        return arena

    def _give_back(self, arena: Arena) -> None:
        if self.hung or arena.region.id in self._doubtful:
            # A call that hangs, or is in doubt, may touch it as long as this process lives.
            _LOST_ARENAS.append(arena)
            return
        with self._lock:
            self._arenas.append(arena)

    def _discard(self, arena: Arena) -> None:
        try:
            self._announce("unregister_region", arena.region, "KV-REG-02")
        finally:
            arena.close()

    def _close_backend(self, limit_s: float) -> None:
        self.closed = True
        try:
            self.watched("close", self.backend.close, limit_s + STALL_S, grace_s=0.0, breaks="KV-LIVE-08")
        except CallRaised as raised:
            raise ConformanceFailure("close to raise nothing", raised.seen, breaks="KV-LIVE-08") from raised

    def _announce(self, op: str, region: Region, breaks: str) -> None:
        if self.closed or not isinstance(self.backend, SupportsRegions):
            return
        method = getattr(self.backend, op)
        try:
            self.watched(op, lambda: method(region), CALL_S)
        except CallRaised as raised:
            raise ConformanceFailure(f"{op} to return", raised.seen, breaks=breaks) from raised


def _is_in_doubt(result: object) -> bool:
    return getattr(result, "status", None) in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT)


def _is_hashable(ticket: object) -> bool:
    try:
        hash(ticket)
    except TypeError:
        return False
    return True


def _short(items: Sequence[Any]) -> str:
    shown = [repr(getattr(item, "name", item)) for item in items[:_SHOWN]]
    return ", ".join([*shown, f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else shown)
