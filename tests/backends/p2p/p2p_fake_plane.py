"""A data plane that moves nothing, and ends transfers when a test says so."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from p2p_bench import PATIENCE_S

from kvstore_sdk.backend import Buffer, Deadline, InvalidError, PutResult, PutStatus, UnavailableError

__all__ = ["FakePlane"]


class FakePlane:
    """What is sent lands at once, is held until `free` or its deadline, or is in doubt until it is settled.

    Attributes:
        mode: "land", "hold", "doubt", "unknown", or an exception that `send` raises.
        admitted: Agent and regions of each session.
        sent: Records and addresses, as they were sent.
        free: What is held lands.
        fenced: How often the child was killed. Nothing is in doubt afterwards.
        up: Whether there is a child.
    """

    def __init__(self) -> None:
        self.mode: str | Exception = "land"
        self.admitted: dict[bytes, tuple[bytes, Any]] = {}
        self.dropped: list[bytes] = []
        self.sent: list[tuple[bytes, int]] = []
        self.sending = 0
        self.most_sending = 0
        self.free = threading.Event()
        self.fenced = 0
        self.up = True
        self._tickets = itertools.count(1)
        self._doubts: set[int] = set()
        self._lock = threading.Lock()

    def admit(self, session: bytes, agent: bytes, regions: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        if not self.up:
            raise UnavailableError("p2p: admit: the data plane is being restarted")
        if agent == b"bent":
            raise InvalidError("p2p: admit: the agent cannot be loaded")
        self.admitted[session] = (agent, regions)

    def drop(self, session: bytes) -> None:
        self.admitted.pop(session, None)
        self.dropped.append(session)

    def send(self, session: bytes, pieces: Sequence[tuple[Buffer, int]], deadline: Deadline) -> list[PutResult]:
        if isinstance(self.mode, Exception):
            raise self.mode
        with self._lock:
            self.sending += 1
            self.most_sending = max(self.most_sending, self.sending)
        freed = self.mode != "hold" or self.free.wait(min(deadline.remaining_s(), PATIENCE_S))
        with self._lock:
            self.sending -= 1
            if self.mode == "doubt" or not freed:
                tickets = [next(self._tickets) for _ in pieces]
                self._doubts.update(tickets)
                return [PutResult(PutStatus.IN_DOUBT, ticket=ticket) for ticket in tickets]
            if self.mode == "unknown":
                return [PutResult(PutStatus.UNKNOWN) for _ in pieces]
            self.sent += [(bytes(buffer.view), address) for buffer, address in pieces]
        return [PutResult(PutStatus.STORED) for _ in pieces]

    def settle(self, tickets: Sequence[Any], deadline: Deadline) -> list[bool]:
        with self._lock:
            return [ticket not in self._doubts for ticket in tickets]

    def end_doubts(self) -> None:
        """All that is in doubt is over."""
        with self._lock:
            self._doubts.clear()

    def fence(self) -> None:
        self.fenced += 1
        self.end_doubts()
