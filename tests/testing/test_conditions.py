"""Stores that are full, torn or behind, and clocks that were set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline, DeleteStatus, GetResult, GetStatus, Mode, NoSpaceError, PutStatus, Region, SupportsRegions
from kvstore_sdk.testing import Action, BackendWrapper, Call, Fault, FaultyBackend, Hang, JumpClock, NoSpace, Raise, Stale, Torn

SOON = 20.0
Open = Callable[..., FaultyBackend]


@pytest.fixture
def faulty(inner: Any) -> Iterator[Open]:
    """Wrap the memory backend; the wrapper is closed afterwards, and no thread of it may be left."""
    opened = []

    def wrap(*script: Fault, below: Any = None) -> FaultyBackend:
        opened.append(FaultyBackend(below or inner, script))
        return opened[-1]

    yield wrap
    for backend in opened:
        backend.heal()
        backend.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-late")]


class Registering(BackendWrapper):
    """Knows the regions that are announced, and takes buffers of no other."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.regions: set[Region] = set()

    def register_region(self, region: Region) -> None:
        self.regions.add(region)

    def unregister_region(self, region: Region) -> None:
        self.regions.discard(region)

    def put(self, puts: Any, deadline: Deadline) -> Any:
        assert all(part.region in self.regions for put in puts for part in put.parts)
        return super().put(puts, deadline)


def test_a_torn_get_fills_the_beginning_and_leaves_the_rest(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Torn(5000), names="a".__eq__))
    bench.fill(0, bench.record("s"))
    result, seen = bench.fetch(backend, "a")
    assert (result, seen) == (GetResult(GetStatus.FOUND), bench.record("a")[:5000] + bench.record("s")[5000:])
    assert bench.fetch(backend, "b")[1] == bench.record("b")


def test_a_torn_put_stores_zeros_for_the_rest_and_leaves_the_buffer(faulty: Open, inner: Any, bench: Any) -> None:
    backend = faulty(Fault("put", Torn(100)))
    assert bench.store(backend, "new", bench.record("n")).status is PutStatus.STORED
    assert bench.read(15) == bench.record("n")
    assert bench.fetch(inner, "new")[1] == bench.record("n")[:100] + bytes(8092)


def test_where_a_record_is_torn_is_drawn(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("put", Torn()))
    lengths = set()
    for number in range(5):
        bench.store(backend, f"new-{number}", b"\xff" * 8192)
        lengths.add(bench.fetch(backend, f"new-{number}")[1].count(0xFF))
    assert len(lengths) > 1
    assert max(lengths) < 8192


def test_a_torn_get_of_a_missing_record_changes_nothing(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Torn()))
    bench.fill(0, bench.record("s"))
    assert bench.fetch(backend, "z") == (GetResult(GetStatus.MISSING), bench.record("s"))


def test_torn_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="length"):
        Torn(-1)


def test_a_stale_put_is_stored_at_once_and_seen_later(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("put", Stale(), names="new".__eq__))
    assert bench.store(backend, "new", bench.record("n")).status is PutStatus.STORED
    bench.fill(15, bench.record("reused"))
    assert backend.exists(["new"], Deadline.after(SOON)) == [False]
    backend.release()
    assert backend.wait_late(SOON)
    assert bench.fetch(backend, "new") == (GetResult(GetStatus.FOUND), bench.record("n"))


def test_a_stale_replacement_leaves_the_old_bytes_until_then(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("put", Stale(0.05)))
    bench.fill(1, bench.record("n"))
    [result] = backend.put([bench.put("a", 1, Mode.REPLACE)], Deadline.after(SOON))
    assert result.status is PutStatus.STORED
    assert backend.wait_late(SOON)
    assert bench.fetch(backend, "a")[1] == bench.record("n")


def test_a_stale_delete_leaves_the_record_until_then(faulty: Open) -> None:
    backend: Any = faulty(Fault("delete", Stale(), names="a".__eq__))
    assert backend.delete(["a", "b"], Deadline.after(SOON)) == [DeleteStatus.DELETED, DeleteStatus.DELETED]
    assert backend.exists(["a", "b"], Deadline.after(SOON)) == [True, False]
    backend.release()
    assert backend.wait_late(SOON)
    assert backend.exists(["a"], Deadline.after(SOON)) == [False]


def test_copies_are_announced_and_taken_back(faulty: Open, inner: Any, bench: Any) -> None:
    """Also when the store below raises."""
    below = Registering(FaultyBackend(inner, [Fault("put", Raise(OSError), names="bad".__eq__)]))
    assert isinstance(below, SupportsRegions)
    backend = faulty(Fault("put", Stale(0.0)), below=below)
    bench.store(backend, "new", bench.record("n"))
    bench.store(backend, "bad", bench.record("n"))
    assert backend.wait_late(SOON)
    assert below.regions == set()
    assert [type(error) for error in backend.late_errors] == [OSError]
    assert bench.fetch(backend, "new")[1] == bench.record("n")


def test_no_space_refuses_the_chosen_puts_and_does_the_others(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("put", NoSpace(), names="n2".__eq__))
    results = backend.put([bench.put("n1", 1), bench.put("n2", 2)], Deadline.after(SOON))
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.FAILED]
    assert isinstance(results[1].error, NoSpaceError)
    assert backend.exists(["n1", "n2"], Deadline.after(SOON)) == [True, False]


def test_no_space_as_it_is_raised_comes_in_the_middle_of_a_batch(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("put", NoSpace(raw=True), names="n2".__eq__))
    with pytest.raises(OSError, match="No space left"):
        backend.put([bench.put("n1", 1), bench.put("n2", 2), bench.put("n3", 3)], Deadline.after(SOON))
    assert backend.exists(["n1", "n2", "n3"], Deadline.after(SOON)) == [True, False, False]


class Times(Action):
    """Notes the wall clock of the call."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def run(self, call: Call, proceed: Any) -> Any:
        self.seen += [time.time(), time.time_ns() / 1e9]
        return proceed(call.items)


@pytest.mark.parametrize("seconds", [86400.0, -3600.0])
def test_the_clock_jumps_while_the_call_runs_and_no_longer(faulty: Open, seconds: float) -> None:
    real, times = time.time, Times()
    backend = faulty(Fault("exists", JumpClock(seconds)), Fault("exists", times))
    before_s = time.time()
    backend.exists(["a"], Deadline.after(SOON))
    assert all(0.0 <= seen - before_s - seconds < SOON for seen in times.seen)
    assert time.time is real


def test_the_clock_is_right_again_after_a_call_that_raises(faulty: Open) -> None:
    real = time.time
    with pytest.raises(OSError, match="injected"):
        faulty(Fault("exists", JumpClock(60.0)), Fault("exists", Raise(lambda: OSError("injected")))).exists(["a"], Deadline.after(SOON))
    assert time.time is real


def test_jumps_of_calls_at_the_same_time_add_up(faulty: Open) -> None:
    real, times = time.time, Times()
    backend = faulty(
        Fault("exists", JumpClock(1000.0)), Fault("exists", Hang(), names="a".__eq__), Fault("exists", times, names="b".__eq__)
    )
    call = threading.Thread(target=lambda: backend.exists(["a"], Deadline.after(SOON)), name="test-call")
    call.start()
    assert backend.wait_hanging(1, SOON)
    backend.exists(["b"], Deadline.after(SOON))
    assert all(1900.0 < seen - real() < 2100.0 for seen in times.seen)
    backend.release()
    call.join(SOON)
    assert time.time is real
