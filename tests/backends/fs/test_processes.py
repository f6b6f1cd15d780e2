"""Several processes on one folder, and what is left when they are killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline, GetResult, GetStatus, PutStatus


def later() -> Deadline:
    return Deadline.after(60.0)


def records(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and ".kvstore" not in path.parts]


def test_two_processes_store_the_same_thousand_records_at_once(
    child: Callable[..., Any], children: Any, folder: Path, open_folder: Any, left_behind: Any
) -> None:
    """ATM-03, ATM-04: no error, every record whole, nothing else left."""
    count = 1000
    both = [child("storm", folder, count) for _ in range(2)]
    for one in both:
        one.go()
    told = [json.loads(one.line()) for one in both]
    for statuses in told:
        assert set(statuses) <= {"stored", "exists"}
        assert sum(statuses.values()) == count
    assert sum(statuses.get("stored", 0) for statuses in told) >= count
    found = records(folder)
    assert len(found) == count
    for path in found:
        assert path.read_bytes() == children.record_of(str(path.relative_to(folder)))
    assert left_behind() == []
    assert open_folder().usage(later()).records == count


def test_killed_at_a_hundred_random_moments_every_visible_record_is_whole(
    child: Callable[..., Any], children: Any, folder: Path, open_folder: Any, left_behind: Any
) -> None:
    """ATM-01, ATM-06, INT-07: what was reported as stored is there, what is there is whole, and a sweep leaves nothing else."""
    nursery = child("nursery", folder, 20)
    stored: set[str] = set()
    litter = 0
    for _ in range(100):
        nursery.go()
        stored |= set(json.loads(nursery.line()))
        litter += bool(left_behind())
    found = {str(path.relative_to(folder)): path for path in records(folder)}
    assert stored <= set(found)
    for name, path in found.items():
        assert path.read_bytes() == children.record_of(name), name
    assert len(stored) > 100
    assert litter > 3, "no child was killed while it wrote, so nothing was shown"
    backend = open_folder()
    backend.sweep()
    assert left_behind() == []
    assert len(list((folder / ".kvstore/tmp").iterdir())) == 2, "one lock and one folder, of the backend that is open"
    usage = backend.usage(later())
    assert (usage.records, usage.used_bytes) == (len(found), len(found) * children.RECORD_BYTES)
    backend.close()
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_a_reader_of_another_process_sees_one_payload_or_the_other(
    child: Callable[..., Any], children: Any, memory_folder: Path, open_folder: Any, desk: Any
) -> None:
    """ATM-05, with 5,000 turns and a process between."""
    writer, store = child("flip", memory_folder, 5000), open_folder(memory_folder)
    size = children.RECORD_BYTES
    item = desk.get_item("k", size)
    view = item.into[0].view
    writer.go()
    seen = set()
    while writer.process.poll() is None:
        view[:] = b"\xee" * size
        assert store.get([item], later()) == [GetResult(GetStatus.FOUND)]
        assert view[0] in (1, 2)
        assert view == bytes([view[0]]) * size
        seen.add(view[0])
    assert seen == {1, 2}
    assert json.loads(writer.line()) == ["stored"]
    store.close()


@pytest.mark.usefixtures("python_alone")
def test_half_a_record_is_not_there(
    child: Callable[..., Any], children: Any, folder: Path, store: Any, desk: Any, left_behind: Any
) -> None:
    """INT-07: while a writer is half-way, there is no record; nor does a sweep of another process take it from the writer."""
    writer = child("half", folder)
    size = children.RECORD_BYTES
    assert len(left_behind()) == 1
    assert store.exists(["slow"], later()) == [False]
    assert desk.get(store, "slow", size)[0].status is GetStatus.MISSING
    assert list(store.list("", later()).entries) == []
    assert store.usage(later()).records == 0
    assert store.sweep() == 0
    writer.go()
    assert json.loads(writer.line()) == "stored"
    assert desk.get(store, "slow", size) == (GetResult(GetStatus.FOUND), children.record_of("slow"))


@pytest.mark.usefixtures("python_alone")
def test_a_name_whose_writer_died_half_way_can_be_stored_at_once(
    child: Callable[..., Any], children: Any, folder: Path, store: Any, desk: Any, left_behind: Any
) -> None:
    """ATM-06"""
    writer = child("half", folder)
    os.kill(writer.process.pid, 9)
    writer.process.wait(30)
    assert len(left_behind()) == 1
    assert desk.put(store, "slow", children.record_of("slow")).status is PutStatus.STORED
    assert store.sweep() == 1
    assert left_behind() == []


def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(child: Callable[..., Any], folder: Path, store: Any) -> None:
    """RACE-06: an answer, not a hang, also when a lock was held at the fork."""
    parent = child("fork", folder)
    child_answers, parents_put, same_writer = json.loads(parent.line())
    assert child_answers == ["closed", "closed", *["ClosedError"] * 5, "stored"]
    assert parents_put == "stored"
    # The child closed its copy of the lock, and swept when it opened the folder: the parent counted as alive.
    assert same_writer
    parents_folders = len(list((folder / ".kvstore/tmp").iterdir()))
    store.sweep()
    assert len(list((folder / ".kvstore/tmp").iterdir())) == parents_folders == 4
    assert store.exists(["a", "b", "c"], later()) == [True] * 3


@pytest.mark.parametrize("size", [1, 4096])
def test_what_another_process_stored_is_found_at_once(
    child: Callable[..., Any], children: Any, folder: Path, store: Any, desk: Any, size: int
) -> None:
    """RACE-11: a miss is never remembered."""
    assert store.capabilities.read_after_write
    name = children.chunk_name(0)
    assert store.exists([name], later()) == [False]
    writer = child("storm", folder, 1)
    writer.go()
    assert json.loads(writer.line()) == {"stored": 1}
    assert store.exists([name], later()) == [True]
    assert desk.get(store, name, size)[0] == GetResult.wrong_size(children.RECORD_BYTES, size)
