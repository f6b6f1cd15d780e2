"""Each job has one result, whoever ends it, and each of its keys is in it once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_bench import LIMIT_S, key, keys

from kvstore_sdk.tier import JobResult
from kvstore_sdk.tier.jobs import Ending, Item, Job, Kind, Outcome
from kvstore_sdk.tier.rows import Rows


@given(
    count=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(Outcome)), st.integers(0, 100)), max_size=20),
)
def test_a_job_has_one_result_whatever_order_its_keys_end_in(count: int, steps: list[tuple[int, Outcome, int]]) -> None:
    job = Job(7, Kind.LOAD, "n", keys(count), range(count))
    ended: dict[int, tuple[Outcome, int]] = {}
    results: list[JobResult] = []

    def give(ended: Job) -> None:
        assert ended.open, "nobody can see yet that it is closed"
        results.append(ended.result)

    for place, outcome, moved in steps:
        was_open = job.open
        if place >= count:
            # Its time is over.
            rest = job.end(Outcome.FAILED, give)
            assert rest == ([key(left) for left in range(count) if left not in ended] if was_open else [])
            for left in range(count) if was_open else ():
                ended.setdefault(left, (Outcome.FAILED, 0))
        else:
            # Twice in one call, as a backend that answers twice would have it.
            ending = Ending(job, place, outcome, "label", moved)
            counted = job.settle([ending, ending])
            assert counted == ([ending] if was_open and place not in ended else [])
            if counted:
                ended[place] = (outcome, moved)
            job.close(give)
        assert job.open == (len(ended) < count)
    assert len(results) == (len(ended) == count)
    for result in results:
        by = {Outcome.DONE: result.done, Outcome.FAILED: result.failed, Outcome.SKIPPED: result.skipped}
        for outcome, found in by.items():
            assert found == tuple(key(place) for place in range(count) if ended[place][0] is outcome)
        assert result.moved_bytes == sum(moved for _, moved in ended.values())
        assert result.success == (not result.failed)
        assert result.elapsed_s >= 0


def test_threads_that_end_one_job_at_once_make_one_result() -> None:
    """And whoever sees that the job is closed can have its result: the engine asserts that after a drain (T15)."""
    for _ in range(50):
        job = Job(1, Kind.STORE, "n", keys(8), range(8))
        start = threading.Barrier(6)
        results: list[JobResult] = []
        counted: list[bool] = []

        def settle(job: Job, start: threading.Barrier, results: list[JobResult], counted: list[bool]) -> None:
            start.wait(10)
            for place in range(8):
                counted.extend([True] * len(job.settle([Ending(job, place, Outcome.DONE, "label", 1)])))
                job.close(lambda ended: results.append(ended.result))

        def expire(job: Job, start: threading.Barrier, results: list[JobResult], counted: list[bool]) -> None:
            start.wait(10)
            counted.extend([True] * len(job.end(Outcome.FAILED, lambda ended: results.append(ended.result))))

        def watch(job: Job, start: threading.Barrier, results: list[JobResult], counted: list[bool]) -> None:
            start.wait(10)
            while job.open:
                pass
            counted.append(not results)

        work = [settle] * 4 + [expire, watch]
        threads = [threading.Thread(target=each, args=(job, start, results, counted)) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        [result] = results
        assert len(result.done) + len(result.failed) == 8
        assert counted.count(True) == 8
        assert result.moved_bytes == len(result.done)


def test_a_job_keeps_its_own_keys_and_rows() -> None:
    """The engine may go on with its lists after a submit."""
    some_keys, rows = keys(2), [3, 4]
    job = Job(1, Kind.LOAD, "n", some_keys, rows)
    some_keys.clear()
    rows.clear()
    item = Item(job, 1, 10)
    assert (item.key, item.row) == (key(1), 4)


ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(steps=st.lists(st.tuples(st.sampled_from(Kind), ROWS, st.booleans()), max_size=30), data=st.data())
def test_a_row_is_loaded_into_by_one_job_alone(steps: list[tuple[Kind, list[int], bool]], data: st.DataObject) -> None:
    """RACE-04: several may store from a row, nobody loads into it meanwhile, and it is free when the last one has ended."""
    rows = Rows()
    held: list[tuple[Kind, list[int]]] = []
    for kind, wanted, release in steps:
        users = [(by, row) for by, some in held for row in some]
        conflicts = rows.conflicts(kind, wanted)
        for place, row in enumerate(wanted):
            others = {by for by, used in users if used == row}
            taken = Kind.LOAD in others or (kind is Kind.LOAD and (bool(others) or row in wanted[:place]))
            assert (place in conflicts) == taken
        free = [row for place, row in enumerate(wanted) if place not in conflicts]
        rows.hold(kind, free)
        held.append((kind, free))
        if release:
            rows.release(*held.pop(data.draw(st.integers(0, len(held) - 1))))
    for kind, some in held:
        rows.release(kind, some)
    assert len(rows) == 0
    assert not rows.conflicts(Kind.LOAD, range(6))


@pytest.mark.parametrize("kind", Kind)
def test_an_item_knows_its_place_in_its_job(kind: Kind) -> None:
    job = Job(1, kind, "n", keys(3), [9, 8, 7])
    ending = Item(job, 2, 10).ended(Outcome.DONE, "stored", 10)
    assert (ending.job, ending.place, ending.outcome, ending.result, ending.moved_bytes) == (job, 2, Outcome.DONE, "stored", 10)
