"""One NIXL agent over UCX, and all that is under way in it.

What was seen of NIXL 1.5.1 with UCX 1.23, and what follows from it here:

- An agent makes no progress but in calls to it, unless it has a thread that spins on a core for ever. So a thread of ours looks after it:
  every 0.2 ms while something is under way or expected, for a ms after something has moved ten times as often, and else every 50 ms. Over
  TCP what a peer WRITEs lands only then.
- Over CMA a copy happens inside `transfer`, in the calling thread, without Python's lock.
- Its calls are made by one thread at a time: two that polled and released the same handles crashed.
- A handle that is released goes on, and so does one whose peer was removed, though its state is an error then. So both are kept until the
  transfer is over. A peer whose link is cut is noticed after 3 seconds with the settings of `nixl_plane`; one that is paused never is.
- Every failure is an exception of a class of its own. After `nixlRemoteDisconnectError` nothing of that transfer goes on; after another
  one nobody knows.
- READ is not used: over TCP a reader that dies while the owner is paused aborts the owner.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Driver", "Piece", "Transfer"]

logger = logging.getLogger(__name__)

BRISK_S = 0.00002
BRISK_FOR_S = 0.001
MOVED_S = 0.00005
"""A look that finds nothing takes some microseconds."""
HOT_S = 0.0002
IDLE_S = 0.05
MAX_KEPT = 64
"""Peers that were dropped and not removed. One that comes back, as a peer does whose session broke, would take another connection, and
leave the one before open at both ends."""
UNSURE_S = 3.0
"""For which a transfer may be in a state that nobody knows. Then this process ends: that ends the transfer too."""

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
"""By default Linux has a thread sleep 50 us longer than it asked for."""
_DISCONNECTED = "nixlRemoteDisconnectError"

Piece = tuple[int, int, int]
"""Local address, remote address, bytes."""


class Transfer:
    """One batch of WRITEs to one peer.

    Attributes:
        failure: Why it did not land as a whole; "" while it runs, and when it did.
        over: Set once nothing of it goes on.
        posted: Whether it has begun.
    """

    def __init__(self, peer: str, handle: Any) -> None:
        self.peer = peer
        self.handle = handle
        self.failure = ""
        self.over = threading.Event()
        self.posted = False
        self.unsure_s = 0.0


class Driver:
    """Every call to the agent is made here, under one lock."""

    def __init__(self, nixl: Any) -> None:
        """`nixl`: a `nixl_agent` whose backend is UCX, and which has no thread of its own."""
        self._nixl = nixl
        # Taken before each call to the agent.
        self._moved = threading.Condition(threading.Lock())
        self._running: list[Transfer] = []
        # Peers that are not loaded any more, the one that was dropped first comes first.
        self._kept: dict[str, None] = {}
        self._hot_until_s = 0.0
        self._brisk_until_s = 0.0
        threading.Thread(target=self._drive, name="kvstore-nixl", daemon=True).start()

    def metadata(self) -> bytes:
        """What a peer needs to write into the memory that is registered now."""
        with self._moved:
            metadata: bytes = self._nixl.get_agent_metadata()
            return metadata

    def register(self, address: int, size_bytes: int) -> Any:
        """Let peers write there. Returns what `deregister` takes."""
        with self._moved:
            return self._nixl.register_memory([(address, size_bytes, 0, "")], "DRAM")

    def deregister(self, memory: Any) -> None:
        """Stops nothing that is on its way."""
        with self._moved, suppress(Exception):
            self._nixl.deregister_memory(memory)

    def load(self, name: str, metadata: bytes, regions: Sequence[tuple[int, int]]) -> None:
        """Know a peer, and check that its agent has this name, and these regions.

        Raises:
            Exception: of NIXL, or a ValueError. Nothing of it stays.
        """
        with self._moved:
            self._kept.pop(name, None)
            try:
                if self._nixl.add_remote_agent(metadata) != name.encode():
                    raise ValueError("another name")
                self._nixl.prep_xfer_dlist(name, [(base, size, 0) for base, size in regions], "DRAM").release()
            except BaseException:
                # Also what could not be loaded leaves a name behind, under which nothing else can be loaded then.
                if not self._remove(name):
                    self._kept[name] = None
                raise

    def unload(self, name: str) -> None:
        """Nobody writes to this peer any more. What is on its way to it goes on. NIXL goes on knowing the last 64 of these."""
        with self._moved:
            self._kept[name] = None
            while len(self._kept) > MAX_KEPT and (oldest := next(filter(self._remove, list(self._kept)), "")):
                del self._kept[oldest]

    def _remove(self, name: str) -> bool:
        """Unless something is on its way to it."""
        if any(transfer.peer == name for transfer in self._running):
            return False
        with suppress(Exception):
            self._nixl.remove_remote_agent(name)
        return True

    def prepare(self, peer: str, pieces: Sequence[Piece]) -> Transfer:
        """Make ready to write. Nothing is written before `post`, which has to be called then.

        Raises:
            Exception: of NIXL.
        """
        nixl = self._nixl
        with self._moved:
            local = nixl.get_xfer_descs([(address, size, 0) for address, _, size in pieces], "DRAM")
            remote = nixl.get_xfer_descs([(address, size, 0) for _, address, size in pieces], "DRAM")
            transfer = Transfer(peer, nixl.initialize_xfer("WRITE", local, remote, peer))
            self._running.append(transfer)
        return transfer

    def post(self, transfer: Transfer) -> None:
        """Begin to write; over CMA it is over then."""
        with self._moved:
            transfer.posted = True
            if self._is_over(transfer, self._nixl.transfer):
                self._running.remove(transfer)
                self._end(transfer)
            else:
                self._brisk_until_s = time.monotonic() + BRISK_FOR_S
                self._moved.notify()

    def expect(self, until_s: float) -> None:
        """Look often until then, for what peers write."""
        with self._moved:
            self._hot_until_s = max(self._hot_until_s, until_s)
            self._moved.notify()

    def _drive(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
        while True:
            with self._moved:
                began_s = time.monotonic()
                with suppress(Exception):
                    # Nobody sends any; it is what makes progress.
                    self._nixl.get_new_notifs()
                over = [each for each in self._running if each.posted and self._is_over(each, self._nixl.check_xfer_state)]
                if over:
                    self._running = [transfer for transfer in self._running if transfer not in over]
                    for transfer in over:
                        self._end(transfer)
                now_s = time.monotonic()
                if over or now_s - began_s > MOVED_S:
                    # Also where nobody had said that something would come.
                    self._brisk_until_s = now_s + BRISK_FOR_S
                if now_s < self._brisk_until_s:
                    self._moved.wait(BRISK_S)
                else:
                    self._moved.wait(HOT_S if self._running or now_s < self._hot_until_s else IDLE_S)

    def _is_over(self, transfer: Transfer, ask: Callable[[Any], str]) -> bool:
        """What `ask`, a call that answers the state of a handle, says."""
        try:
            state = ask(transfer.handle)
        except Exception as error:  # noqa: BLE001  # NIXL raises classes of its own, one for each status
            state = type(error).__name__
        if state in ("DONE", _DISCONNECTED):
            transfer.failure = transfer.failure or ("" if state == "DONE" else state)
            return True
        if state != "PROC":
            transfer.failure = transfer.failure or state
            transfer.unsure_s = transfer.unsure_s or time.monotonic()
            if time.monotonic() > transfer.unsure_s + UNSURE_S:
                logger.error("p2p: nixl does not know whether a transfer goes on (%s); the child ends, and that ends it", state)
                os._exit(1)
        return False

    def _end(self, transfer: Transfer) -> None:
        handle, transfer.handle = transfer.handle, None
        with suppress(Exception):
            self._nixl.release_xfer_handle(handle)
        transfer.over.set()
