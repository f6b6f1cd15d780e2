"""Drain, reset and close: bounded, complete, and nothing of before is served after."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_bench import LIMIT_S, PAYLOAD_BYTES, Engine, Shop, identity, key, keys, payload

from kvstore_sdk.backend import PutResult, Region, ThrottledError
from kvstore_sdk.identity import salt_digest
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, InDoubt, Raise, RecordingBackend, Say
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


def faulty(*script: Fault) -> FaultyBackend:
    return FaultyBackend(open_memory(""), script)


# Drain.


def test_drain_waits_until_jobs_have_ended_although_nobody_polls(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Hang(0.01)))
    engine = new_engine(backend, batch_records=1, drain_timeout_s=LIMIT_S)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(20)]
    engine.tier.drain()
    results = engine.tier.poll()
    assert [result.job_id for result in sorted(results, key=lambda result: result.job_id)] == jobs
    assert all(result.success for result in results)
    assert not engine.tier.busy


def test_after_a_drain_every_result_is_ready_however_slow_the_threads_are(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """T15: the engine asserts it, in the very next line."""
    engine = new_engine(drain_timeout_s=LIMIT_S)
    count = engine.tier.metrics.count

    def slow(name: str, *labels: str, by: float = 1) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)
        count(name, *labels, by=by)

    monkeypatch.setattr(engine.tier.metrics, "count", slow)
    for number in range(20):
        job = engine.submit_store([key(number)], rows=[number])
        engine.tier.drain()
        assert [result.job_id for result in engine.tier.poll()] == [job]
        assert not engine.tier.busy


def test_drain_is_bounded_and_afterwards_nothing_touches_a_row(new_engine: NewEngine) -> None:
    """T15, T16: every result is ready, also of what hangs, and what still runs has no way to the engine's memory."""
    backend = faulty()
    engine = new_engine(backend, batch_records=1, drain_timeout_s=0.3, load_timeout_s=10 * LIMIT_S, store_timeout_s=10 * LIMIT_S)
    engine.store(keys(8))
    backend.arm(Fault("get", Hang()), Fault("put", Hang()))
    jobs = [engine.submit_load([key(number)], rows=[number]) for number in range(8)]
    jobs += [engine.submit_store([key(20 + number)], rows=[20 + number]) for number in range(8)]
    began_s = time.monotonic()
    engine.tier.drain()
    assert 0.3 <= time.monotonic() - began_s < LIMIT_S
    assert sorted(result.job_id for result in engine.tier.poll()) == jobs
    for row in range(8):
        engine.memory.paint(row, 0xEE)
    for row in range(20, 28):
        engine.memory.paint(row, 0xFF)
    backend.heal()
    engine.wait(lambda: engine.tier._work.is_untouched)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(8))
    for number in range(8):
        if Shop(backend).has(key(20 + number)):
            assert Shop(backend).record(key(20 + number))[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(key(20 + number))


def test_drain_of_nothing_takes_no_time(new_engine: NewEngine) -> None:
    engine = new_engine(drain_timeout_s=2 * LIMIT_S)
    began_s = time.monotonic()
    engine.tier.drain()
    assert time.monotonic() - began_s < LIMIT_S


def test_drain_waits_for_retries(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Raise(), times=2))
    engine = new_engine(backend, drain_timeout_s=LIMIT_S, retry_base_s=0.02)
    engine.submit_store([key(0)])
    engine.tier.drain()
    [result] = engine.tier.poll()
    assert result.success


# Reset.


def test_after_a_reset_nothing_stored_before_is_served(new_engine: NewEngine) -> None:
    """CFG-12, KEY-12: not by this engine; the records stay for others."""
    engine = new_engine()
    engine.store(keys(10))
    assert engine.ask(keys(3), "waits") == [HIT] * 3
    before = engine.tier.identity.namespace
    engine.tier.reset()
    assert engine.tier.identity.namespace != before
    assert engine.ask(keys(10)) == [MISS] * 10
    assert engine.ask(keys(3), "waits") == [MISS] * 3
    assert engine.load(keys(10)).failed == tuple(keys(10))
    assert engine.store(keys(10), generation=1).success
    assert engine.load(keys(10)).success
    assert all(engine.memory.holds(row, key(row), generation=1) for row in range(10))
    # Another engine that was not reset has what was there.
    other = new_engine(engine.backend)
    assert other.load(keys(10)).success
    assert all(other.memory.holds(row, key(row)) for row in range(10))


