"""Which transfers run at a time, with which memory, and when agents of NIXL may end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from kvstore_sdk.backend import UnsupportedError
from kvstore_sdk_backends.s3.nixl_agent import UNTOLD, Agent, Slot, State, Verb
from kvstore_sdk_backends.s3.staging import PageMap, Staging

__all__ = ["MAX_STAGED_BYTES", "MAX_STAGED_SUM_BYTES", "NixlAgents"]

logger = logging.getLogger(__name__)

MAX_STAGED_BYTES = 64 << 20
"""Longest record of a transfer."""
MAX_STAGED_SUM_BYTES = 1 << 30
"""Memory of all slots together, idle or not: what a store with NIXL takes beside its callers' memory. A slot keeps what it has for the
next record; where another needs it, the one that is idle for longest gives it up. So of records of 32 MiB, 32 are on their way at most."""
IDLE_S = 60.0
"""For which a slot keeps memory that nobody uses, while others are used."""
CONNECTIONS = 25
"""Of one S3 client of the AWS SDK that NIXL uses; it cannot be set."""

_STAGED_UNIT_BYTES = 1 << 20


class NixlAgents:
    """Slots for so many transfers at a time, of any threads, all with one endpoint, bucket and pair of keys.

    Closed, it ends as soon as no transfer runs; while one does, that is looked for whenever others are made or closed.
    """

    _closed_ones: set[NixlAgents] = set()  # noqa: RUF012  # of the process
    _closed_lock = threading.RLock()
    _used = _forked = False

    def __init__(self, parameters: Callable[[], Mapping[str, str]], concurrency: int) -> None:
        """
        Args:
            parameters: Makes those of the plugin OBJ. What makes them, and not they, since they hold keys, and this is in tracebacks.
            concurrency: Transfers at a time.

        Raises:
            ImportError: there is no NIXL.
            UnsupportedError: NIXL or this machine cannot do it; the message says why.
        """
        if NixlAgents._forked:
            # The threads of the AWS SDK are not there.
            raise UnsupportedError("nixl: this process was forked from one that used it; start a fresh one")
        NixlAgents._end_closed()
        # Of the kind that a signal handler which calls `close` may take again.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._left: list[Slot] = []
        self._taken = 0
        self._closed = False
        self._given_up = False
        self._agents: list[Agent] = []
        try:
            self.pages = PageMap()
        except OSError as cause:
            raise UnsupportedError(
                f"nixl: /proc/self/pagemap cannot be read ({cause.strerror}), which tells how long an object was"
            ) from cause
        broken = ""
        try:
            if not Staging(1, self.pages).works():
                raise UnsupportedError(UNTOLD)
            NixlAgents._used = True
            rest = concurrency
            for count in range(-(-concurrency // CONNECTIONS), 0, -1):
                self._agents.append(Agent(parameters, -(-rest // count), self))
                rest -= len(self._agents[-1].slots)
        except BaseException as cause:
            self._end()
            if isinstance(cause, (UnsupportedError, ImportError)) or not isinstance(cause, Exception):
                raise
            broken = type(cause).__name__
        if broken:
            # Here, where it has neither the text nor the context of the cause, which may hold the keys.
            raise UnsupportedError(f"nixl: its plugin OBJ cannot be used: it raised {broken}")
        self._free = list(self._slots())
        self._many = concurrency // 2
        self._few = max(concurrency // 8, 1)

    def take(self, verb: Verb, size_bytes: int) -> Slot | None:
        """A free slot for a record of `size_bytes`, MAX_STAGED_BYTES at most; whoever took it gives it back.

        Returns:
            None: there is none now, nor the memory for one; or this is closed.
        """
        room_bytes = -(-size_bytes // _STAGED_UNIT_BYTES) * _STAGED_UNIT_BYTES
        with self._lock:
            if self._closed or self._given_up:
                return None
            if self._left:
                self._collect()
            slot = self._with_room(room_bytes)
            if slot is None:
                return None
            slot.writes = verb == "WRITE"
            self._free.remove(slot)
            self._taken += 1
            idle = next((idle for idle in self._free if idle.room_bytes), None)
            if idle is not None and idle.freed_s < time.monotonic() - IDLE_S:
                idle.drop()
            return slot

    def is_held_up(self, verb: Verb) -> bool:
        """Whether better not wait for a slot: most transfers outlive those who waited for them; or there will be no more; or a READ would
        wait for WRITEs, so that a record that is needed waits for those that are being stored.
        """
        with self._lock:
            if self._left:
                self._collect()
            held_bytes = sum(slot.room_bytes for slot in self._left)
            if self._given_up or len(self._left) > self._many or held_bytes > MAX_STAGED_SUM_BYTES // 2:
                return True
            writing = sum(slot.writes for slot in self._slots())
            return verb == "READ" and writing > 0 and self._taken + len(self._left) - writing < self._few

    def close(self) -> None:
        """Never blocks on a transfer. Idempotent. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with NixlAgents._closed_lock:
            if self._closed:
                return
            self._closed = True
            NixlAgents._closed_ones.add(self)
        NixlAgents._end_closed()

    @property
    def is_over(self) -> bool:
        """Whether it is closed, and nothing of it is left."""
        return self._closed and not self._agents

    def _slots(self) -> Iterator[Slot]:
        return (slot for agent in self._agents for slot in agent.slots)

    def _with_room(self, room_bytes: int) -> Slot | None:
        """A free slot that has so much memory, or may make it. `_free` is in the order in which they became free."""
        if not self._free:
            return None
        for slot in reversed(self._free):
            if slot.room_bytes >= room_bytes:
                return slot
        *idle, slot = self._free
        excess_bytes = sum(one.room_bytes for one in self._slots()) - slot.room_bytes + room_bytes - MAX_STAGED_SUM_BYTES
        for other in idle:
            if excess_bytes <= 0:
                break
            excess_bytes -= other.room_bytes
            other.drop()
        if excess_bytes > 0:
            return None
        slot.room_bytes = room_bytes
        return slot

    def give_back(self, slot: Slot, running: bool) -> None:
        with self._lock:
            self._taken -= 1
            if running:
                self._left.append(slot)
            else:
                self._set_free(slot)
        if self._closed:
            NixlAgents._end_closed()

    def _set_free(self, slot: Slot) -> None:
        slot.writes, slot.freed_s = False, time.monotonic()
        self._free.append(slot)

    def give_up(self) -> None:
        """Take no more slots: memory cannot tell any more how long an object was."""
        if not self._given_up:
            self._given_up = True
            logger.warning("%s; from here on s3fs moves the records", UNTOLD)

    def _collect(self) -> None:
        """Free the slots whose transfers are over by now."""
        for slot in self._left[:]:
            if slot.state() is not State.RUNNING:
                self._left.remove(slot)
                self._set_free(slot)

    def _end(self) -> None:
        for agent in self._agents:
            agent.end()
        self._agents.clear()
        self.pages.close()

    @classmethod
    def _end_closed(cls) -> None:
        """End those that are closed and idle by now."""
        with cls._closed_lock:
            for agents in list(cls._closed_ones):
                with agents._lock:
                    agents._collect()
                    for slot in agents._free:
                        slot.drop()
                    agents._free.clear()
                    if agents._taken or agents._left:
                        continue
                    agents._end()
                cls._closed_ones.discard(agents)


def _forget() -> None:
    """In a forked child: the threads of its parent's agents are not there, and would be waited for."""
    NixlAgents._forked = NixlAgents._used
    NixlAgents._closed_lock = threading.RLock()
    NixlAgents._closed_ones = set()


os.register_at_fork(after_in_child=_forget)
