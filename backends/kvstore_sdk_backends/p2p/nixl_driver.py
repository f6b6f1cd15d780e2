"""One NIXL agent over UCX, and all that is under way in it.

What was seen of NIXL 1.5.1 with UCX 1.23, and what follows from it here:

- An agent makes no progress but in calls to it, unless it has a thread that spins on a core for ever. So a thread of ours looks after it:
  every 0.2 ms while something is under way or expected, else every 50. Over TCP what a peer WRITEs lands only then.
- Over CMA a copy happens inside `transfer`, in the calling thread, without Python's lock.
- Its calls are made by one thread at a time: two that polled and released the same handles crashed.
- A handle that is released goes on, and so do its peers', so handles are kept until they are over. A peer whose link is cut is noticed
  after 3 seconds with the settings of `nixl_plane`; one that is paused never is.
- Every failure is an exception of a class of its own; after `nixlRemoteDisconnectError` nothing of that transfer goes on.
- READ is not used: over TCP a reader that dies while the owner is paused aborts the owner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Driver", "Transfer"]

HOT_S = 0.0002
IDLE_S = 0.05


class Transfer:
    """One batch of WRITEs to one peer.

    Attributes:
        failure: Why it did not land as a whole; "" while it runs, and when it did.
        over: Set once nothing of it goes on.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.failure = ""
        self.over = threading.Event()


class Driver:
    """Every call to the agent is made here, under one lock."""

    def __init__(self, nixl: Any) -> None:
        """`nixl`: a `nixl_agent` whose backend is UCX, and which has no thread of its own."""
        self._nixl = nixl
        # Taken before each call to the agent.
        self._moved = threading.Condition(threading.Lock())
        self._running: list[Transfer] = []
        self._hot_until_s = 0.0
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

    def load(self, metadata: bytes, regions: Sequence[tuple[int, int]]) -> str:
        """Know a peer, and check that these regions are its.

        Returns:
            The name of its agent.

        Raises:
            Exception: of NIXL: it is not metadata, or has other regions, or an agent of that name is known.
        """
        with self._moved:
            name: str = self._nixl.add_remote_agent(metadata).decode()
            try:
                self._nixl.prep_xfer_dlist(name, [(base, size, 0) for base, size in regions], "DRAM").release()
            except BaseException:
                self._unload(name)
                raise
            return name

    def unload(self, name: str) -> None:
        """Forget a peer. What is on its way to it goes on."""
        with self._moved:
            self._unload(name)

    def _unload(self, name: str) -> None:
        with suppress(Exception):
            self._nixl.remove_remote_agent(name)

    def write(self, peer: str, pieces: Sequence[tuple[int, int, int]]) -> Transfer:
        """Begin to write: local address, remote address, bytes of each piece.

        Raises:
            Exception: of NIXL; nothing was begun.
        """
        nixl = self._nixl
        with self._moved:
            local = nixl.get_xfer_descs([(address, size, 0) for address, _, size in pieces], "DRAM")
            remote = nixl.get_xfer_descs([(address, size, 0) for _, address, size in pieces], "DRAM")
            transfer = Transfer(nixl.initialize_xfer("WRITE", local, remote, peer))
            try:
                done = nixl.transfer(transfer.handle) == "DONE"
            except Exception as error:  # noqa: BLE001  # NIXL raises classes of its own, one for each status
                # Some of it may be on its way: it is over when its state says so.
                transfer.failure = type(error).__name__
                done = False
            if done or self._is_over(transfer):
                self._end(transfer)
            else:
                self._running.append(transfer)
                self._moved.notify()
        return transfer

    def expect(self, until_s: float) -> None:
        """Look often until then, for what peers write."""
        with self._moved:
            self._hot_until_s = max(self._hot_until_s, until_s)
            self._moved.notify()

    def _drive(self) -> None:
        while True:
            with self._moved:
                with suppress(Exception):
                    # Nobody sends any; it is what makes progress.
                    self._nixl.get_new_notifs()
                self._running = [transfer for transfer in self._running if not self._is_ended(transfer)]
                hot = bool(self._running) or time.monotonic() < self._hot_until_s
                self._moved.wait(HOT_S if hot else IDLE_S)

    def _is_ended(self, transfer: Transfer) -> bool:
        if not self._is_over(transfer):
            return False
        self._end(transfer)
        return True

    def _is_over(self, transfer: Transfer) -> bool:
        try:
            state = self._nixl.check_xfer_state(transfer.handle)
        except Exception as error:  # noqa: BLE001  # likewise
            transfer.failure = transfer.failure or type(error).__name__
            return True
        if state == "PROC":
            return False
        if state != "DONE":
            transfer.failure = transfer.failure or str(state)
        return True

    def _end(self, transfer: Transfer) -> None:
        handle, transfer.handle = transfer.handle, None
        with suppress(Exception):
            self._nixl.release_xfer_handle(handle)
        transfer.over.set()
