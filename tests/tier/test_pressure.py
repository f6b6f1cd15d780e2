"""More work than a store can do, less time than it takes, and hosts with few rows: something is shed and counted, and nothing is blamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tier_bench import PAYLOAD_BYTES, Engine, Memory, identity, key, keys

from kvstore_sdk.backend import Region, TimedOutError, UnavailableError
from kvstore_sdk.keys import ChunkKey, manifest_name
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise
from kvstore_sdk.tier import IncompleteChunkError
from kvstore_sdk.tier import manifest as manifest_module
from kvstore_sdk.tier import staged as staged_module
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


def spoil_slots(engine: Engine) -> None:
    """Change a byte of the payload in every staging slot."""
    region, size = engine.region.view, engine.tier._work.slot_bytes
    for start in range(0, len(region), size):
        region[start + 4096 + 17] ^= 1


def rows_of(count: int) -> Memory:
    """The memory of an engine that has exactly so many rows."""
    memory = Memory(count)
    memory.row_count = count
    return memory


def test_a_store_that_hangs_leaves_rows_for_everything_else(new_engine: NewEngine) -> None:
    """LIV-09, CAP-09: rows are in use until their job ends; a quarter of them is never given to stores."""
    backend = FaultyBackend(open_memory(""), [Fault("put", Hang())])
    engine = new_engine(backend, memory=rows_of(8))
    job = engine.submit_store(keys(8))
    engine.wait(lambda: engine.total("stores", "shed") == 2)
    # What was shed is the tail, and its rows are free at once.
    load = engine.submit_load(keys(2, start=100), rows=[6, 7])
    assert engine.result(load).failed == tuple(keys(2, start=100))
    assert engine.total("loads", "missing") == 2
    more = engine.submit_store(keys(1, start=50), rows=[7])
    assert engine.result(more).failed
    engine.time_is_up()
    assert engine.result(job).done == ()


def test_an_engine_with_one_row_can_store(new_engine: NewEngine) -> None:
    assert new_engine(open_memory(""), memory=rows_of(1)).store([key(0)]).success


def test_of_a_job_that_is_larger_than_the_queue_the_head_is_stored(new_engine: NewEngine) -> None:
    """INT-05, CAP-05: never all of it or nothing, and a prefix can be used without its tail."""
    engine = new_engine(open_memory(""), max_queued_store_bytes=10 * PAYLOAD_BYTES[0])
    for start in (0, 100, 200):
        result = engine.store(keys(15, start))
        assert (result.done, result.failed) == (tuple(keys(10, start)), tuple(keys(5, start + 10)))
    assert engine.total("stores", "shed") == 15


def test_stores_are_shed_while_the_queue_does_not_move(new_engine: NewEngine) -> None:
    """LIV-09: what waits keeps rows in use, so a store that does not catch up gets no more of them."""
    backend = FaultyBackend(open_memory(""), [Fault("put", Hang())])
    engine = new_engine(backend, io_threads=1, batch_records=1, store_timeout_s=10.0, max_store_wait_s=0.1)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(3)]
    backend.wait_hanging()
    time.sleep(0.15)
    assert engine.store([key(10)], rows=[10]).failed == (key(10),)
    assert engine.total("stores", "shed") == 1
    backend.heal()
    assert all(engine.result(job).success for job in jobs)
    assert engine.store([key(11)], rows=[11]).success


@pytest.mark.parametrize(("part_of_its_time", "opens"), [(0.1, False), (1.0, True)])
def test_a_call_with_next_to_no_time_says_nothing_about_the_store(part_of_its_time: float, opens: bool, new_engine: NewEngine) -> None:
    """LIV-11: a queue that is too long is not a store that is down."""
    engine = new_engine(open_memory(""), breaker_failures=3)
    tier = engine.tier
    for _ in range(3):
        batch = Batch(started_s=100.0, timeout_s=8.0, deadline_s=100.0 + 8.0 * part_of_its_time)
        tier._pipeline.verdict.judge(batch, tier._breakers.get, "read", TimedOutError("too late"))
    assert tier._breakers.get.is_open is opens


def test_truncated_records_are_repaired_one_by_one(new_engine: NewEngine, tmp_path: Path) -> None:
    """INT-01: a length is the store's own word. A power cut that left files empty is no sign of bad memory, so nothing is switched off."""
    engine = new_engine(open_fs(str(tmp_path / "kv")))
    chunks = keys(40)
    assert engine.store(chunks).success
    for one in chunks[::2]:
        Path(tmp_path, "kv", ChunkKey.from_engine(identity().namespace, one).name).write_bytes(b"")
    result = engine.load(chunks)
    assert (result.done, result.failed) == (tuple(chunks[1::2]), tuple(chunks[::2]))
    assert engine.total("corrupt", "length") == 20
    assert not engine.tier._breakers.get.is_open
    assert engine.store(chunks[::2], generation=0).success
    assert engine.load(chunks).success


def test_a_backend_that_cannot_unregister_is_closed_all_the_same(new_engine: NewEngine) -> None:
    closed: list[bool] = []

    class Clumsy(BackendWrapper):
        def register_region(self, region: Region) -> None:
            """Takes any."""

        def unregister_region(self, region: Region) -> None:
            raise RuntimeError("no such region")

        def close(self) -> None:
            closed.append(True)
            super().close()

    engine = new_engine(Clumsy(open_memory("")))
    engine.tier.close()
    assert closed == [True]


def test_what_changes_between_the_check_and_the_copy_changes_nothing(new_engine: NewEngine) -> None:
    """INT-01, INT-03: a backend that writes into a buffer after its call, at the worst of moments of a load."""
    engine = new_engine(open_memory(""))
    assert engine.store(keys(2)).success

    def write_late(way: str, row: int) -> None:
        if way == "in":
            spoil_slots(engine)

    engine.memory.on_copy = write_late
    assert engine.load(keys(2)).success
    assert all(engine.memory.holds(row, key(row)) for row in range(2))


def test_what_changes_while_a_record_is_sealed_is_never_taken_for_the_chunk(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT-01: the same at the worst of moments of a store. What is stored is right, or found to be corrupt; never sealed and wrong."""
    engine = new_engine(open_memory(""))
    real = staged_module.seal

    def late(*args: Any) -> None:
        spoil_slots(engine)
        real(*args)
        spoil_slots(engine)

    monkeypatch.setattr(staged_module, "seal", late)
    assert engine.store(keys(4)).success
    monkeypatch.undo()
    result = engine.load(keys(4))
    assert all(engine.memory.holds(keys(4).index(one), one) for one in result.done)
    assert result.success


def test_a_row_that_does_not_hold_all_of_its_chunk_is_not_stored(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """INT-10: no part of a chunk ever carries the chunk's key."""
    engine = new_engine(open_memory(""))

    def refuse(way: str, row: int) -> None:
        if way == "out" and row == 1:
            raise IncompleteChunkError

    engine.memory.on_copy = refuse
    result = engine.store(keys(3))
    assert (result.done, result.failed) == ((key(0), key(2)), (key(1),))
    assert engine.total("stores", "refused") == 1
    assert not engine.finds(key(1))
    assert not caplog.records


def test_a_manifest_that_could_not_be_written_is_tried_again(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_AGAIN_S", 0.0)
    name = manifest_name(identity().namespace)
    backend = FaultyBackend(open_memory(""), [Fault("put", Raise(UnavailableError), names=lambda asked: asked == name, times=1)])
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    engine.wait(lambda: engine.total("manifests", "failed") == 1)
    assert engine.store([key(1)]).success
    engine.wait(lambda: engine.total("manifests", "written") == 1)
