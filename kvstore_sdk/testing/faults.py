"""Rules of a script: which calls of a store something happens to (`Fault`), and what an `Action` has to do with them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvstore_sdk.backend import Backend, Deadline
from kvstore_sdk.testing.late import LateCall

__all__ = ["OPS", "PER_ITEM", "TIMED", "Action", "Call", "Fault", "Proceed"]

PER_ITEM = frozenset({"exists", "put", "get", "delete", "settle"})
TIMED = PER_ITEM | {"list", "usage"}
OPS = TIMED | {"close", "register_region", "unregister_region", "serve", "use_identity", "hint", "report_corrupt"}
"""Every operation that a fault can hit."""

Proceed = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as an action sees it.

    Attributes:
        op: Name of the method.
        items: Its items.
        chosen: Indices of the items that the rule is for; empty only where a call has no items.
        deadline: As given, None for methods without one.
        inner: The backend below, for what `proceed` does not do.
        late: Waits, and work after the call.
        random: Seeded by the script's seed, the rule and the item: independent of threads.
        other_name: Name of another record of so many bytes that went through, or None.
    """

    op: str
    items: Sequence[Any]
    chosen: tuple[int, ...]
    deadline: Deadline | None
    inner: Backend
    late: LateCall
    random: random.Random
    other_name: Callable[[str, int], str | None]

    def split(self, proceed: Proceed, answers: Callable[[Any], object]) -> Any:
        """Let the items that were not chosen proceed, and answer the others with `answers(item)`, in order."""
        rest = [item for index, item in enumerate(self.items) if index not in self.chosen]
        results = proceed(rest) if rest else []
        if not isinstance(results, list) or len(results) != len(rest):
            return results
        others = iter(results)
        return [answers(item) if index in self.chosen else next(others) for index, item in enumerate(self.items)]


class Action(ABC):
    """What a rule does to a call. Subclass it for faults of your own."""

    ops: ClassVar[frozenset[str]] = OPS
    """The operations it makes sense for."""

    @abstractmethod
    def run(self, call: Call, proceed: Proceed) -> Any:
        """Carry the call out, or pretend to: whatever this returns or raises, the caller gets.

        `proceed(items)` passes items on to the next rule, and in the end to the backend below.
        """


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule: `action` happens to calls of `op` that the other fields select.

    A call is hit when at least one of its items is chosen; actions that work item by item leave the rest of the call alone.

    Attributes:
        op: Name of a method, or `*` for every method that the action makes sense for and that has a deadline.
        action: What happens.
        names: Chooses items by name (tickets, prefixes and regions by their text); None chooses all.
        skip: Calls that would be hit but are let through first.
        times: Calls that are hit after that; None for no limit.
        probability: Of each item to be chosen, drawn from the script's seed, the rule, the name, and how often the rule saw that
            name: the same in every run, whatever the threads do. (After 100,000 other names a name is as good as new.)
        begins_s: Seconds after it was armed when the rule begins to hit.
        ends_s: And when it ends; calls that it hit before go on. None: never.
    """

    op: str
    action: Action
    names: Callable[[str], bool] | None = None
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    begins_s: float = 0.0
    ends_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, Action):
            wrong = f"the class {self.action.__name__}" if isinstance(self.action, type) else f"a {type(self.action).__name__}"
            raise ValueError(f"Fault: action: {wrong} is no action; write an instance, Hang() for example")
        if self.op != "*" and self.op not in OPS:
            raise ValueError(f"Fault: op: {self.op!r} is no operation; choose from * {' '.join(sorted(OPS))}")
        if self.op != "*" and self.op not in self.action.ops:
            raise ValueError(
                f"Fault: {type(self.action).__name__} makes no sense for {self.op}, only for {' '.join(sorted(self.action.ops))}"
            )
        if not 0.0 <= self.probability <= 1.0 or self.skip < 0 or (self.times is not None and self.times < 0):
            raise ValueError("Fault: probability must be from 0 to 1, skip and times not negative")
        if self.begins_s < 0.0 or (self.ends_s is not None and self.ends_s < self.begins_s):
            raise ValueError(f"Fault: begins_s {self.begins_s} must not be negative, ends_s {self.ends_s} not before it")

    def covers(self, op: str) -> bool:
        """Whether calls of `op` can be hit."""
        return op in self.action.ops and (self.op == op or (self.op == "*" and op in TIMED))
