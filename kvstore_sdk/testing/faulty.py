"""A backend that goes wrong by a script."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_sdk.backend import Backend, Capabilities, Deadline, GetStatus, PutStatus, Ticket
from kvstore_sdk.testing.actions import InDoubt, LateTicket
from kvstore_sdk.testing.faults import Call, Fault, Proceed
from kvstore_sdk.testing.late import LateCall, LateWork
from kvstore_sdk.testing.wrapper import BackendWrapper, item_name

__all__ = ["Event", "FaultyBackend"]

MAX_EVENTS = 100_000
"""Entries of the log, unless others are asked for."""

MAX_DRAWS = 100_000
"""Names whose draws a rule counts; older ones are forgotten."""

MAX_NAMES = 1024
"""Names of one length that `SwapRecords` may choose from."""

_THERE = {PutStatus.STORED, PutStatus.EXISTS, GetStatus.FOUND}

_JOIN_TIMEOUT_S = 5.0
"""Longest that `close` waits for late work; what is left then sits in a call of the backend below."""


@dataclass(slots=True)
class Event:
    """One call that the faulty backend was asked for. `faults` are the rules that hit it, in order."""

    op: str
    names: tuple[str, ...]
    thread: str
    faults: list[Fault] = field(default_factory=list)


@dataclass(slots=True)
class _Rule:
    fault: Fault
    index: int
    begins_at_s: float
    ends_at_s: float
    hits: int = 0
    draws: Counter[str] = field(default_factory=Counter)


class FaultyBackend(BackendWrapper):
    """Passes calls on to `inner`, except where a rule of its script says otherwise.

    Rules are asked in order. The first that hits a call holds it; what it lets proceed, the following rules see, and in the end
    `inner`. Two faults of one call are two rules: `[Fault("get", Hang(0.1)), Fault("get", WrongBytes())]` is slow and wrong.

    A rule with a time hits from `begins_s` to `ends_s` after it was armed.

    It offers `SupportsSettle` and `capabilities.in_doubt` if `inner` does, or if its first script has an `InDoubt` (perhaps with
    `times=0`): capabilities do not change while a backend is open.
    """

    def __init__(
        self,
        inner: Backend,
        script: Sequence[Fault] = (),
        *,
        seed: int = 0,
        max_events: int = MAX_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap `inner`, and arm the script.

        Args:
            inner: Closed with this.
            script: Rules, or a `Schedule` of them.
            seed: Decides all that is random: what `probability` chooses, and which bytes are changed.
            max_events: Entries of the log; older ones are dropped.
            clock: By which rules begin and end.
        """
        super().__init__(inner)
        self._seed = seed
        self._clock = clock
        self._lock = threading.Lock()
        # All that were ever armed; those that hit now, in order; those whose time is to come, the next one last.
        self._rules: list[_Rule] = []
        self._active: list[_Rule] = []
        self._coming: list[_Rule] = []
        self._events: deque[Event] = deque(maxlen=max_events)
        self._names: dict[int, dict[str, None]] = {}
        self._late = LateWork()
        self._in_doubt = inner.capabilities.in_doubt or any(isinstance(fault.action, InDoubt) for fault in script)
        if self._in_doubt:
            self.settle = self._settle_both
        self.arm(*script)

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, and `in_doubt` if the script needs it."""
        return replace(self.inner.capabilities, in_doubt=self._in_doubt)

    @property
    def log(self) -> list[Event]:
        """The calls so far, in the order they came, the last `max_events` of them."""
        with self._lock:
            return list(self._events)

    @property
    def hanging(self) -> int:
        """Calls that hang now."""
        return self._late.hanging

    @property
    def late_errors(self) -> list[BaseException]:
        """What `inner` raised when late work called it."""
        return list(self._late.errors)

    def fired(self, fault: Fault) -> int:
        """How many calls this rule hit."""
        with self._lock:
            return sum(max(0, rule.hits - fault.skip) for rule in self._rules if rule.fault is fault)

    def arm(self, *faults: Fault) -> None:
        """Add rules at the end of the script.

        Raises:
            ValueError: an `InDoubt`, where the backend was not opened as one that answers so.
        """
        if not self._in_doubt and any(isinstance(fault.action, InDoubt) for fault in faults):
            raise ValueError(
                "FaultyBackend: arm: capabilities must not change; put an InDoubt, if only with times=0, into the first script"
            )
        with self._lock:
            now_s = self._clock()
            for fault in faults:
                ends_at_s = math.inf if fault.ends_s is None else now_s + fault.ends_s
                rule = _Rule(fault, len(self._rules), now_s + fault.begins_s, ends_at_s)
                self._rules.append(rule)
                if fault.begins_s:
                    self._coming.append(rule)
                else:
                    # Calls that run have the list of before.
                    self._active = [*self._active, rule]
            self._coming.sort(key=lambda rule: rule.begins_at_s, reverse=True)

    def heal(self) -> None:
        """Drop every rule and `release`: from now on the backend is as good as `inner`."""
        with self._lock:
            self._active, self._coming = [], []
        self.release()

    def release(self) -> None:
        """Let every call that began before go on, where it hangs or would, and every late act of such calls happen."""
        self._late.release()

    def wait_hanging(self, calls: int = 1, timeout_s: float = 5.0) -> bool:
        """Wait until so many calls hang. False: they do not, after `timeout_s`."""
        return self._late.wait_hanging(calls, timeout_s)

    def wait_late(self, timeout_s: float = 5.0) -> bool:
        """Wait until every late act has happened. False: some have not, after `timeout_s`."""
        return self._late.wait_done(timeout_s)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        event = Event(op, tuple(map(item_name, items)), threading.current_thread().name)
        with self._lock:
            self._events.append(event)
            rules = self._due()
            # Taken with the rules: a call that has these when `heal` drops them must not hang, nor be in doubt, for ever.
            late = self._late.begin()
        bottom = proceed if op != "close" else self._close

        def descend(level: int, passed: Sequence[Any]) -> Any:
            if level == len(rules):
                return bottom(passed)
            call = self._match(rules[level], event, late, op, passed, deadline)
            if call is None:
                return descend(level + 1, passed)
            return rules[level].fault.action.run(call, lambda further: descend(level + 1, further))

        results = descend(0, items)
        self._remember(items, results)
        return results

    def _due(self) -> list[_Rule]:
        """The rules that may hit now, in order. One whose time is over forgets what it drew: a schedule of hours must not fill memory."""
        now_s = self._clock()
        while self._coming and self._coming[-1].begins_at_s <= now_s:
            self._active = sorted([*self._active, self._coming.pop()], key=lambda rule: rule.index)
        if any(rule.ends_at_s <= now_s for rule in self._active):
            for rule in self._active:
                if rule.ends_at_s <= now_s:
                    rule.draws.clear()
            self._active = [rule for rule in self._active if rule.ends_at_s > now_s]
        return self._active

    def _match(self, rule: _Rule, event: Event, late: LateCall, op: str, items: Sequence[Any], deadline: Deadline | None) -> Call | None:
        fault = rule.fault
        if not fault.covers(op):
            return None
        # Calls without items (usage, close) are one item without a name.
        names = [item_name(item) for item in items] or [""]
        with self._lock:
            chosen = tuple(index for index, name in enumerate(names) if self._chooses(rule, name))
            if not chosen:
                return None
            if fault.times is not None and rule.hits >= fault.skip + fault.times:
                return None
            rule.hits += 1
            if rule.hits <= fault.skip:
                return None
            event.faults.append(fault)
            draw = random.Random(f"{self._seed}/{rule.index}/{names[chosen[0]]}/{rule.draws[names[chosen[0]]]}")
        return Call(op, items, chosen if items else (), deadline, self.inner, late, draw, self._other_name)

    def _chooses(self, rule: _Rule, name: str) -> bool:
        fault = rule.fault
        if fault.names is not None and not fault.names(name):
            return False
        # At the end again, so that the first is the one that was not seen for longest.
        rule.draws[name] = rule.draws.pop(name, 0) + 1
        if len(rule.draws) > MAX_DRAWS:
            del rule.draws[next(iter(rule.draws))]
        # A generator of its own for each draw: one that calls share would hand out its numbers in the order of the threads.
        draw = random.Random(f"{self._seed}:{rule.index}:{name}:{rule.draws[name]}")
        return draw.random() < fault.probability

    def _other_name(self, name: str, size_bytes: int) -> str | None:
        with self._lock:
            return next((other for other in self._names.get(size_bytes, {}) if other != name), None)

    def _remember(self, items: Sequence[Any], results: Any) -> None:
        if not isinstance(results, list) or len(results) != len(items):
            return
        with self._lock:
            for item, result in zip(items, results, strict=True):
                if getattr(result, "status", None) in _THERE:
                    names = self._names.setdefault(item.size_bytes, {})
                    if len(names) < MAX_NAMES:
                        names[item.name] = None

    def _settle_both(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        def proceed(items: Sequence[Any]) -> Any:
            mine = [ticket for ticket in items if isinstance(ticket, LateTicket)]
            rest = [ticket for ticket in items if not isinstance(ticket, LateTicket)]
            over = dict(zip(mine, self._late.wait_over(list(mine), deadline.remaining_s()), strict=True))
            inner: Any = self.inner
            over |= zip(rest, inner.settle(rest, deadline) if rest else [], strict=True)
            return [over[ticket] for ticket in items]

        result: list[bool] = self.around("settle", tickets, deadline, proceed)
        return result

    def _close(self, _: Sequence[Any]) -> None:
        self._late.stop(_JOIN_TIMEOUT_S)
        self.inner.close()
