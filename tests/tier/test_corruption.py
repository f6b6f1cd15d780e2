"""Bytes that are not the record are never loaded: they are a miss, counted as what they are, and made good by the next store."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tier_bench import PAYLOAD_BYTES, Engine, Shop, identity, key, keys, payload

from kvstore_sdk.backend import Deadline, Get, GetResult, UnavailableError
from kvstore_sdk.format import Flaw, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, Raise, RecordingBackend, SwapRecords, WrongBytes, WrongSize
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier import loads as loads_module
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


RECORD = record_bytes(PAYLOAD_BYTES[0])


@pytest.fixture(params=["memory", "fs"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> RecordingBackend:
    return RecordingBackend(open_fs(str(tmp_path / "kv")) if request.param == "fs" else open_memory(""))


def sealed(one: bytes, *, namespace: str = "", layout: str = "test-layout", size: int = PAYLOAD_BYTES[0]) -> bytes:
    """An intact record of this key, under another namespace, in another layout, or of another length."""
    record = bytearray(record_bytes(size))
    record[4096 : 4096 + size] = (payload(one) * 10)[:size]
    seal(memoryview(record), ChunkKey.from_engine(namespace or identity().namespace, one), layout, size)
    return bytes(record)


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 0x10]) + record[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Flaw]] = {
    "a bit of the payload": (lambda record: flipped(record, 4096 + 1234), Flaw.PAYLOAD),
    "the last bit of the payload": (lambda record: flipped(record, 4096 + PAYLOAD_BYTES[0] - 1), Flaw.PAYLOAD),
    "a bit of the padding": (lambda record: flipped(record, RECORD - 1), Flaw.PAYLOAD),
    "a bit of the header": (lambda record: flipped(record, 20), Flaw.HEADER),
    "a bit of the header's rest": (lambda record: flipped(record, 2000), Flaw.HEADER),
    "zeros": (lambda record: bytes(len(record)), Flaw.HEADER),
    "a tail of zeros": (lambda record: record[:6000] + bytes(len(record) - 6000), Flaw.PAYLOAD),
    "cut": (lambda record: record[:8192], Flaw.LENGTH),
    "cut by a byte": (lambda record: record[:-1], Flaw.LENGTH),
    "longer": (lambda record: record + bytes(4096), Flaw.LENGTH),
    "another chunk's record": (lambda record: sealed(key(77)), Flaw.KEY),
    "another group's record": (lambda record: sealed(key(0)[:-1] + b"\1"), Flaw.KEY),
    "another namespace's record": (lambda record: sealed(key(0), namespace="f" * 32), Flaw.NAMESPACE),
    "a stale layout of the same length": (lambda record: sealed(key(0), layout="older-layout"), Flaw.LAYOUT),
    "another payload length": (lambda record: sealed(key(0), size=PAYLOAD_BYTES[0] + 5), Flaw.LENGTH),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_a_miss_and_is_made_good_by_the_next_store(
    damage: str, backend: RecordingBackend, new_engine: NewEngine
) -> None:
    """INT-01, KEY-03, KEY-04, OBS-04"""
    change, flaw = DAMAGES[damage]
    engine = new_engine(backend)
    engine.store(keys(4))
    shop = Shop(backend.inner)
    good = shop.record(key(0))
    shop.replace(key(0), change(good))
    assert engine.finds(key(0))
    result = engine.load(keys(4), rows=range(10, 14))
    assert (result.done, result.failed) == (tuple(keys(4)[1:]), (key(0),))
    assert engine.memory.spared(10), "not a byte of it came near the row"
    assert engine.total("loads", "corrupt") == engine.total("corrupt", flaw.value) == engine.total("corrupt") == 1
    reads = [call for call in backend.calls if call.op == "get" and shop.name(key(0)) in call.names]
    assert len(reads) == 2, "looked at a second time before it is called corrupt"
    # A miss for everybody, without asking: the record is there.
    asked = len(backend.calls)
    assert engine.ask([key(0)]) == [Lookup.MISS]
    assert len([call for call in backend.calls[asked:] if call.op == "exists"]) == 0
    assert engine.store([key(0)]).success
    assert engine.total("repairs") == engine.total("stores", "replaced") == 1
    assert shop.record(key(0)) == good
    assert engine.finds(key(0))
    assert engine.load([key(0)]).success
    events = engine.events()
    assert sorted(events[:4]) == sorted((one, False) for one in keys(4))
    assert events[4:] == [(key(0), True), (key(0), False)]
    assert not backend.breaches


def test_good_records_do_not_wait_for_a_second_look_at_a_bad_one(
    backend: RecordingBackend, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(backend, io_threads=1)
    engine.store(keys(4))
    engine.wait(lambda: engine.total("manifests"), "the manifest, which is looked for with a get too")
    shop = Shop(backend.inner)
    shop.replace(key(0), flipped(shop.record(key(0)), 4096 + 7))
    loaded: list[float] = []
    get = backend.inner.get

    def watched(gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        loaded.append(engine.total("loads", "loaded"))
        return get(gets, deadline)

    monkeypatch.setattr(backend.inner, "get", watched)
    assert engine.load(keys(4)).failed == (key(0),)
    assert loaded == [0, 3]


def test_two_records_that_changed_places_are_both_found(backend: RecordingBackend, new_engine: NewEngine) -> None:
    """INT-01: whole, intact, and of the right length, each in the other's place."""
    engine = new_engine(backend)
    engine.store(keys(2))
    shop = Shop(backend.inner)
    first, second = shop.record(key(0)), shop.record(key(1))
    shop.replace(key(0), second)
    shop.replace(key(1), first)
    assert engine.load(keys(2)).failed == tuple(keys(2))
    assert engine.total("corrupt", "key") == 2
    assert engine.store(keys(2)).success
    assert [shop.record(key(0)), shop.record(key(1))] == [first, second]


