"""Profile sharing: what processes see of each other."""

from __future__ import annotations

import itertools
import time

from kvstore_sdk.backend import DeleteStatus, Mode
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.children import Child
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import require
from kvstore_sdk_conformance.steps import create, look, remove, until
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import VISIBLE_S, View

SIZES = (1, 4096, 65536, 1 << 20)
ROUNDS = 12
MEETINGS = 6
"""Rounds in which both were seen to put at the same time; rounds are added until there were so many."""
LEAD_S, MOST_LEAD_S = 0.005, 0.3
"""From the command to a child until both begin: it has to read the line by then. What was too little is doubled."""
RACE_S, LATEST_S = 3.0, 12.0
"""A slow store gets fewer rounds, but not because they did not meet."""


@proves("KV-SHARE-01")
def test_another_process_finds_what_is_stored(store: Store, view: View) -> None:
    sizes = sorted({view.fit(size) for size in SIZES})
    before = {size: store.name() for size in sizes}
    for size, name in before.items():
        view.store((name, Record(size, 1)))
    child = store.child()
    after, theirs = ({size: store.name() for size in sizes} for _ in range(2))
    for size in sizes:
        view.store((after[size], Record(size, 2)))
        child.store([theirs[size]], size, 3)
    wait_s = 0.0 if view.capabilities.read_after_write else VISIBLE_S
    for names, tag, when in ((before, 1, "before it opened the location"), (after, 2, "while it had the location open")):
        for size, name in names.items():
            _wait_found(child, name, size, wait_s)
            _require_found(child, name, Record(size, tag), f"stored {when}")
    for size, name in theirs.items():
        view.check_found(name, Record(size, 3), note="stored by another process")


@proves("KV-SHARE-02")
def test_a_record_that_was_not_there_is_found_when_another_process_stored_it(store: Store, view: View) -> None:
    child, size = store.child(), view.fit(4096)
    for name in store.names(3):
        _require_missing(child, name, size, "which nobody stored yet")
        view.store((name, Record(size, 1)))
        _require_found(child, name, Record(size, 1), "that this process has just looked for in vain; another one stored it since")
    for name in store.names(3):
        view.check_missing(name, size, note="which nobody stored yet", breaks="KV-CORE-04")
        child.store([name], size, 2)
        note = "looked for in vain, and stored by another process since"
        [there] = view.exists(name)
        require(there is True, f"True for {name}", there, note=note)
        view.check_found(name, Record(size, 2), note=note)


@proves("KV-SHARE-03")
def test_a_record_that_another_process_replaced_is_read_anew(store: Store, view: View) -> None:
    child = store.child()
    old = view.fit(8192)
    for new in (old, view.fit(16384), view.fit(1)):
        mine, theirs = store.names(2)
        view.store((mine, Record(old, 1)))
        _require_found(child, mine, Record(old, 1), "before it was replaced", breaks="KV-SHARE-01")
        view.store((mine, Record(new, 2)), mode=Mode.REPLACE)
        _require_found(child, mine, Record(new, 2), f"read with {old} bytes before another process replaced it")
        child.store([theirs], old, 3)
        view.check_found(theirs, Record(old, 3), breaks="KV-SHARE-01")
        child.store([theirs], new, 4, "replace")
        view.check_found(theirs, Record(new, 4), note=f"read with {old} bytes before another process replaced it")


@proves("KV-SHARE-04")
def test_processes_that_create_the_same_records_all_succeed(store: Store, view: View) -> None:
    child, size = store.child(), view.fit(65536, 256)
    mine, theirs = Record(size, 1), Record(size, 2)
    began_s, lead_s, met = time.monotonic(), LEAD_S, 0
    for turn in itertools.count():
        # In one call, and one by one: whichever of them leaves the other more of a window.
        names = store.names(6)
        batch = min(len(names), view.capabilities.max_batch) if turn % 2 else 1
        at_s = time.monotonic() + lead_s
        child.post(do="create", names=names, size=size, tag=theirs.tag, batch=batch, at_s=at_s)
        time.sleep(max(0.0, at_s - time.monotonic()))
        start_s = time.monotonic()
        results = create(view, names, size, mine.tag, batch)
        end_s = time.monotonic()
        answer = child.answer()
        for name, result, (status, shown) in zip(names, results, answer["answers"], strict=True):
            note = f"two processes put {name} at the same time"
            require(result.status.name in ("STORED", "EXISTS"), "STORED or EXISTS from either", result, note=note)
            require(status in ("STORED", "EXISTS"), "STORED or EXISTS from either", shown, note=note)
        for name in names:
            there = look(view, name, [mine, theirs], note="two processes put it at the same time")
            require(there is not None, f"{name} to be there", "MISSING", note="two processes put it at the same time")
        if answer["began_s"] < end_s and start_s < answer["ended_s"]:
            met += 1
        else:
            lead_s = min(2 * lead_s, MOST_LEAD_S)
        took_s = time.monotonic() - began_s
        if took_s >= LATEST_S or (met >= MEETINGS and (turn + 1 >= ROUNDS or took_s >= RACE_S)):
            break


@proves("KV-SHARE-05")
def test_a_record_that_another_process_deleted_is_missed(store: Store, view: View) -> None:
    child, size = store.child(), view.fit(4096)
    mine, theirs = store.names(2)
    for name in (mine, theirs):
        view.store((name, Record(size, 1)))
        _require_found(child, name, Record(size, 1), "before it was deleted", breaks="KV-SHARE-01")
        view.check_found(name, Record(size, 1), breaks="KV-CORE-01")
    [deleted] = remove(view, mine)
    require(deleted is DeleteStatus.DELETED, f"DELETED for {mine}", deleted, breaks="KV-DELETE-01")
    _require_missing(child, mine, size, "which this process has read, and another one deleted since")
    child.delete([theirs])
    view.check_missing(theirs, size, note="read by this process, and deleted by another one since")


def _wait_found(child: Child, name: str, size: int, wait_s: float) -> None:
    until(lambda: child.get([name], size, []) != [("MISSING", None)], wait_s)


def _require_found(child: Child, name: str, record: Record, note: str, *, breaks: str | None = None) -> None:
    [there] = child.exists([name])
    require(there is True, f"True from another process for {name}, {note}", there, breaks=breaks)
    [(status, tag)] = child.get([name], record.size, [record.tag])
    require(status == "FOUND", f"FOUND in another process for {name}, {note}", status, breaks=breaks)
    require(tag == record.tag, f"the bytes of {name} in another process, {note}", "other bytes", breaks=breaks)


def _require_missing(child: Child, name: str, size: int, note: str) -> None:
    [there] = child.exists([name])
    require(there is False, f"False from another process for {name}, {note}", there)
    [(status, _)] = child.get([name], size, [])
    require(status == "MISSING", f"MISSING in another process for {name}, {note}", status)