def test_two_engines_that_reset_never_share(new_engine: NewEngine) -> None:
    backend = open_memory("")
    engines = [new_engine(backend) for _ in range(3)]
    for engine in engines:
        for _ in range(3):
            engine.tier.reset()
    assert len({engine.tier.identity.namespace for engine in engines}) == 3
    engines[0].store(keys(3), generation=1)
    assert engines[1].ask(keys(3)) == [MISS] * 3


def test_engines_that_name_their_weights_share_again(new_engine: NewEngine) -> None:
    """KEY-01: also with one that began with these weights."""
    backend = open_memory("")
    first, second, third = new_engine(backend), new_engine(backend), new_engine(backend, of=identity(weights="w1"))
    first.store(keys(2))
    first.tier.reset()
    for engine in (first, second):
        engine.tier.reset("w1")
    first.store(keys(3), generation=1)
    for engine in (second, third):
        assert engine.ask(keys(3)) == [HIT] * 3
        assert engine.load(keys(3)).success
        assert all(engine.memory.holds(row, key(row), generation=1) for row in range(3))
    second.tier.reset("w0")
    assert second.load(keys(2)).success
    assert second.memory.holds(0, key(0), generation=0)


def test_a_reset_keeps_a_private_namespace_private(new_engine: NewEngine) -> None:
    backend = open_memory("")
    engines = [new_engine(backend, of=identity(private=salt_digest(str(number))[:32])) for number in range(2)]
    for engine in engines:
        engine.tier.reset("w1")
    engines[0].store(keys(2))
    assert engines[1].ask(keys(2)) == [MISS] * 2