def test_a_directory_in_a_records_place_is_a_miss_and_is_replaced(tmp_path: Path, new_engine: NewEngine) -> None:
    """It is no record, and nothing says what it holds: counted as what it is, an answer that is no answer."""
    root = tmp_path / "kv"
    engine = new_engine(open_fs(str(root)))
    engine.store(keys(2))
    path = root / Shop(engine.backend).name(key(0))
    path.unlink()
    path.mkdir()
    result = engine.load(keys(2))
    assert (result.done, result.failed) == ((key(1),), (key(0),))
    assert engine.total("corrupt") == 0
    assert engine.total("call_failures", "get", "InvalidError") == 2
    assert engine.total("loads", "failed") == 1
    assert not engine.finds(key(0))
    assert engine.store([key(0)]).success
    assert path.is_file()
    assert engine.load([key(0)]).success
    assert engine.total("repairs") == 1


def test_a_record_that_vanished_is_a_miss(tmp_path: Path, new_engine: NewEngine) -> None:
    """ATM-10, OBS-04: removed behind the store between look-up and load."""
    root = tmp_path / "kv"
    engine = new_engine(open_fs(str(root)))
    engine.store(keys(3))
    assert engine.finds(key(0))
    os.unlink(root / Shop(engine.backend).name(key(0)))
    assert engine.load([key(0)]).failed == (key(0),)
    assert engine.total("loads", "missing") == 1
    assert not engine.finds(key(0))
    engine.load([key(0)])
    assert engine.events()[3:] == [(key(0), True)], "once"
    assert engine.store([key(0)]).success
    assert engine.load([key(0)]).success


def test_a_look_up_finds_that_a_record_vanished(tmp_path: Path, new_engine: NewEngine) -> None:
    """OBS-04: also when nobody loads it."""
    root = tmp_path / "kv"
    engine = new_engine(open_fs(str(root)), hit_ttl_s=0.0)
    engine.store(keys(2))
    engine.wait(lambda: engine.total("manifests") == 1)
    shutil.rmtree(root / "v1")
    assert engine.ask(keys(2)) == [Lookup.MISS] * 2
    assert engine.ask(keys(2)) == [Lookup.MISS] * 2
    assert sorted(engine.events()[-2:]) == sorted([(key(0), True), (key(1), True)])
    assert len(engine.events()) == 0


def test_events_are_stored_and_removed_once_each(tmp_path: Path, new_engine: NewEngine) -> None:
    """OBS-04: three are stored, one vanishes and is asked for twice at once, one is bad; what failed to be stored is no event."""
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, retries=0)
    engine.store(keys(3))
    shop = Shop(backend.inner)
    backend.inner.delete([shop.name(key(0))], None)  # type: ignore[attr-defined]
    shop.replace(key(1), bytes(RECORD))
    jobs = [engine.submit_load([key(number)], rows=[row]) for row, number in enumerate([0, 0, 1, 1])]
    for job in jobs:
        assert not engine.result(job).success
    backend.arm(Fault("put", Raise(UnavailableError)))
    assert not engine.store([key(9)]).success
    events = engine.events()
    assert sorted(events) == sorted([(one, False) for one in keys(3)] + [(key(0), True), (key(1), True)])
    assert [removed for _, removed in events] == [False] * 3 + [True] * 2


