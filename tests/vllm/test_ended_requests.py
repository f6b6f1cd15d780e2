"""A request that is over while its jobs go on: their results come all the same, once, and nothing is looked up that went with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_faulty import OPENED, faulty_entry
from vllm_records import record_paths
from vllm_stand import Stand

from kvstore_sdk.testing import Fault, Hang
from kvstore_sdk.vllm import compat

LIMIT_S = 20.0
BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
OTHERS = [[8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]]


def watched(made: Stand) -> Counter[int]:
    """Counts how often each job is reported from here on."""
    seen: Counter[int] = Counter()
    poll = made.adapter.get_finished_jobs

    def watch() -> Iterable[Any]:
        found = tuple(poll())
        seen.update(result.job_id for result in found if result.success)
        return found

    made.adapter.get_finished_jobs = watch
    return seen


def test_a_store_of_a_request_that_ended_is_reported_once(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """RACE-10: other requests come and go between the end and the answer."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder, Fault("put", Hang(), times=1))])
    seen = watched(made)
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    made.store(request, keys, BLOCKS)
    made.step()
    assert OPENED[str(folder)].wait_hanging()
    made.finish(request)
    for number in range(20):
        other = made.request(f"other {number}", keys)
        made.manager.lookup(keys[0], other)
        made.step()
        made.finish(other)
    assert not seen
    OPENED[str(folder)].heal()
    made.settle()
    assert set(seen.values()) == {1}
    assert set(keys) <= {key.to_engine() for key in record_paths(folder)}


def test_a_load_of_a_request_that_ended_is_reported_once(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """RACE-10: also what it waited for, and the chunk is there for the next one."""
    folder = tmp_path / "kv"
    made = stand([faulty_entry(folder)])
    for name, chunks, blocks in (("a", 2, BLOCKS), ("evict", 3, OTHERS)):
        keys = made.keys(name, chunks)
        request = made.request(f"store {name}", keys)
        made.store(request, keys, blocks)
        made.finish(request)
        made.settle()
    keys = made.keys("a", 2)
    OPENED[str(folder)].arm(Fault("get", Hang()))
    seen = watched(made)
    request = made.request("waits", keys)
    until_s = time.monotonic() + LIMIT_S
    while not OPENED[str(folder)].hanging:
        assert time.monotonic() < until_s
        assert all(made.manager.lookup(key, request) is not compat.HIT for key in keys)
        made.step()
    made.finish(request)
    for _ in range(20):
        made.step()
    OPENED[str(folder)].heal()
    made.settle()
    assert set(seen.values()) == {1}
    assert made.lookup(made.request("again", keys), keys) == [True] * 4