def test_a_store_in_flight_during_a_reset_appears_under_the_old_name_only(new_engine: NewEngine) -> None:
    """CFG-12: a put that was in flight must not reappear."""
    backend = faulty(Fault("put", Hang(), times=1))
    engine = new_engine(backend, io_threads=2, batch_records=1, drain_timeout_s=0.2, store_timeout_s=LIMIT_S)
    in_flight = engine.submit_store([key(0)], rows=[0])
    waiting = engine.submit_store([key(1)], rows=[1])
    assert backend.wait_hanging()
    old = Shop(backend, engine.tier.identity)
    engine.tier.reset()
    assert engine.result(in_flight).failed == (key(0),)
    assert engine.result(waiting).failed == (key(1),)
    backend.heal()
    engine.wait(lambda: engine.tier._work.is_untouched)
    engine.steps(0.05)
    assert engine.ask(keys(2)) == [MISS] * 2
    new = Shop(backend, engine.tier.identity)
    assert [new.has(one) for one in keys(2)] == [False, False]
    assert [old.has(one) for one in keys(2)] == [True, False]
    assert engine.events() == [], "what is told of the old name is news of nothing"
    engine.store(keys(1), generation=1)
    assert new.record(key(0))[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(key(0), 1)


def test_a_retry_that_waits_during_a_reset_is_not_stored_under_the_new_name(new_engine: NewEngine) -> None:
    """CFG-12"""
    backend = faulty(Fault("put", Say(PutResult.failed(ThrottledError("later", retry_after_s=3.0))), times=1))
    engine = new_engine(backend, drain_timeout_s=0.1)
    job = engine.submit_store([key(0)], rows=[0])
    engine.wait(lambda: engine.total("retries", "put") == 1)
    engine.tier.reset()
    assert not engine.result(job).success
    engine.steps(3.2)
    assert not Shop(backend, engine.tier.identity).has(key(0))
    assert not engine.tier._work._later


def test_a_look_up_in_the_very_step_of_a_reset_is_a_miss(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend)
    engine.store(keys(3))
    other = new_engine(backend, lookup_timeout_s=LIMIT_S)
    # Not flushed yet, sent and hanging, and told.
    backend.arm(Fault("exists", Hang(), times=1))
    assert other.tier.lookup("r", key(0)) is PENDING
    other.tier.flush()
    assert backend.wait_hanging()
    assert other.tier.lookup("r", key(1)) is PENDING
    other.tier.reset()
    assert [other.tier.lookup("r", one) for one in keys(2)] == [MISS] * 2
    backend.heal()
    other.steps(0.05)
    # The answer that came late belongs to the old name.
    assert other.ask(keys(3)) == [MISS] * 3
    assert other.tier._table.pending == 0


def test_questions_that_wait_are_not_asked_under_the_new_name(new_engine: NewEngine) -> None:
    backend = faulty(Fault("exists", Hang(), times=2))
    engine = new_engine(backend, io_threads=2, lookup_timeout_s=LIMIT_S)
    for number in range(6):
        engine.tier.lookup(f"r{number}", key(number))
        engine.tier.flush()
    assert backend.wait_hanging(2)
    engine.tier.reset()
    backend.heal()
    engine.wait(lambda: engine.tier._work.is_untouched)
    assert len(backend.log) == 2
    assert engine.tier._table.pending == 0


def test_a_reset_with_a_store_that_hangs_is_bounded(new_engine: NewEngine) -> None:
    """T16"""
    backend = faulty(Fault("*", Hang()))
    engine = new_engine(backend, drain_timeout_s=0.2, store_timeout_s=10 * LIMIT_S, load_timeout_s=10 * LIMIT_S)
    jobs = [engine.submit_store(keys(5)), engine.submit_load(keys(5, start=10), rows=range(10, 15))]
    began_s = time.monotonic()
    engine.tier.reset()
    assert time.monotonic() - began_s < LIMIT_S
    assert sorted(result.job_id for result in engine.tier.poll()) == jobs


def test_a_reset_does_not_wait_for_what_has_not_begun(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Hang()))
    engine = new_engine(backend, batch_records=1, drain_timeout_s=2 * LIMIT_S, store_timeout_s=LIMIT_S)
    job = engine.submit_store(keys(48))
    assert backend.wait_hanging(3)

    def go_on_when_the_rest_is_given_up() -> None:
        until_s = time.monotonic() + LIMIT_S
        while engine.tier._work.queued_store_bytes and time.monotonic() < until_s:
            time.sleep(0.001)
        backend.heal()

    healing = threading.Thread(target=go_on_when_the_rest_is_given_up)
    healing.start()
    engine.tier.reset()
    healing.join(LIMIT_S)
    assert len(engine.result(job).failed) >= 40
    assert engine.total("stores", "shed") >= 40


def test_each_namespace_has_its_manifest(new_engine: NewEngine) -> None:
    engine = new_engine()
    for weights in ("", "w1", "w" * 3000, ""):
        engine.tier.reset(weights)
        assert engine.store(keys(2)).success
        manifest = engine.tier.identity.manifest()
        engine.wait(lambda: engine.total("manifests", "written") + engine.total("manifests", "failed") > 0)
        engine.wait(lambda: engine.tier._work.is_untouched)
        found = Shop(engine.backend).read(f"v1/{engine.tier.identity.namespace}/manifest.json", len(manifest))
        assert found == manifest


# Close.


def test_close_is_idempotent_and_poll_still_delivers(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend, close_timeout_s=0.5)
    engine.store(keys(2))
    backend.arm(Fault("put", Hang(), times=1))
    jobs = [engine.submit_store(keys(2, start=10)), engine.submit_load(keys(2), rows=[5, 6])]
    engine.tier.close()
    engine.tier.close()
    assert sorted(result.job_id for result in engine.tier.poll()) == jobs
    assert engine.tier.poll() == []
    assert not engine.tier.busy