def test_an_engine_that_wants_no_events_keeps_none(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.tier._inbox._wants_events = False
    engine.store(keys(3))
    assert engine.tier.take_events() == []


def test_a_read_that_went_wrong_once_is_delivered_after_the_second(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend)
    engine.store(keys(2))
    engine.wait(engine.in_rest)
    for action in (WrongBytes(offset=5000), WrongBytes(offset=0, length=4096, flip=0xFF), WrongSize(-1)):
        backend.arm(Fault("get", action, times=1))
        assert engine.load(keys(2)).success
        assert all(engine.memory.holds(row, key(row)) for row in range(2))
    assert engine.total("unstable_reads") == 3
    assert engine.total("corrupt") == 0
    assert engine.finds(key(0))


def test_the_second_read_may_find_the_record_gone_or_the_store_down(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, retries=0)
    engine.store(keys(2))
    backend.arm(Fault("get", WrongBytes(offset=5000), times=1), Fault("get", Raise(), skip=1, times=1))
    assert engine.load([key(0)]).failed == (key(0),)
    assert engine.total("loads", "failed") == 1
    assert engine.total("corrupt") == 0
    # That says nothing about the record: it is not called bad.
    assert engine.finds(key(0))
    assert engine.load([key(0)]).success


def test_records_swapped_on_the_way_are_found(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend)
    engine.store(keys(2))
    shop = Shop(backend)
    backend.arm(Fault("get", SwapRecords(lambda name: shop.name(key(1))), names=lambda name: name == shop.name(key(0))))
    assert engine.load(keys(2)).failed == (key(0),)
    assert engine.total("corrupt", "key") == 1


def test_without_verification_wrong_bytes_are_loaded(new_engine: NewEngine) -> None:
    """The control of every test here: it is the verification that finds them."""
    engine = new_engine(verify=False)
    engine.store(keys(1))
    shop = Shop(engine.backend)
    shop.replace(key(0), flipped(shop.record(key(0)), 4096 + 10))
    assert engine.load([key(0)]).success
    assert not engine.memory.holds(0, key(0))
    assert engine.total("corrupt") == 0


def test_a_host_that_reads_nothing_right_leaves_the_shared_folder_alone(
    tmp_path: Path, new_engine: NewEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one record is removed or replaced; it stops reading and writing, says so, and tries again after a while."""
    root = tmp_path / "kv"
    other = new_engine(open_fs(str(root)))
    other.store(keys(60))
    other.wait(lambda: other.total("manifests") == 1)
    before = {path: path.read_bytes() for path in (root / "v1").rglob("*") if path.is_file()}
    assert len(before) == 61
    monkeypatch.setattr(loads_module, "_SUSPECT_MEMORY_S", 1000.0)
    backend = FaultyBackend(RecordingBackend(open_fs(str(root))), [Fault("get", WrongBytes(offset=4200))], seed=3)
    engine = new_engine(backend, batch_records=1)
    caplog.set_level(logging.ERROR)
    result = engine.load(keys(60))
    assert result.failed == tuple(keys(60))
    assert all(engine.memory.spared(row) for row in range(60))
    assert engine.tier.metrics.gauge_value("breaker_open", "read") == engine.tier.metrics.gauge_value("breaker_open", "write") == 1
    assert 8 <= engine.total("corrupt") <= 8 + engine.most_calls, "it stopped at eight; others were on their way"
    assert engine.total("loads", "refused") >= 60 - 8 - engine.most_calls
    assert engine.total("removals") == 0
    assert "most records read here fail verification" in caplog.text
    assert engine.ask(keys(3, start=20)) == [Lookup.MISS] * 3
    assert engine.store(keys(3)).failed == tuple(keys(3))
    assert {path: path.read_bytes() for path in (root / "v1").rglob("*") if path.is_file()} == before
    # Its memory is well again: after the pause it goes on.
    backend.heal()
    engine.period_passes()
    engine.wait(lambda: engine.finds(key(40)) and engine.load([key(40)]).success, "a load after the pause")


def test_bad_records_among_good_ones_are_removed_no_faster_than_one_for_eight(tmp_path: Path, new_engine: NewEngine) -> None:
    root = tmp_path / "kv"
    engine = new_engine(open_fs(str(root)), batch_records=1)
    engine.store(keys(40))
    shop = Shop(engine.backend)
    for number in range(5):
        shop.replace(key(number), bytes(RECORD))
    assert engine.load(keys(20, start=20), rows=range(20)).success
    for number in range(5):
        assert not engine.load([key(number)]).success
    assert engine.total("removals") == 2
    assert sum(shop.has(key(number)) for number in range(5)) == 3
    # Removed or not, each of them can be stored again.
    assert engine.store(keys(5)).success
    assert engine.load(keys(5)).success
    assert engine.total("stores", "replaced") == 3


def test_a_store_that_was_on_its_way_does_not_make_a_bad_record_good(new_engine: NewEngine) -> None:
    """It answers EXISTS, which says nothing about what exists; the next store replaces it."""
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend)
    engine.store([key(0)])
    shop = Shop(backend.inner)
    shop.replace(key(0), bytes(RECORD))
    other = new_engine(backend)
    backend.arm(Fault("put", Hang(), times=1))
    on_its_way = other.submit_store([key(0)], rows=[0])
    other.step()
    assert backend.wait_hanging()
    assert not other.load([key(0)], rows=[1]).success
    backend.heal()
    assert other.result(on_its_way).success
    assert other.total("stores", "exists") == 1
    assert not other.finds(key(0))
    assert other.store([key(0)]).success
    assert other.total("stores", "replaced") == 1
    assert verify(memoryview(shop.record(key(0))), ChunkKey.from_engine(identity().namespace, key(0)), "test-layout", 5000) is None
    assert other.finds(key(0))


def test_a_bad_record_stays_bad_whatever_else_goes_wrong_with_it(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, retries=0)
    engine.store([key(0)])
    Shop(backend.inner).replace(key(0), bytes(RECORD))
    engine.load([key(0)])
    backend.arm(Fault("get", Raise(), times=1))
    engine.load([key(0)])
    assert engine.store([key(0)]).success
    assert engine.total("stores", "replaced") == 1
    assert engine.load([key(0)]).success


def test_a_load_that_fails_is_asked_for_once_in_a_hundred_steps(new_engine: NewEngine) -> None:
    """LIV-01: the engine promotes what is a HIT; a corrupt chunk is one once."""
    engine = new_engine()
    engine.store([key(0)])
    Shop(engine.backend).replace(key(0), bytes(RECORD))
    loads = 0
    for _ in range(100):
        if engine.tier.lookup("r", key(0)) is Lookup.HIT:
            loads += 1
            assert not engine.load([key(0)]).success
        engine.step()
    assert loads == 1
    assert engine.tier.lookup("s", key(0)) is Lookup.MISS


@pytest.fixture
def manifest() -> bytes:
    return identity().manifest()


def name_of_manifest() -> str:
    return f"v1/{identity().namespace}/manifest.json"


def test_the_first_record_brings_the_manifest_and_no_other_does(manifest: bytes, new_engine: NewEngine) -> None:
    backend = RecordingBackend(open_memory(""))
    engine = new_engine(backend)
    engine.ask(keys(3))
    assert Shop(backend.inner).read(name_of_manifest(), len(manifest)) is None
    for number in range(5):
        engine.store(keys(4, start=10 * number))
    engine.wait(lambda: engine.total("manifests") == 1)
    assert Shop(backend.inner).read(name_of_manifest(), len(manifest)) == manifest
    assert len([call for call in backend.calls if name_of_manifest() in call.names]) == 2
    assert engine.total("manifests", "written") == 1
    other = new_engine(backend)
    other.store(keys(1, start=100))
    other.wait(lambda: other.total("manifests", "same") == 1)


@pytest.mark.parametrize("there", [b"{", b"x" * 4096, b"x" * 100_000], ids=["torn", "other", "longer"])
def test_a_manifest_that_is_torn_or_different_is_rewritten(there: bytes, manifest: bytes, new_engine: NewEngine) -> None:
    engine = new_engine()
    shop = Shop(engine.backend)
    shop.write(name_of_manifest(), there)
    assert engine.store(keys(2)).success
    engine.wait(lambda: engine.total("manifests", "rewritten") == 1)
    assert shop.read(name_of_manifest(), len(manifest)) == manifest


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_manifest_that_cannot_be_written_harms_nothing(operation: str, new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault(operation, Raise(), names=lambda name: name.endswith(".json"))])
    engine = new_engine(backend)
    assert engine.store(keys(4)).success
    engine.wait(lambda: engine.total("manifests") == 1)
    assert engine.load(keys(4)).success
    # A get that fails does not say that nothing is there; the put replaces what may be.
    assert engine.total("manifests", "rewritten" if operation == "get" else "failed") == 1
    assert engine.tier.metrics.gauge_value("breaker_open", "write") == 0


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_a_manifest_that_hangs_fails_no_job_and_its_thread_is_stood_in_for(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_sdk.tier.manifest._TIMEOUT_S", 0.1)
    backend = FaultyBackend(open_memory(""), [Fault("get", Hang(), names=lambda name: name.endswith(".json"))])
    engine = new_engine(backend)
    assert engine.store(keys(4)).success
    assert backend.wait_hanging()
    engine.wait(lambda: engine.total("abandoned_calls", "put") == 1)
    assert engine.load(keys(4)).success
    monkeypatch.setattr("kvstore_sdk.tier.manifest._TIMEOUT_S", 20.0)
    backend.heal()
    engine.wait(engine.all_slots_free)
    assert engine.total("manifests", "written") == 1
