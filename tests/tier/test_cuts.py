"""A call brings as much as pays, and leaves their part to the other threads."""

from __future__ import annotations

import pytest
from work_bench import BYTES, Queue, all_items, job, probe_of

from kvstore_sdk.tier.jobs import Item, Kind
from kvstore_sdk.tier.work import WorkQueue


def test_a_job_is_spread_over_the_threads(queue: Queue) -> None:
    queue.put_job(job(1, Kind.LOAD, list(range(8))))
    assert [len(queue.take().items) for _ in range(4)] == [2, 2, 1, 1]


def test_so_many_bytes_as_a_backend_moves_side_by_side_are_not_spread() -> None:
    queue = Queue(slots=64, batch=4, max_batch=16, batch_bytes=10 * BYTES + 1)
    queue.put_job(job(1, Kind.LOAD, list(range(25))))
    assert [len(queue.take().items) for _ in range(3)] == [10, 10, 5]


@pytest.mark.parametrize(("slots", "most"), [(100, 16), (24, 6), (8, 4)])
def test_what_is_not_spread_fits_into_a_call_and_leaves_slots_to_others(slots: int, most: int) -> None:
    """A call that is late holds its slots, however small the records are."""
    queue = Queue(slots=slots, batch=4, max_batch=16, batch_bytes=1 << 40)
    queue.put_job(job(1, Kind.LOAD, list(range(100))))
    assert [len(queue.take().items) for _ in range(2)] == [most, most]


def test_records_of_several_sizes_make_calls_of_so_many_bytes_and_a_larger_one_goes_alone() -> None:
    queue = Queue(slots=64, batch=4, max_batch=16, batch_bytes=10)
    made = job(1, Kind.LOAD, list(range(7)))
    queue.put_items(Kind.LOAD, [Item(made, place, size) for place, size in enumerate((1, 8, 8, 1, 1, 30, 10))])
    assert [[item.payload_bytes for item in queue.take().items] for _ in range(4)] == [[1, 8], [8, 1, 1], [30], [10]]


def test_what_has_far_less_time_left_goes_in_a_call_of_its_own() -> None:
    """A call has the time of the item that has least."""
    queue = Queue(slots=64, threads=1, batch=16)
    for number, timeout_s in enumerate((100.0, 90.0, 20.0, 30.0)):
        queue.put_job(job(number, Kind.LOAD, [number], timeout_s=timeout_s))
    assert [[item.job.job_id for item in queue.take().items] for _ in range(2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("batch_bytes", "calls"), [(0, [64, 64, 64, 8]), (1, [200])])
def test_names_are_asked_for_in_one_call_where_a_job_is_not_spread(batch_bytes: int, calls: list[int]) -> None:
    queue = Queue(max_batch=256, batch_bytes=batch_bytes)
    queue.put_probe("n", probe_of(*range(200)))
    assert [len(queue.take().keys) for _ in calls] == calls


def test_two_of_one_name_go_one_after_the_other_in_order() -> None:
    queue = Queue(threads=2)
    queue.put_job(job(1, Kind.LOAD, [1, 1, 2, 3]))
    first, second = queue.take(), queue.take()
    assert [item.place for item in first.items] == [0, 2]
    assert [item.place for item in second.items] == [1]


def test_a_long_list_of_probes_is_cut_into_calls(queue: Queue) -> None:
    queue.put_probe("n", probe_of(*range(7)))
    assert [len(queue.take().keys) for _ in range(3)] == [3, 3, 1]


def test_a_part_of_the_calls_that_may_be_under_way_is_not_all_that_there_are() -> None:
    """Where calls need no threads, some that are late leave the others their places."""
    queue = WorkQueue(slots=64, slot_bytes=4096, threads=4, max_threads=4, batch=1, max_batch=3, unfold=all_items, depth=4)
    while queue.wants_thread():
        pass
    queue.put_job(job(1, Kind.LOAD, list(range(40))))
    taken = []
    while (batch := queue.try_next()) is not None:
        taken.append(batch)
    assert len(taken) == 16
    for batch in taken:
        assert not queue.is_stuck
        batch.abandoned = True
    assert queue.is_stuck


def test_a_load_is_cut_for_the_threads_that_are_there_for_it() -> None:
    """LIV-09: threads in stores do not come for their part, or come late; what would be theirs goes along with others'."""
    queue = Queue(slots=64, threads=8, max_threads=8, batch=16)
    queue.put_job(job(1, Kind.LOAD, list(range(16))))
    assert [len(batch.items) for batch in iter(queue.take, None)] == [2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    queue = Queue(slots=64, threads=8, max_threads=8, batch=16)
    queue.put_job(job(1, Kind.STORE, list(range(100, 148))))
    stores = list(iter(queue.take, None))
    assert len(stores) == 6
    queue.put_job(job(2, Kind.LOAD, list(range(16))))
    batch = queue.take()
    assert batch is not None
    assert len(batch.items) == 4
