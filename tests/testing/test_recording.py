"""The recorder keeps what passes, and finds every way in which a caller can break the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_sdk.backend import Buffer, Capabilities, Deadline, Get, GetStatus, Mode, Put, PutStatus, Region
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, InDoubt, Raise, RecordingBackend

SOON = 30.0


class Strict:
    """A memory backend that offers little, and wants to know regions."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.capabilities = Capabilities(
            max_record_bytes=8192, max_batch=2, max_parts=2, align_bytes=4096, max_concurrency=1, max_name_bytes=8, in_doubt=True
        )
        self.exists, self.put, self.get, self.close = inner.exists, inner.put, inner.get, inner.close
        self.regions: list[Region] = []

    def register_region(self, region: Region) -> None:
        self.regions.append(region)

    def unregister_region(self, region: Region) -> None:
        self.regions.remove(region)


@pytest.fixture
def strict(inner: Any, bench: Any) -> RecordingBackend:
    backend = RecordingBackend(Strict(inner))
    backend.register_region(bench.region)
    return backend


def soon() -> Deadline:
    return Deadline.after(SOON)


def test_calls_are_kept_with_their_results(inner: Any, bench: Any) -> None:
    backend = RecordingBackend(inner)
    results = backend.get([bench.get("a", 0), bench.get("z", 1)], soon())
    backend.exists(["a"], soon())
    backend.list("", soon())
    get, exists, listing = backend.calls
    assert (get.op, get.names, get.sizes, get.results) == ("get", ("a", "z"), (8192, 8192), results)
    assert (exists.op, exists.names, exists.sizes, exists.results) == ("exists", ("a",), (), [True])
    assert [entry.name for entry in listing.results.entries] == list("abcd")
    assert get.thread == threading.current_thread().name
    assert get.started_s <= get.ended_s <= exists.started_s
    assert backend.breaches == []


def test_an_exception_is_kept_and_passed_on(inner: Any) -> None:
    backend = RecordingBackend(FaultyBackend(inner, [Fault("exists", Raise(SystemExit))]))
    with pytest.raises(SystemExit):
        backend.exists(["a"], soon())
    [call] = backend.calls
    assert isinstance(call.results, SystemExit)


def test_a_correct_caller_breaks_nothing(strict: RecordingBackend, bench: Any) -> None:
    strict.put([bench.put("n1", 1), bench.put("n2", 1)], soon())
    strict.get([bench.get("n1", 2), bench.get("n2", 3)], soon())
    strict.exists(["n1", "n2"], soon())
    strict.unregister_region(bench.region)
    assert strict.breaches == []
    assert strict.max_concurrency_seen == 1


def _part(region: Region, offset: int, length: int) -> tuple[Buffer, ...]:
    return (Buffer(region, offset, length),)


@pytest.mark.parametrize(
    ("call", "breach"),
    [
        (lambda b, r: b.exists(["a", "b", "c"], soon()), "exists: 3 items, max_batch is 2"),
        (lambda b, r: b.exists(["a", "a"], soon()), "exists a: twice in one call"),
        (lambda b, r: b.exists(["../a"], soon()), "exists ../a: not a valid name of at most 8 bytes"),
        (lambda b, r: b.exists(["a" * 9], soon()), "exists aaaaaaaaa: not a valid name of at most 8 bytes"),
        (lambda b, r: b.put([Put("a", _part(r, 0, 0) * 3)], soon()), "put a: 3 parts, max_parts is 2"),
        (lambda b, r: b.put([Put("n", _part(r, 0, 12288))], soon()), "put n: 12288 bytes, max_record_bytes is 8192"),
        (lambda b, r: b.put([Put("n", _part(r, 8, 4096))], soon()), "[8, 4104) of region {region} is not aligned to 4096 bytes"),
        (lambda b, r: b.put([Put("n", _part(r, 0, 100))], soon()), "[0, 100) of region {region} is not aligned to 4096 bytes"),
        (lambda b, r: b.put([Put("n", _part(r, r.size_bytes, 4096))], soon()), "lies outside it"),
        (lambda b, r: b.get([Get("a", _part(r, 0, 8192)), Get("b", _part(r, 4096, 8192))], soon()), "get b: its memory is in use by get a"),
        (lambda b, r: b.register_region(r), "is registered already"),
    ],
)
def test_what_the_contract_forbids_is_a_breach(
    strict: RecordingBackend, bench: Any, call: Callable[[Any, Region], object], breach: str
) -> None:
    call(strict, bench.region)
    assert strict.breaches
    assert all(breach.format(region=bench.region.id) in line for line in strict.breaches)


