"""Whatever a backend does, vLLM's manager meets no exception, no unknown job, no second completion and no wait without a bound.

T1 to T34 are the rows of a list of what kills or parks vLLM 0.24 to 0.33; each is closed here or in the matrix.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_faulty import OPENED, faulty_entry, set_timeouts
from vllm_records import header_of, put, record_paths
from vllm_stand import Stand, offload

from kvstore_sdk.testing import Fault, Hang, Raise, Return, Say, WriteLate
from kvstore_sdk.tier import JobResult
from kvstore_sdk.vllm import compat, kvstore

MakeStand = Callable[..., Stand]
BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
INTO = [[20, 21, 22, 23], [24, 25, 26, 27]]
LIMIT_S = 30.0


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder / "kv"), **options}


def stored(made: Stand, name: str = "a") -> list[bytes]:
    """Store two chunks of each group; returns their keys."""
    keys = made.keys(name, 2)
    request = made.request(f"store {name}", keys)
    made.store(request, keys, BLOCKS)
    made.finish(request)
    made.settle()
    return keys


def evict(made: Stand, name: str = "evict") -> None:
    """Push everything out of vLLM's host memory, which has 6 rows."""
    keys = made.keys(name, 3)
    request = made.request(name, keys)
    made.store(request, keys, [[8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
    made.finish(request)
    made.settle()


class Broken:
    """A Tier that fails in every way: each call raises, or answers what it should not."""

    def __init__(self, answers: Iterable[JobResult] = ()) -> None:
        self.answers = list(answers)
        self.metrics = SimpleNamespace(take=self._raise)
        self.closed = False

    def _raise(self, *arguments: object, **options: object) -> Any:
        raise RuntimeError("broken")

    lookup = flush = end_request = submit_store = submit_load = reset = drain = take_events = _raise

    def poll(self) -> list[JobResult]:
        if not self.answers:
            self._raise()
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True
        self._raise()


def job(job_id: int, keys: Iterable[bytes], rows: Iterable[int], *, load: bool) -> Any:
    return SimpleNamespace(
        job_id=job_id, keys=keys, chunk_ids=np.array(list(rows)), is_promotion=load, req_context=offload.ReqContext(req_id="r")
    )


def break_tier(made: Stand, *answers: JobResult) -> None:
    """Put a broken Tier in the place of the real one, which is closed."""
    made.adapter._tier.close()
    made.adapter._tier = Broken(answers)
    made.adapter._ready = (None,)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Errors are expected; they are logged, and pytest shows them when a test fails."""
    caplog.set_level("CRITICAL", "kvstore_sdk")


def test_only_own_jobs_are_reported_and_each_once(stand: MakeStand, tmp_path: Path) -> None:
    """T1, T2, T3: an unknown id, a second report, another tier's id would each end the engine."""
    made = stand([entry(tmp_path)])
    keys = made.keys("a", 1)
    made.adapter._open[7] = False
    result = JobResult(7, tuple(keys), (), (), 0, 0.0)
    break_tier(made, result, result, JobResult(99, (), (), (), 0, 0.0))
    assert [found.job_id for found in made.adapter.get_finished_jobs()] == [7]
    assert list(made.adapter.get_finished_jobs()) == []


def test_a_load_that_fails_in_part_names_what_arrived(stand: MakeStand, tmp_path: Path) -> None:
    """T4, T5, INT-08, LIV-14: a tuple of the job's own keys; what did not arrive is not in host memory afterwards."""
    made = stand([entry(tmp_path)])
    keys = stored(made)
    evict(made)
    request = made.request("load", keys)
    while any(made.manager.lookup(key, request) is compat.RETRY for key in keys):
        made.step()
    next(path for key, path in record_paths(tmp_path / "kv").items() if key.to_engine() == keys[1]).unlink()
    # What vLLM is told is looked at on its way.
    results: list[Any] = []
    poll = made.adapter.get_finished_jobs

    def watch() -> Iterable[Any]:
        found = tuple(poll())
        results.extend(found)
        return found

    made.adapter.get_finished_jobs = watch
    made.step()
    made.settle()
    (result,) = results
    assert not result.success
    assert isinstance(result.successful_keys, tuple)
    assert sorted(result.successful_keys) == sorted(key for key in keys if key != keys[1])
    primary = made.manager.primary_tier
    assert [primary.lookup(key, request) is compat.HIT for key in keys] == [True, False, True, True]


def test_no_entry_point_raises(stand: MakeStand, tmp_path: Path) -> None:
    """T6, T8, T9, T17: safe defaults instead, of the exact types that vLLM compares with."""
    made = stand([entry(tmp_path)], extra={"test_events": True})
    adapter = made.adapter
    break_tier(made)
    tier = adapter._tier
    adapter._hash_unconfirmed = b"something else"
    request = offload.ReqContext(req_id="r")
    assert isinstance(adapter.on_new_request(request), offload.RequestOffloadingContext)
    assert adapter.lookup(made.keys("a", 1)[0], request) is compat.MISS
    assert adapter.lookup(b"", request) is compat.MISS
    assert adapter.lookup(None, None) is compat.MISS
    assert adapter.on_request_finished(request) is None
    assert adapter.on_schedule_end("anything") is None
    assert adapter.on_schedule_end() is None
    assert tuple(adapter.get_finished_jobs()) == ()
    assert tuple(adapter.take_events()) == ()
    assert adapter.get_stats() is None
    assert adapter.has_pending_work() is False
    assert adapter.drain_jobs() is None
    assert adapter.shutdown() is None
    assert adapter.shutdown() is None
    assert tier.closed


def test_a_result_that_cannot_be_told_is_a_failure_and_the_others_are_told(
    stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T13: a job that is never reported keeps its rows, and the engine never ends."""
    made = stand([entry(tmp_path)])
    keys = made.keys("a", 1)
    made.adapter._open.update({1: True, 2: False, 3: True})
    break_tier(made, *(JobResult(number, tuple(keys), (), (), 0, 0.0) for number in (1, 2, 3)))
    real = compat.job_result

    def tell(job_id: int, *, success: bool, **others: Any) -> Any:
        if job_id == 1 and success:
            raise TypeError("no such field")
        return real(job_id, success=success, **others)

    monkeypatch.setattr(compat, "job_result", tell)
    assert [(found.job_id, found.success) for found in made.adapter.get_finished_jobs()] == [(1, False), (2, True), (3, True)]
    assert not made.adapter.has_pending_work()


@pytest.mark.parametrize("load", [False, True])
def test_a_job_that_cannot_be_queued_is_reported_as_failed(load: bool, stand: MakeStand, tmp_path: Path) -> None:
    """T7: an unreported job would pin its rows for ever."""
    made = stand([entry(tmp_path)])
    adapter = made.adapter
    submit = adapter.submit_load if load else adapter.submit_store
    submit(job(1, [b"two", b"keys"], [0], load=load))
    submit(job(2, [], [], load=load))
    (bad, empty) = sorted(adapter.get_finished_jobs(), key=lambda result: result.job_id)
    assert (bad.job_id, bad.success) == (1, False)
    assert (empty.job_id, empty.success) == (2, True)
    break_tier(made)
    submit(job(3, made.keys("a", 1)[:1], [0], load=load))
    assert [(result.job_id, result.success) for result in adapter.get_finished_jobs()] == [(3, False)]
    # Nobody knows whether that job was queued: the tier is off, and a late copy would find no memory.
    assert adapter._memory._rows is None
    submit(job(4, made.keys("a", 1)[:1], [0], load=load))
    assert [(result.job_id, result.success) for result in adapter.get_finished_jobs()] == [(4, not load)]
    assert not adapter.has_pending_work()


def test_a_job_submitted_twice_is_reported_once(stand: MakeStand, tmp_path: Path) -> None:
    """T2, RACE-10."""
    made = stand([entry(tmp_path)])
    adapter = made.adapter
    keys = made.keys("a", 1)[:1]
    adapter.submit_store(job(1, keys, [0], load=False))
    adapter.submit_store(job(1, keys, [0], load=False))
    seen: list[int] = []
    until = time.monotonic() + LIMIT_S
    while adapter.has_pending_work() and time.monotonic() < until:
        seen += [result.job_id for result in adapter.get_finished_jobs()]
    assert seen == [1]


def test_keys_of_a_job_are_left_as_they_are(stand: MakeStand, tmp_path: Path) -> None:
    """T29: the set is shared between all tiers."""
    made = stand([entry(tmp_path)])
    keys = set(made.keys("a", 3))
    before = set(keys)
    made.adapter.submit_store(job(1, keys, range(6), load=False))
    until = time.monotonic() + LIMIT_S
    while not tuple(made.adapter.get_finished_jobs()) and time.monotonic() < until:
        time.sleep(0.001)
    assert keys == before


def test_a_load_that_always_fails_parks_no_request(stand: MakeStand, tmp_path: Path) -> None:
    """T10, LIV-01: 100 steps issue one load, and the request goes on without the chunk."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder)])
    keys = stored(made)
    evict(made)
    OPENED[str(folder)].arm(Fault("get", Raise()))
    request = made.request("load", keys)
    assert made.lookup(request, keys) == [False] * 4
    for _ in range(100):
        assert all(made.manager.lookup(key, request) is not compat.HIT for key in keys)
        made.step()
    made.settle()
    gets = [event for event in OPENED[str(folder)].log if event.op == "get"]
    assert made.metrics.total("loads") == 4
    assert made.metrics.total("loads", "loaded") == 0
    # Each try of each record once: the first and its repeats.
    assert sum(len(event.names) for event in gets) <= 4 * 3


def test_a_prefix_larger_than_host_memory_parks_no_request(stand: MakeStand, tmp_path: Path) -> None:
    """T11: promotions push each other out; the request ends up with what fits."""
    made = stand([entry(tmp_path)], ranks=1, groups=1, rows=12)
    keys = made.keys("long", 8)
    request = made.request("store", keys)
    made.store(request, keys, [list(range(16))])
    made.finish(request)
    made.settle()
    made.close()
    small = stand([entry(tmp_path)], ranks=1, groups=1, rows=3)
    reader = small.request("load", keys)
    answers = small.lookup(reader, keys)
    assert answers.count(True) <= 3


@pytest.mark.parametrize("op", ["exists", "get", "put"])
def test_a_backend_that_hangs_costs_its_deadline_and_no_more(op: str, stand: MakeStand, tmp_path: Path) -> None:
    """T12, T13, T33, LIV-02, LIV-07: look-ups become misses, jobs end, and no call of the engine's thread waits."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder, close_timeout_s=1.0)])
    keys = stored(made)
    evict(made)
    made.adapter._tier._table.clear()
    OPENED[str(folder)].arm(Fault(op, Hang()))
    set_timeouts(made.adapter._tier, lookup_timeout_s=0.2, load_timeout_s=0.2, store_timeout_s=0.2)
    started = time.monotonic()
    if op == "put":
        stored(made, "b")
    else:
        request = made.request("load", keys)
        assert made.lookup(request, keys) == [False] * 4
        made.settle()
    assert 0.1 < time.monotonic() - started < LIMIT_S
    took = []
    others = made.keys("others", 50)
    asking = made.request("more", others)
    for key in others:
        before = time.monotonic()
        made.adapter.lookup(key, asking)
        made.adapter.get_finished_jobs()
        took.append(time.monotonic() - before)
    assert statistics.median(took) < 0.1
    started = time.monotonic()
    made.close()
    assert time.monotonic() - started < LIMIT_S
    OPENED[str(folder)].heal()


def test_a_load_without_room_in_staging_memory_ends_by_its_deadline_and_works_once_there_is_room(stand: MakeStand, tmp_path: Path) -> None:
    """LIV-21: two slots, held by a call that hangs."""
    folder = tmp_path / "kv"
    limits = {"breaker_probe_s": 0.05, "staging_bytes": 2 * 12288, "io_threads": 1}
    made = stand([faulty_entry(folder, **limits)])
    assert len(made.adapter._tier._work._free) == 2
    keys = stored(made)
    evict(made)
    OPENED[str(folder)].arm(Fault("get", Hang()))
    set_timeouts(made.adapter._tier, load_timeout_s=0.3)
    assert made.lookup(made.request("full", keys), keys) == [False] * 4
    made.settle()
    OPENED[str(folder)].heal()
    set_timeouts(made.adapter._tier, load_timeout_s=LIMIT_S)
    until_s = time.monotonic() + LIMIT_S
    for attempt in range(1000):
        if made.lookup(made.request(f"again {attempt}", keys), keys) == [True] * 4:
            break
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_chunks_that_the_store_has_and_host_memory_has_no_room_for_are_counted(stand: MakeStand, tmp_path: Path) -> None:
    """CAP-10: vLLM makes a miss of our HIT when every row is in use. Hits that were told and never asked to be loaded are those."""
    made = stand([entry(tmp_path)])
    keys = stored(made)
    evict(made)
    others = made.keys("evict", 3)
    using = made.request("using", others)
    assert made.lookup(using, others) == [True] * 6
    made.manager.prepare_load(others, using)
    assert made.lookup(made.request("asking", keys), keys)[0] is False
    made.step()
    assert made.metrics.total("lookups", "hit") > made.metrics.total("loads") == 0
    made.manager.complete_load(set(others), using)
    assert made.lookup(made.request("later", keys), keys) == [True] * 4
    assert made.metrics.total("loads", "loaded") == 4


def test_a_record_holds_every_part_of_its_chunk(stand: MakeStand, tmp_path: Path) -> None:
    """HMA-06: no layer's and no rank's share can be lost, or replaced, on its own."""
    made = stand([entry(tmp_path)])
    keys = stored(made)
    evict(made)
    records = {key.to_engine(): path for key, path in record_paths(tmp_path / "kv").items()}
    of_chunks = {key: path for key, path in records.items() if key in keys}
    assert len(of_chunks) == len(keys)
    per_group = {0: 1024 + 512, 1: 768}
    for key, path in of_chunks.items():
        assert header_of(path).payload_bytes == made.ranks * made.blocks_per_chunk * per_group[int.from_bytes(key[-4:], "big")]
    of_chunks[keys[2]].unlink()
    made.adapter._tier._table.clear()
    assert made.lookup(made.request("load", keys), keys) == [True, True, False, True]


def test_a_row_is_not_touched_once_its_job_is_reported(stand: MakeStand, tmp_path: Path) -> None:
    """T14, RACE-03: the backend writes into its buffers long after the load has failed, and the row has another chunk by then."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder)])
    keys = stored(made)
    evict(made)
    OPENED[str(folder)].arm(Fault("get", WriteLate(answer=None, fill=0xEE)))
    request = made.request("load", keys)
    assert made.lookup(request, keys) == [True] * 4
    made.settle()
    rows = np.asarray(made.manager.primary_tier.get_kv_memoryview())
    before = rows.copy()
    OPENED[str(folder)].release()
    assert OPENED[str(folder)].wait_late()
    assert (rows == before).all()
    del rows


def test_a_reset_with_a_hanging_backend_is_bounded_and_leaves_no_job(stand: MakeStand, tmp_path: Path) -> None:
    """T15, T16, CFG-12: results of all jobs are there when the drain returns."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder, drain_timeout_s=0.3, close_timeout_s=1.0)])
    OPENED[str(folder)].arm(Fault("put", Hang()))
    keys = made.keys("a", 2)
    request = made.request("store", keys)
    made.store(request, keys, BLOCKS)
    started = time.monotonic()
    made.manager.reset_cache()
    assert time.monotonic() - started < LIMIT_S
    assert not made.manager._jobs
    assert not made.adapter.has_pending_work()
    OPENED[str(folder)].heal()
    made.settle()
    later = made.request("later", keys)
    assert made.lookup(later, keys) == [False] * 4


def test_shutdown_survives_a_backend_that_cannot_close(stand: MakeStand, tmp_path: Path) -> None:
    """T17: if it raised, vLLM would leave its region in /dev/shm."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder, Fault("close", Raise()))])
    stored(made)
    made.close()
    assert not [path for path in Path("/dev/shm").iterdir() if made.engine_id in path.name]


def test_what_the_base_class_promises_is_there(stand: MakeStand, tmp_path: Path) -> None:
    """T26, T27, T30, T31: its constructor ran, the tier can be hashed, serves nobody else, and declares no label of vLLM's."""
    made = stand([entry(tmp_path, locality="REMOTE")])
    adapter = made.adapter
    assert adapter.bp_detector is None
    assert adapter.tier_type == "kvstore"
    assert adapter.locality is offload.Locality.REMOTE
    assert len({adapter}) == 1
    assert adapter.medium is offload.Medium.STORAGE
    base = kvstore.__mro__[1]
    assert kvstore.serve_external_requests is base.serve_external_requests
    assert "config_info_keys" not in vars(kvstore)


def test_any_thread_may_call(stand: MakeStand, tmp_path: Path) -> None:
    """T32: vLLM 0.33 also calls from a thread of its own, one at a time."""
    made = stand([entry(tmp_path)])
    problems: list[BaseException] = []

    def use() -> None:
        try:
            keys = stored(made, "elsewhere")
            evict(made)
            request = made.request("load", keys)
            assert made.lookup(request, keys) == [True] * 4
        except BaseException as problem:  # noqa: BLE001  the test's thread looks at it
            problems.append(problem)

    thread = threading.Thread(target=use, name="another-thread")
    thread.start()
    thread.join(LIMIT_S)
    assert problems == []


@pytest.mark.parametrize(
    "answer",
    [
        Fault("exists", Raise(RuntimeError)),
        Fault("exists", Raise(SystemExit)),
        Fault("exists", Return(lambda _: iter(()))),
        Fault("exists", Return(lambda _: None)),
        Fault("exists", Say("yes")),
    ],
    ids=["raises", "exits", "a generator", "nothing", "a string"],
)
def test_a_look_up_that_goes_wrong_is_a_miss_and_the_next_one_works(answer: Fault, stand: MakeStand, tmp_path: Path) -> None:
    """T34, LIV-10: it must not take the thread down that answers all look-ups."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder, retries=0)])
    keys = stored(made)
    evict(made)
    made.adapter._tier._table.clear()
    OPENED[str(folder)].arm(answer)
    first = made.request("first", keys)
    assert made.lookup(first, keys) == [False] * 4
    OPENED[str(folder)].heal()
    second = made.request("second", keys)
    assert made.lookup(second, keys) == [True] * 4


def test_a_corrupt_record_is_a_miss_that_the_next_store_repairs(stand: MakeStand, tmp_path: Path) -> None:
    """INT-01, INT-03, ATM-10."""
    made = stand([entry(tmp_path)])
    keys = stored(made)
    evict(made)
    for path in record_paths(tmp_path / "kv").values():
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        put(path, bytes(data))
    request = made.request("load", keys)
    assert made.lookup(request, keys) == [False] * 4
    assert made.metrics.total("corrupt", "payload") == 4
    written = made.fill(3, BLOCKS)
    made.store(request, keys, BLOCKS)
    made.finish(request)
    made.settle()
    evict(made, "once more")
    again = made.request("again", keys)
    assert made.lookup(again, keys) == [True] * 4
    made.load(again, keys, INTO)
    assert made.content(INTO) == written