def test_after_close_everything_is_a_miss_or_fails_at_once(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(2))
    waits = engine.tier.lookup("r", key(9))
    assert waits is PENDING
    engine.tier.close()
    assert [engine.tier.lookup("r", one) for one in (key(0), key(9), key(10))] == [MISS] * 3
    assert engine.load(keys(2)).failed == tuple(keys(2))
    assert engine.store(keys(2)).failed == tuple(keys(2))
    engine.tier.flush()
    engine.tier.drain()
    engine.tier.reset()
    assert engine.tier.lookup("r", key(0)) is MISS
    engine.tier.end_request("r")
    engine.tier.take_events()
    engine.tier.metrics.take()
    assert not engine.tier.busy


def test_no_thread_survives_a_close(new_engine: NewEngine, tmp_path: Path) -> None:
    """LEAK-06: over each backend, in use until the last moment."""
    for backend in (open_memory(""), open_fs(str(tmp_path / "kv"))):
        engine = new_engine(backend, name="closing", close_timeout_s=LIMIT_S)
        engine.store(keys(10))
        engine.submit_store(keys(30, start=50), rows=range(30))
        engine.submit_load(keys(10), rows=range(30, 40))
        engine.tier.lookup("r", key(1000))
        engine.tier.flush()
        engine.tier.close()
        assert not engine.io_threads()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("closing")]


