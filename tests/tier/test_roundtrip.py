"""What is stored is found, and loaded as it was: by this engine and by others."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tier_bench import LIMIT_S, PAYLOAD_BYTES, SLOT_BYTES, Engine, Memory, Shop, identity, key, keys, payload

from kvstore_sdk.backend import Backend, Capabilities, ConfigError, Deadline, Get, Put, Region
from kvstore_sdk.format import verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, RecordingBackend
from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, Lookup, Tier, TierSettings
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]
HIT, MISS = Lookup.HIT, Lookup.MISS


@pytest.fixture(params=["memory", "fs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], RecordingBackend]:
    """Opens the same store again and again, each time as another process would."""
    if request.param == "fs":
        return lambda: RecordingBackend(open_fs(str(tmp_path / "kv")))
    return lambda: RecordingBackend(open_memory(f"roundtrip-{tmp_path}"))


def test_what_is_stored_is_found_and_loaded_also_by_another_engine(store: Callable[[], RecordingBackend], new_engine: NewEngine) -> None:
    """ATM-08: nothing about a record is kept in memory only."""
    some = keys(20) + keys(20, group=1)
    first = new_engine(store())
    result = first.store(some)
    assert (result.done, result.failed, result.skipped) == (tuple(some), (), ())
    assert result.moved_bytes == 20 * sum(PAYLOAD_BYTES.values())
    second = new_engine(store())
    for engine in (first, second):
        assert engine.ask([*some, key(99)]) == [HIT] * 40 + [MISS]
        result = engine.load(some)
        assert (result.done, result.failed) == (tuple(some), ())
        assert result.moved_bytes == 20 * sum(PAYLOAD_BYTES.values())
        assert all(engine.memory.holds(row, one) for row, one in enumerate(some))
        assert not engine.tier.busy
    assert not second.total("store_bytes")
    for engine in (first, second):
        engine.close()
        assert engine.backend.breaches == []


def test_records_are_what_the_format_says(new_engine: NewEngine) -> None:
    """Every byte of a record is decided by the chunk: nothing of the row's rest, of the staging memory or of the time is in it."""
    engine = new_engine()
    engine.store(keys(4))
    # The same slots have held other chunks before.
    engine.store(keys(4, start=10))
    shop = Shop(engine.backend)
    for one in (*keys(4), *keys(4, start=10)):
        record = shop.record(one)
        assert verify(memoryview(record), ChunkKey.from_engine(identity().namespace, one), "test-layout", PAYLOAD_BYTES[0]) is None
        assert record[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(one)
        assert not any(record[4096 + PAYLOAD_BYTES[0] :])


def test_equal_chunks_are_equal_records(new_engine: NewEngine) -> None:
    one, other = new_engine(), new_engine()
    for engine in (one, other):
        engine.store(random.Random(len(engine.results)).sample(keys(8), 8))
    assert [Shop(one.backend).record(each) for each in keys(8)] == [Shop(other.backend).record(each) for each in keys(8)]


def test_what_is_there_is_not_stored_again(new_engine: NewEngine) -> None:
    """ATM-08: zero writes for what another engine stored, and no call at all for what this one knows."""
    backend = RecordingBackend(open_memory(""))
    first = new_engine(backend)
    first.store(keys(4))
    assert first.store(keys(4)).done == tuple(keys(4))
    assert sum(len(call.names) for call in backend.calls if call.op == "put") == 5, "four records and a manifest"
    assert first.total("stores", "exists") == 4
    second = new_engine(RecordingBackend(backend.inner))
    assert second.store(keys(4)).done == tuple(keys(4))
    assert second.total("stores", "exists") == 4
    assert second.total("store_bytes") == 0
    assert second.ask(keys(4)) == [HIT] * 4


@pytest.mark.parametrize(("number", "calls"), [(1, 1), (64, 1), (65, 2), (200, 4)])
def test_a_request_is_asked_for_in_few_calls(new_engine: NewEngine, number: int, calls: int) -> None:
    """PERF-02: not one round trip for each chunk, and many chunks not by one thread alone."""
    backend = RecordingBackend(open_memory(""))
    engine = new_engine(backend, io_threads=4)
    assert engine.ask(keys(number)) == [MISS] * number
    asked = [call.names for call in backend.calls if call.op == "exists"]
    assert len(asked) == calls
    assert len({name for names in asked for name in names}) == sum(map(len, asked)) == number


def test_what_one_request_asks_is_not_asked_for_another_again(new_engine: NewEngine) -> None:
    backend = RecordingBackend(open_memory(""))
    engine = new_engine(backend)
    for request in "abc":
        for one in keys(10, start=ord(request)):
            engine.tier.lookup(request, one)
    engine.wait(lambda: len([call for call in backend.calls if call.op == "exists"]) == 3)
    assert sorted(len(call.names) for call in backend.calls if call.op == "exists") == [1, 1, 10]


def test_many_names_are_cut_into_what_the_backend_takes(new_engine: NewEngine) -> None:
    class Narrow(RecordingBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(max_record_bytes=1 << 20, max_batch=7, max_concurrency=3)

    backend = RecordingBackend(Narrow(open_memory("")))
    engine = new_engine(backend, io_threads=8, batch_records=64)
    engine.store(keys(40))
    assert engine.ask(keys(40), "r") == [HIT] * 40
    assert len(engine.load(keys(40)).done) == 40
    assert not backend.breaches
    assert backend.max_concurrency_seen <= 3


def test_as_many_threads_as_the_settings_say_reach_the_backend(new_engine: NewEngine) -> None:
    """CFG-08"""
    faulty = FaultyBackend(open_memory(""))
    backend = RecordingBackend(faulty)
    engine = new_engine(backend, io_threads=3, batch_records=1)
    engine.store(keys(30))
    for request in range(20):
        engine.tier.lookup(f"r{request}", key(100 + request))
    faulty.arm(Fault("*", Hang()))
    job = engine.submit_load(keys(30))
    engine.step()
    assert faulty.wait_hanging(3)
    faulty.heal()
    assert len(engine.result(job).done) == 30
    assert backend.max_concurrency_seen == 3
    assert len(engine.io_threads()) == 3


def test_look_ups_move_no_payload(new_engine: NewEngine) -> None:
    """PERF-03"""
    backend = RecordingBackend(open_memory(""))
    new_engine(backend, rows=1000, max_queued_store_bytes=1 << 30).store(keys(1000))
    watched = RecordingBackend(backend.inner)
    engine = new_engine(watched, rows=1)
    assert engine.ask(keys(1000)) == [HIT] * 1000
    assert {call.op for call in watched.calls} == {"exists"}


def test_a_look_up_is_pending_until_it_is_flushed_and_answered(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(1))
    other = new_engine(engine.backend)
    assert [other.tier.lookup("r", key(0)) for _ in range(3)] == [Lookup.PENDING] * 3
    assert other.ask([key(0)], "r") == [HIT]


def test_a_chunk_is_told_hit_as_often_as_the_settings_say(new_engine: NewEngine) -> None:
    engine = new_engine(max_hits_per_request=3)
    engine.store(keys(1))
    assert [engine.tier.lookup("r", key(0)) for _ in range(6)] == [HIT] * 3 + [MISS] * 3


def test_a_hit_is_asked_for_again_when_it_is_old_also_after_an_idle_time(new_engine: NewEngine) -> None:
    engine = new_engine(hit_ttl_s=2.0)
    engine.store(keys(1))
    assert engine.tier.lookup("r", key(0)) is HIT
    engine.tier.flush()
    time.sleep(2.1)
    # The first call of a step is a poll; no step was made in between.
    engine.tier.poll()
    assert engine.tier.lookup("s", key(0)) is Lookup.PENDING
    assert engine.ask([key(0)], "s") == [HIT]


def test_without_a_memory_of_hits_every_look_up_asks(new_engine: NewEngine) -> None:
    engine = new_engine(hit_ttl_s=0.0)
    engine.store(keys(1))
    for _ in range(3):
        assert engine.ask([key(0)]) == [HIT]
    assert engine.store(keys(1)).done == (key(0),)
    assert engine.total("stores", "exists") == 1


BAD_KEYS = {
    "empty": b"",
    "short": b"\0\0\0",
    "no hash": bytes(4),
    "too long": bytes(65 + 4),
    "far too long": bytes(5000),
    "unknown group": b"h" * 32 + (7).to_bytes(4, "big"),
    "largest group": b"h" * 32 + b"\xff" * 4,
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_that_no_chunk_has_is_a_miss_and_fails_alone(name: str, new_engine: NewEngine) -> None:
    """Nothing raises, and what it is together with is not touched by it."""
    backend = RecordingBackend(open_memory(""))
    engine = new_engine(backend)
    bad = BAD_KEYS[name]
    stored = engine.store([key(0), key(1)])
    assert stored.success
    job = engine.submit_store([key(2), bad, key(3)], generation=None)
    assert (engine.result(job).done, engine.result(job).failed) == ((key(2), key(3)), (bad,))
    assert engine.ask([key(0), bad, key(9)], "r") == [HIT, MISS, MISS]
    job = engine.submit_load([key(0), bad, key(1)])
    assert (engine.result(job).done, engine.result(job).failed) == ((key(0), key(1)), (bad,))
    assert engine.memory.is_painted(1)
    assert not backend.breaches
    assert engine.total("stores", "refused") == engine.total("loads", "refused") == 1


def test_the_shortest_and_the_longest_key_pass(new_engine: NewEngine) -> None:
    engine = new_engine(RecordingBackend(open_memory("")))
    some = [b"x" + bytes(4), bytes(range(64)) + bytes(4)]
    assert engine.store(some).success
    assert engine.load(some).success
    assert engine.backend.breaches == []


def test_a_chunk_of_zero_bytes_is_no_chunk(new_engine: NewEngine) -> None:
    class Empty(Memory):
        def payload_bytes(self, group: int) -> int | None:
            return 0 if group == 1 else super().payload_bytes(group)

    engine = new_engine(memory=Empty(4))
    result = engine.store([key(0), key(0, group=1)])
    assert (result.done, result.failed) == ((key(0),), (key(0, group=1),))


def test_a_chunk_longer_than_its_identity_says_is_no_chunk(new_engine: NewEngine) -> None:
    class Grown(Memory):
        def payload_bytes(self, group: int) -> int | None:
            return 1 << 20 if group == 1 else super().payload_bytes(group)

    engine = new_engine(memory=Grown(4))
    result = engine.store([key(0), key(0, group=1)])
    assert (result.done, result.failed) == ((key(0),), (key(0, group=1),))


def test_an_engine_memory_that_does_not_know_its_groups_costs_the_job_and_nothing_else(new_engine: NewEngine) -> None:
    """LIV-10"""

    class Broken(Memory):
        def payload_bytes(self, group: int) -> int | None:
            if group == 1:
                raise RuntimeError("no such group")
            return super().payload_bytes(group)

    engine = new_engine(memory=Broken(4))
    assert engine.store([key(0, group=1)]).failed == (key(0, group=1),)
    assert engine.store([key(0)]).success
    assert len(engine.io_threads()) == 4


def test_groups_have_records_of_their_own(new_engine: NewEngine) -> None:
    engine = new_engine()
    same_hash = [key(1, group=0), key(1, group=1)]
    engine.store(same_hash)
    assert engine.load(same_hash, rows=[5, 6]).success
    assert engine.memory.holds(5, same_hash[0])
    assert engine.memory.holds(6, same_hash[1])


def test_the_same_key_twice_in_a_job_is_done_twice(new_engine: NewEngine) -> None:
    backend = RecordingBackend(open_memory(""))
    engine = new_engine(backend, batch_records=8, io_threads=1)
    engine.memory.write(1, key(0))
    assert engine.store([key(0), key(0)]).done == (key(0), key(0))
    assert engine.load([key(0), key(0)], rows=[4, 5]).done == (key(0), key(0))
    assert engine.memory.holds(4, key(0))
    assert engine.memory.holds(5, key(0))
    assert not backend.breaches, "never twice in one call"


def test_two_jobs_may_store_the_same_key_at_once(new_engine: NewEngine) -> None:
    faulty = FaultyBackend(open_memory(""), [Fault("put", Hang(0.02))])
    engine = new_engine(RecordingBackend(faulty), batch_records=1)
    jobs = [engine.submit_store([key(0)], rows=[row]) for row in range(3)]
    assert all(engine.result(job).done == (key(0),) for job in jobs)
    assert engine.total("stores", "stored") == 1
    assert engine.total("stores", "exists") == 2
    assert engine.events() == [(key(0), False)]


def test_several_jobs_may_load_the_same_key_at_once(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(1))
    jobs = [engine.submit_load([key(0)], rows=[row]) for row in range(10, 15)]
    assert all(engine.result(job).success for job in jobs)
    assert all(engine.memory.holds(row, key(0)) for row in range(10, 15))


def test_a_row_that_a_load_writes_is_neither_stored_from_nor_loaded_into(new_engine: NewEngine) -> None:
    """RACE-04: also when a job that was refused came and went meanwhile."""
    faulty = FaultyBackend(open_memory(""))
    engine = new_engine(faulty)
    engine.store(keys(2))
    faulty.arm(Fault("get", Hang(), times=1))
    loading = engine.submit_load([key(0)], rows=[7])
    assert faulty.wait_hanging()
    for _ in range(2):
        assert engine.result(engine.submit_store([key(5)], rows=[7], generation=None)).failed == (key(5),)
        job = next(engine._jobs)
        engine.tier.submit_load(job, [key(1)], [7])
        assert engine.result(job).failed == (key(1),)
    faulty.heal()
    assert engine.result(loading).success
    assert engine.memory.holds(7, key(0))
    assert not Shop(faulty).has(key(5))
    assert engine.load([key(1)], rows=[7]).success


def test_a_row_that_is_stored_from_is_not_loaded_into_until_the_last_store_ended(new_engine: NewEngine) -> None:
    """RACE-04, RACE-03: what is stored under a key is what was in the row when the job was submitted."""
    faulty = FaultyBackend(open_memory(""))
    engine = new_engine(faulty, io_threads=2, batch_records=1)
    engine.store([key(9)], rows=[1])
    # One thread may store; while it hangs, a store waits that has not read its row yet.
    faulty.arm(Fault("put", Hang(), times=1))
    engine.submit_store([key(0)], rows=[2])
    assert faulty.wait_hanging()
    first = engine.submit_store([key(1)], rows=[3])
    second = engine.submit_store([key(1)], rows=[3], generation=None)
    job = next(engine._jobs)
    engine.tier.submit_load(job, [key(9)], [3])
    assert engine.result(job).failed == (key(9),)
    faulty.heal()
    assert engine.result(first).done == engine.result(second).done == (key(1),)
    assert Shop(faulty).record(key(1))[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(key(1))
    assert engine.load([key(9)], rows=[3]).success


def test_one_row_twice_in_a_load_is_refused_once(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(2))
    result = engine.load(keys(2), rows=[5, 5])
    assert (result.done, result.failed) == ((key(0),), (key(1),))
    assert engine.memory.holds(5, key(0))
    assert engine.load(keys(2), rows=[5, 6]).success


def test_a_job_without_chunks_ends(new_engine: NewEngine) -> None:
    engine = new_engine()
    assert engine.store([]).success
    assert engine.load([]).success
    assert not engine.tier.busy


def test_a_job_number_that_is_in_use_is_ignored(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyBackend(open_memory(""), [Fault("put", Hang(), times=1)])
    engine = new_engine(faulty)
    job = engine.submit_store([key(0)], rows=[0])
    assert faulty.wait_hanging()
    engine.tier.submit_load(job, [key(1)], [1])
    faulty.heal()
    assert engine.result(job).done == (key(0),)
    assert not engine.tier.busy
    assert f"job {job} was submitted twice" in caplog.text
    assert engine.load([key(0)], rows=[1]).success


def test_keys_and_rows_of_different_numbers_are_a_fault_of_the_caller(new_engine: NewEngine) -> None:
    engine = new_engine()
    for submit in (engine.tier.submit_store, engine.tier.submit_load):
        with pytest.raises(ValueError, match="job 1 has 2 keys and 1 rows"):
            submit(1, keys(2), [0])
    assert not engine.tier.busy
    assert engine.store(keys(2)).success


@pytest.mark.parametrize("read_only_backend", [False, True])
def test_what_may_not_be_stored_is_skipped_and_not_failed(read_only_backend: bool, new_engine: NewEngine, tmp_path: Path) -> None:
    shelf = f"skipped-{tmp_path}"
    new_engine(open_memory(shelf)).store(keys(2))

    class ReadOnly(RecordingBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(max_record_bytes=1 << 20, read_only=True)

    backend = ReadOnly(open_memory(shelf)) if read_only_backend else RecordingBackend(open_memory(shelf))
    engine = new_engine(backend, may_store=read_only_backend)
    result = engine.store(keys(4))
    assert (result.done, result.failed, result.skipped) == ((), (), tuple(keys(4)))
    assert result.success
    assert engine.total("stores", "skipped") == 4
    assert engine.load(keys(2)).success
    assert not any(call.op == "put" for call in backend.calls)


class Untouchable:
    """A backend that must not be called."""

    def __init__(self, **offers: Any) -> None:
        self.capabilities = Capabilities(**({"max_record_bytes": 1 << 30, "max_concurrency": 4} | offers))

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[Any]:
        raise AssertionError("was called")

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[Any]:
        raise AssertionError("was called")

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[Any]:
        raise AssertionError("was called")

    def close(self) -> None:
        raise AssertionError("was called")

    def register_region(self, region: Region) -> None:
        raise AssertionError("was called")

    def unregister_region(self, region: Region) -> None:
        raise AssertionError("was called")


def test_records_larger_than_the_backend_takes_are_found_before_anything_is_written() -> None:
    """INT-05: the error names both numbers."""
    backend = Untouchable(max_record_bytes=8192)
    with pytest.raises(ConfigError, match=r"tier small: max_record_bytes: .* 8192 bytes, this model's chunks need 12288"):
        Tier(backend, Memory(1), identity=identity(), settings=TierSettings(), name="small")


def test_staging_memory_for_less_than_two_records_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"staging_bytes: {2 * SLOT_BYTES - 1} does not hold two slots of {SLOT_BYTES} bytes"):
        Tier(Untouchable(), Memory(1), identity=identity(), settings=TierSettings(staging_bytes=2 * SLOT_BYTES - 1))


def test_names_longer_than_the_backend_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_name_bytes: the backend takes names of 60 bytes, chunks have names of 83 at least"):
        Tier(Untouchable(max_name_bytes=60), Memory(1), identity=identity())


def test_a_backend_that_answers_in_doubt_and_cannot_settle_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend: declares in_doubt but has no settle method"):
        Tier(Untouchable(in_doubt=True), Memory(1), identity=identity())


def test_two_slots_are_enough(new_engine: NewEngine) -> None:
    engine = new_engine(staging_bytes=2 * SLOT_BYTES)
    assert engine.store(keys(30)).success
    assert engine.load(keys(30)).success
    assert all(engine.memory.holds(row, key(row)) for row in range(30))


def test_names_of_longer_hashes_than_the_backend_takes_fail_alone(new_engine: NewEngine) -> None:
    class Short(RecordingBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(max_record_bytes=1 << 20, max_name_bytes=115)

    backend = RecordingBackend(Short(open_memory("")))
    engine = new_engine(backend)
    long = bytes(48) + bytes(4)
    result = engine.store([key(0), long])
    assert (result.done, result.failed) == ((key(0),), (long,))
    assert engine.ask([long]) == [MISS]
    assert not backend.breaches


class Announced(RecordingBackend):
    """A backend that wants to know its regions, and when it is told."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.told: list[tuple[str, int]] = []

    def register_region(self, region: Region) -> None:
        self.told.append(("register", region.size_bytes))

    def unregister_region(self, region: Region) -> None:
        assert not self.told_closed, "after close"
        self.told.append(("unregister", region.size_bytes))

    told_closed = False

    def close(self) -> None:
        self.told_closed = True
        super().close()


def test_the_region_is_announced_before_the_first_call_and_given_up_before_the_last(new_engine: NewEngine) -> None:
    backend = Announced(open_memory(""))
    engine = new_engine(backend)
    assert [what for what, _ in backend.told] == ["register"]
    engine.store(keys(3))
    engine.close()
    assert [what for what, _ in backend.told] == ["register", "unregister"]


def test_a_backend_that_cannot_register_the_region_is_not_started() -> None:
    class Refuses(Untouchable):
        def register_region(self, region: Region) -> None:
            raise OSError("no more pinned memory")

    with pytest.raises(OSError, match="pinned"):
        Tier(Refuses(), Memory(1), identity=identity(), name="refused")


def test_every_name_that_is_counted_is_declared_with_its_labels(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(6))
    engine.ask(keys(8))
    engine.load(keys(6))
    delta = engine.tier.metrics.take()
    for table, found in ((COUNTERS, delta.counters), (HISTOGRAMS, delta.observations), (GAUGES, delta.gauges)):
        assert found
        for name, labels in found:
            assert len(labels) == len(table[name].labels)
    # Only a backend in a child process, or one that counts, has the last two.
    assert {name for name, _ in delta.gauges} == set(GAUGES) - {"isolation_up", "backend_now"}
    assert {labels for name, labels in delta.gauges if name == "breaker_open"} == {("read",), ("write",)}
    assert delta.counters["stores", ("stored",)] == delta.counters["loads", ("loaded",)] == 6
    assert delta.counters["lookups", ("hit",)] == 6
    assert delta.counters["lookups", ("miss",)] == 2
    assert delta.counters["store_bytes", ()] == delta.counters["load_bytes", ()] == 6 * PAYLOAD_BYTES[0]
    assert len(delta.observations["store_seconds", ()]) == len(delta.observations["load_seconds", ()]) == 1
    assert {labels[0] for name, labels in delta.observations if name == "call_seconds"} == {"exists", "put", "get"}
    assert not engine.tier.metrics.take().counters
    assert engine.tier.metrics.gauge_value("known_keys") == 6
    assert engine.tier.metrics.gauge_value("open_jobs") == 0


def test_a_wrong_label_is_found_where_it_is_counted(new_engine: NewEngine) -> None:
    metrics = new_engine().tier.metrics
    with pytest.raises(ValueError, match="stores"):
        metrics.count("stores")
    with pytest.raises(ValueError, match="call_seconds"):
        metrics.observe("call_seconds", 1.0)
    with pytest.raises(KeyError):
        metrics.count("undeclared")
    with pytest.raises(ValueError, match="breaker_open"):
        metrics.gauge("breaker_open", lambda: 0.0)


def test_metrics_that_nobody_takes_do_not_grow_without_end(new_engine: NewEngine) -> None:
    metrics = new_engine().tier.metrics
    for _ in range(70_000):
        metrics.observe("load_seconds", -1.0)
    observed = metrics.take().observations["load_seconds", ()]
    assert len(observed) <= 65_536
    assert set(observed) == {0.0}


def test_the_first_key_that_is_loaded_does_not_wait_for_the_last(new_engine: NewEngine) -> None:
    """A job is spread over the threads: one slow record does not make the others wait in line."""
    slow = Shop(open_memory("")).name(key(3))
    faulty = FaultyBackend(open_memory(""), [Fault("get", Hang(), names=lambda name: name == slow)])
    engine = new_engine(RecordingBackend(faulty), batch_records=1)
    engine.store(keys(8))
    job = engine.submit_load(keys(8))
    engine.wait(lambda: engine.total("loads", "loaded") == 7)
    faulty.heal()
    assert engine.result(job).success


def test_memory_does_not_grow_with_the_jobs_that_have_ended(new_engine: NewEngine) -> None:
    """LEAK-03: neither with jobs whose deadlines are far away, nor with requests, keys, or what is counted."""
    stuck = Shop(open_memory("")).name(key(999))
    hanging, go_on = threading.Event(), threading.Event()

    class Stuck(BackendWrapper):
        """Keeps no book of its calls, as the other test tools do."""

        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            if op == "put" and items[0].name == stuck:
                hanging.set()
                go_on.wait(LIMIT_S)
            return proceed(items)

    engine = new_engine(Stuck(open_memory("")), store_timeout_s=86400.0, load_timeout_s=86400.0, max_known_keys=64, io_threads=3)
    # The first of all deadlines is that of a job that does not end.
    stuck_job = engine.submit_store([key(999)], rows=[63])
    assert hanging.wait(LIMIT_S)

    def rounds(count: int) -> int:
        for number in range(count):
            some = keys(4, start=4 * (number % 40))
            engine.store(some, generation=0)
            engine.ask(some)
            engine.load(some)
        # Looked at once a second.
        engine.wait(lambda: len(engine.tier._desk._deadlines) <= 64)
        engine.results.clear()
        engine.memory.copied.clear()
        engine.events()
        engine.tier.metrics.take()
        gc.collect()
        return sys.getallocatedblocks()

    rounds(80)
    before = rounds(20)
    grown = rounds(200) - before
    go_on.set()
    assert engine.result(stuck_job).success
    assert grown < 2000, "ten blocks a round are 2,000; a job is some thirty"
