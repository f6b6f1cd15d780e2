"""A backend that is asked now and answers later, as one in a child process is, over any other one and in this process."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    Capabilities,
    ClosedError,
    Deadline,
    Failure,
    GetResult,
    GetStatus,
    PutResult,
    PutStatus,
    TimedOutError,
)
from kvstore_sdk.testing import BackendWrapper

__all__ = ["Polled"]

_LATE_S = 0.25
_OVERTAKES = {"exists", "get", "delete", "settle"}


@dataclasses.dataclass
class _Call:
    number: int
    op: str
    items: Sequence[Any]
    deadline: Deadline
    given_up: bool = False
    tickets: tuple[str, ...] = ()


class Polled(BackendWrapper):
    """Its workers call `inner`. A call that has not returned a quarter of a second after its deadline is answered without it; items whose
    buffers it may still touch are in doubt until it returns.

    Attributes:
        asked: How many calls of each operation were begun.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Call] = {}
        self._late: set[int] = set()
        self._answers: list[tuple[int, object]] = []
        self._changed = threading.Condition(threading.RLock())
        self._waiting: queue.PriorityQueue[tuple[int, int, _Call | None]] = queue.PriorityQueue()
        self._closed = False
        self._settles = hasattr(inner, "settle")
        if not self._settles:
            self.settle = self._settle_late
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(inner.capabilities.max_concurrency)]
        for worker in self._workers:
            worker.start()

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, in_doubt=True)

    def begin(self, op: str, items: Sequence[Any], deadline: Deadline) -> int:
        call = _Call(next(self._numbers), op, items, deadline)
        with self._changed:
            self.asked[op] = self.asked.get(op, 0) + 1
            if self._closed:
                over = self._settle_late(items, deadline) if op == "settle" else ClosedError(f"{op}: closed")
                self._answers.append((call.number, over))
                return call.number
            self._open[call.number] = call
        self._waiting.put((0 if op in _OVERTAKES else 1, call.number, call))
        return call.number

    def take_answers(self) -> list[tuple[int, object]]:
        with self._changed:
            now = time.monotonic()
            for call in [call for call in self._open.values() if now > call.deadline.at_s + _LATE_S]:
                self._give_up(call)
            answers, self._answers = self._answers, []
            return answers

    def wait_answers(self, until_s: float) -> None:
        with self._changed:
            due_s = min((call.deadline.at_s + _LATE_S for call in self._open.values()), default=0.0)
            if self._open:
                self._changed.wait_for(lambda: self._answers, max(0.0, min(until_s, due_s + 0.001) - time.monotonic()))

    @property
    def has_answers(self) -> bool:
        """Whether there is something to take."""
        with self._changed:
            return bool(self._answers)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for _ in self._workers:
            self._waiting.put((2, 0, None))
        self.inner.close()

    def _settle_late(self, tickets: Sequence[Any], deadline: Deadline) -> list[bool]:
        with self._changed:
            return [not (isinstance(ticket, tuple) and ticket[1] in self._late) for ticket in tickets]

    def _settle_both(self, tickets: Sequence[Any], deadline: Deadline) -> Any:
        ours = [isinstance(ticket, tuple) and ticket[:1] == ("late",) for ticket in tickets]
        theirs = [ticket for ticket, is_ours in zip(tickets, ours, strict=True) if not is_ours]
        found = iter(self.settle(theirs, deadline) if theirs else ())
        late = self._settle_late(tickets, deadline)
        return [late[place] if is_ours else next(found) for place, is_ours in enumerate(ours)]

    def _work(self) -> None:
        while (call := self._waiting.get()[2]) is not None:
            answer: object
            try:
                if call.op == "settle" and self._settles:
                    answer = self._settle_both(call.items, call.deadline)
                else:
                    answer = getattr(self, call.op)(list(call.items), call.deadline)
            except BaseException as error:  # noqa: BLE001  # whatever it raises is its answer
                answer = error
            with self._changed:
                self._late.discard(call.number)
                if self._open.pop(call.number, None) is not None:
                    self._answers.append((call.number, answer))
                self._changed.notify_all()

    def _give_up(self, call: _Call) -> None:
        """With the lock held."""
        del self._open[call.number]
        error: BackendError = TimedOutError(f"{call.op}: no answer {_LATE_S} s after the deadline")
        answer: object = error
        if call.op in ("put", "get"):
            self._late.add(call.number)
            ticket = ("late", call.number)
            kind = PutResult(PutStatus.IN_DOUBT, error, ticket) if call.op == "put" else GetResult(GetStatus.IN_DOUBT, error, ticket)
            answer = [kind for _ in call.items]
        elif call.op in ("exists", "delete"):
            answer = [Failure(error) for _ in call.items]
        self._answers.append((call.number, answer))