def test_close_waits_for_puts_that_run_and_what_they_store_is_what_was_submitted(new_engine: NewEngine, tmp_path: Path) -> None:
    """LEAK-06: writing to the rows after close changes nothing that is stored."""
    backend = FaultyBackend(open_memory(f"closed-{tmp_path}"), [Fault("put", Hang())])
    engine = new_engine(backend, io_threads=8, batch_records=1, close_timeout_s=LIMIT_S)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(8)]
    assert backend.wait_hanging(6)
    shop = Shop(open_memory(f"closed-{tmp_path}"))
    timer = threading.Timer(0.3, backend.heal)
    timer.start()
    engine.tier.close()
    timer.join()
    for row in range(8):
        engine.memory.paint(row, 0xFF)
    assert sorted(result.job_id for result in engine.tier.poll()) == jobs
    stored = [one for one in keys(8) if shop.has(one)]
    assert len(stored) >= 6
    assert all(shop.record(one)[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(one) for one in stored)


def test_close_during_calls_that_hang_is_bounded_and_keeps_their_memory(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """LIV-07, LEAK-06"""
    backend = faulty()
    engine = new_engine(backend, batch_records=1, close_timeout_s=0.4, load_timeout_s=10 * LIMIT_S)
    engine.store(keys(8))
    # It does not even let go of them when it is closed.
    backend.arm(Fault("*", Hang(after=True)), Fault("close", Hang()))
    engine.submit_load(keys(8))
    engine.tier.lookup("r", key(99))
    engine.tier.flush()
    assert backend.wait_hanging(4)
    region = weakref.ref(engine.region)
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < LIMIT_S
    assert "closed, while these threads did not return: test-io-1, test-io-2, test-io-3, test-io-4, test-close" in caplog.text
    assert "the memory of records stays mapped" in caplog.text
    kept = region()
    assert kept is not None
    assert len(kept.view) > 0, "not unmapped"
    for row in range(8):
        engine.memory.paint(row, 0xEE)
    backend.heal()
    for thread in engine.io_threads():
        thread.join(LIMIT_S)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(8))


def test_close_with_transfers_in_doubt_keeps_their_memory_mapped(caplog: pytest.LogCaptureFixture) -> None:
    """The peer may write after everybody has forgotten the tier: that memory must not become somebody else's."""
    backend = faulty(Fault("get", InDoubt(), times=0), Fault("settle", Raise(RuntimeError)))
    engine = Engine(backend, close_timeout_s=0.3)
    engine.store(keys(2))
    backend.arm(Fault("get", InDoubt()))
    engine.load(keys(2))
    region: weakref.ref[Region] = weakref.ref(engine.region)
    address = engine.region.address
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < LIMIT_S
    assert not engine.io_threads()
    # "transfers are in doubt"; or a thread too, where the machine stood still at the end.
    assert "closed, while" in caplog.text
    assert "the memory of records stays mapped" in caplog.text
    del engine
    gc.collect()
    kept = region()
    assert kept is not None
    assert kept.address == address
    kept.view[0] = 7
    backend.heal()


def test_close_waits_for_transfers_that_are_settled_in_time(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend, close_timeout_s=LIMIT_S)
    engine.store(keys(2))
    backend.arm(Fault("get", InDoubt(0.3)))
    engine.load(keys(2))
    region = engine.region
    engine.tier.close()
    assert "stays mapped" not in caplog.text
    with pytest.raises(ValueError, match="released"):
        region.view[0]


def test_the_memory_is_given_back_when_nothing_uses_it(new_engine: NewEngine) -> None:
    """Also when calls came back only while the tier was closing."""
    backend = faulty()
    engine = new_engine(backend, close_timeout_s=LIMIT_S)
    engine.store(keys(1))
    backend.arm(Fault("get", Hang()))
    engine.submit_load([key(0)], rows=[3])
    assert backend.wait_hanging()
    timer = threading.Timer(1.3, backend.heal)
    timer.start()
    region = engine.region
    engine.tier.close()
    timer.join()
    with pytest.raises(ValueError, match="released"):
        region.view[0]


class Unregistered(RecordingBackend):
    """Says when its region is given up."""

    unregistered = 0

    def register_region(self, region: Region) -> None:
        pass

    def unregister_region(self, region: Region) -> None:
        self.unregistered += 1


def test_the_region_is_not_given_up_while_a_call_may_use_it(new_engine: NewEngine) -> None:
    backend = faulty()
    watched = Unregistered(backend)
    engine = new_engine(watched, close_timeout_s=0.2, load_timeout_s=LIMIT_S)
    engine.store(keys(1))
    backend.arm(Fault("get", Hang()))
    engine.submit_load([key(0)])
    assert backend.wait_hanging()
    engine.tier.close()
    assert watched.unregistered == 0
    backend.heal()
    for thread in engine.io_threads():
        thread.join(LIMIT_S)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_backend_that_cannot_be_closed_is_left(
    error: type[BaseException], new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """LEAK-06, T17: close never raises."""
    engine = new_engine(faulty(Fault("close", Raise(error), times=1)))
    engine.store(keys(2))
    engine.tier.close()
    assert "closing the backend failed" in caplog.text


def test_a_backend_whose_close_hangs_is_left_in_time(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    backend = faulty(Fault("close", Hang()))
    engine = new_engine(backend, close_timeout_s=0.3)
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < LIMIT_S
    assert "these threads did not return: test-close" in caplog.text
    backend.heal()


def test_a_tier_is_closed_by_the_thread_of_another(new_engine: NewEngine) -> None:
    """One engine thread at a time, whichever it is."""
    engine = new_engine()
    engine.store(keys(2))
    other = threading.Thread(target=engine.tier.close)
    other.start()
    other.join(LIMIT_S)
    assert not engine.io_threads()


def test_threads_that_cannot_be_started_are_done_without(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is the operator's; `poll` does not raise for it."""
    backend = faulty()
    engine = new_engine(backend, io_threads=2, batch_records=1)
    engine.store(keys(4))
    backend.arm(Fault("get", Hang(), times=1))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    engine.set_timeouts(load_timeout_s=0.1)
    assert not engine.load([key(0)]).success
    engine.set_timeouts(load_timeout_s=LIMIT_S)
    engine.wait(lambda: engine.total("abandoned_calls") == 1)
    assert engine.load(keys(3, start=1)).success
    monkeypatch.setattr(threading.Thread, "start", start)
    backend.heal()
    engine.wait(engine.all_slots_free)
    assert len(engine.io_threads()) == 2