def test_a_region_that_was_never_announced_is_a_breach(strict: RecordingBackend) -> None:
    other = Region(8192)
    strict.put([Put("n", (other.buffer(0, 8192),))], soon())
    assert strict.breaches == [f"put n: buffer [0, 8192) of region {other.id}, which is not registered"]
    other.close()


def test_a_region_that_was_taken_back_is_a_breach(strict: RecordingBackend, bench: Any) -> None:
    strict.unregister_region(bench.region)
    strict.get([bench.get("a")], soon())
    assert len(strict.breaches) == 1


def test_more_calls_than_offered_and_shared_memory_are_breaches(inner: Any, bench: Any) -> None:
    """Two reads at a time into one buffer, of a backend that takes one call at a time."""
    faulty = FaultyBackend(Strict(inner), [Fault("get", Hang())])
    backend = RecordingBackend(faulty)
    backend.register_region(bench.region)
    threads = []
    for waiting, name in enumerate("ab", 1):
        threads.append(threading.Thread(target=backend.get, args=([bench.get(name)], soon()), name=f"test-{name}"))
        threads[-1].start()
        assert faulty.wait_hanging(waiting)
    backend.unregister_region(bench.region)
    faulty.release()
    for thread in threads:
        thread.join(SOON)
    faulty.close()
    assert backend.max_concurrency_seen == 2
    assert backend.breaches == [
        "get: 2 calls at a time, max_concurrency is 1",
        "get b: its memory is in use by get a",
        *[line for line in backend.breaches if line.startswith("unregister_region")],
    ]
    assert sorted(line.split()[-1] for line in backend.breaches[2:]) == ["a", "b"]


def test_memory_in_doubt_is_in_use_until_it_is_settled(inner: Any, bench: Any) -> None:
    faulty = FaultyBackend(inner, [Fault("*", InDoubt(), names=lambda name: name in ("a", "new"))])
    backend = RecordingBackend(faulty)
    [doubt] = backend.get([bench.get("a", 0)], soon())
    assert doubt.status is GetStatus.IN_DOUBT
    backend.get([bench.get("b", 1)], soon())
    assert backend.breaches == []
    backend.get([bench.get("b", 0)], soon())
    assert backend.breaches == ["get b: its memory is in use by get a"]
    assert backend.settle([doubt.ticket], Deadline.after(0.01)) == [False]
    backend.get([bench.get("c", 0)], soon())
    assert backend.breaches[1:] == ["get c: its memory is in use by get a"]
    faulty.release()
    assert backend.settle([doubt.ticket], soon()) == [True]
    backend.get([bench.get("b", 0)], soon())
    assert len(backend.breaches) == 2

    [put] = backend.put([bench.put("new", 3, Mode.REPLACE)], soon())
    assert put.status is PutStatus.IN_DOUBT
    backend.put([bench.put("other", 3)], soon())
    assert len(backend.breaches) == 2, "two may read"
    backend.get([bench.get("b", 3)], soon())
    assert backend.breaches[2:] == ["get b: its memory is in use by put new"]
    faulty.close()


def test_a_ticket_out_of_nowhere_is_a_breach(inner: Any) -> None:
    faulty = FaultyBackend(inner, [Fault("get", InDoubt())])
    backend = RecordingBackend(faulty)
    with pytest.raises(AttributeError):
        backend.settle(["mine"], Deadline.after(0.01))
    assert backend.breaches == ["settle: 'mine' was never given out"]
    faulty.close()


def test_what_is_kept_is_bounded(inner: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak must not fill the memory: the last calls and tickets are kept, and the first breaches."""
    monkeypatch.setattr("kvstore_sdk.testing.recording.MAX_CALLS", 2)
    monkeypatch.setattr("kvstore_sdk.testing.recording.MAX_BREACHES", 2)
    faulty = FaultyBackend(inner, [Fault("get", InDoubt())])
    backend = RecordingBackend(faulty)
    given = [backend.get([bench.get("a", slot)], soon())[0].ticket for slot in range(3)]
    faulty.release()
    assert backend.settle(given, soon()) == [True] * 3, "what is in doubt may be asked about, however old it is"
    assert backend.breaches == []
    for number in range(3):
        backend.exists([f"/{number}"], soon())
    assert backend.breaches == [f"exists /{number}: not a valid name of at most 255 bytes" for number in range(2)]
    assert len(backend.calls) == 2
    assert len(backend._tickets) == 2
    backend.close()
