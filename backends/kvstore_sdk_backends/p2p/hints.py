"""Whom requests named as the ones that have their records."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_sdk.backend import Hint
from kvstore_sdk_backends.p2p.addresses import Address, parse_address

__all__ = ["Hinted", "Hints"]

MAX_NAMES = 65_536
"""About 10 MiB. The oldest are forgotten first; their look-ups ask everybody."""
KEPT_S = 60.0
"""A request's load follows its look-up within seconds."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """What a hint says, its address read. `wait_s` is 0 once a look-up has waited."""

    address: Address
    wait_s: float
    # May be thousands of names, and a call groups its own by this.
    until: tuple[str, ...] = field(hash=False)


class Hints:
    """By name. Thread-safe, bounded, and never waits."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._lock = threading.Lock()
        self._hints: OrderedDict[str, tuple[Hinted, float]] = OrderedDict()
        # What the thread that calls has just been told, and asks next.
        self._just_said = threading.local()

    def note(self, names: Sequence[str], hint: Hint) -> None:
        """Of these names `hint` holds from now on, and whatever else is said of them meanwhile in what this thread asks next.

        Raises:
            ValueError: its peer is no address.
        """
        hinted = Hinted(parse_address(hint.peer), hint.wait_s, hint.until)
        until_s = time.monotonic() + KEPT_S + hint.wait_s
        self._just_said.names = dict.fromkeys(names, hinted)
        with self._lock:
            for name in names:
                self._hints[name] = (hinted, until_s)
                self._hints.move_to_end(name)
            while len(self._hints) > self._max_names:
                self._hints.popitem(last=False)

    def take(self, names: Sequence[str], *, wait: bool) -> dict[Hinted, list[str]]:
        """The names that a hint is about, by what it says. Who takes it to wait is the only one: the next who asks does not.

        To wait it is taken on the thread on which it was noted: requests for the same records, each with a hint, come at the same time.
        """
        found: dict[Hinted, list[str]] = {}
        own: dict[str, Hinted] = self._just_said.__dict__.pop("names", {}) if wait else {}
        now_s = time.monotonic()
        with self._lock:
            for name in names:
                if (known := self._hints.get(name)) is None:
                    continue
                hinted, until_s = known
                if until_s <= now_s:
                    del self._hints[name]
                    continue
                asked = Hinted(hinted.address, 0.0, ())
                mine = own.get(name, hinted)
                found.setdefault(mine if wait else asked, []).append(name)
                if wait and mine is hinted and hinted.wait_s:
                    self._hints[name] = (asked, until_s)
        return found

    def clear(self) -> None:
        with self._lock:
            self._hints.clear()

    def __len__(self) -> int:
        return len(self._hints)
