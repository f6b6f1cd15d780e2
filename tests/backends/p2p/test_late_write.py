"""The owner's child stands still in the middle of a transfer, and goes on when the memory it writes to is used for something else."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from p2p_planes import LONG_S, MIB, Pair, is_gone, noise, state_of, stopped, target_of, unsent_bytes, until

from kvstore_sdk.backend import PutResult, PutStatus

pytestmark = [pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"), pytest.mark.timeout(300)]

COUNT = 32
SLOT = 4 * MIB
DOUBT = slice(COUNT * SLOT // 2, COUNT * SLOT)
"""The half of the asker's memory that the transfer goes to."""
PATTERN = bytes([0xA5])


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("tcp", COUNT * SLOT)
    pair.records.view[:] = noise(MIB, 1) * (COUNT * SLOT // MIB)
    yield pair
    pair.close()


class Sending:
    """A transfer into the slots in doubt, of which something has landed and most has not; the owner's child is stopped."""

    def __init__(self, pair: Pair) -> None:
        assert pair.works()
        assert pair.owner.pid is not None
        self._pair = pair
        self._results: list[PutResult] = []
        self._thread = threading.Thread(target=self._send)
        pair.slots.view[:] = bytes(COUNT * SLOT)
        with stopped(pair.asker.pid):
            self._thread.start()
            # Sockets take some MiB at most: it cannot end while the asker stands still.
            until(lambda: unsent_bytes(pair.owner.pid) > 0, "it is on its way")
            os.kill(pair.owner.pid, signal.SIGSTOP)
            until(lambda: state_of(pair.owner.pid) == "T", "the owner's child stands still")
        until(lambda: any(pair.slots.view[DOUBT]), "what was in the sockets has landed")
        assert not any(pair.slots.view[DOUBT.stop - SLOT : DOUBT.stop])

    def _send(self) -> None:
        self._results = self._pair.send(self._pair.pieces(COUNT // 2, SLOT, DOUBT.start))

    def go_on(self) -> set[PutStatus]:
        """Let the owner's child go on, until the transfer is over."""
        os.kill(self._pair.owner.pid or 0, signal.SIGCONT)
        self._thread.join(LONG_S)
        return {result.status for result in self._results}


def test_only_the_slots_in_doubt_change_when_the_owner_goes_on(pair: Pair) -> None:
    """All is filled, to show both: what quarantine is for, and that nothing else needs it."""
    sending = Sending(pair)
    pair.slots.view[:] = PATTERN * (COUNT * SLOT)
    assert sending.go_on() == {PutStatus.STORED}
    assert pair.slots.view[: DOUBT.start] == PATTERN * DOUBT.start
    assert pair.slots.view[DOUBT.stop - SLOT : DOUBT.stop] == pair.records.view[DOUBT.stop - SLOT : DOUBT.stop]


def test_after_a_fence_nothing_changes_when_the_owner_goes_on(pair: Pair) -> None:
    """All memory is used again as soon as the generation has changed, also by the child that maps it next."""
    sending = Sending(pair)
    pid, generation = pair.asker.pid, pair.asker.generation
    pair.asker.fence()
    until(lambda: pair.asker.generation != generation, "the generation changes")
    assert is_gone(pid)
    pair.slots.view[:] = PATTERN * (COUNT * SLOT)
    target_of(pair.asker)
    pair.asker.expect(time.monotonic() + LONG_S)
    assert sending.go_on() == {PutStatus.UNKNOWN}
    assert pair.slots.view == PATTERN * (COUNT * SLOT)
    pair.admit()
    assert pair.works()
