"""Profile atomicity: whole records or none, also while they are written, and when a put fails."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence

from kvstore_sdk.backend import GetStatus, Mode, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record, pieces, which
from kvstore_sdk_conformance.failure import CallRaised, require, show_difference
from kvstore_sdk_conformance.pressing import TRIES, took_s
from kvstore_sdk_conformance.race import ROUNDS, Over, race, rounds
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import Got, View
from kvstore_sdk_conformance.watched import CALL_S

DEFINITE = (PutStatus.FAILED, PutStatus.TIMED_OUT, PutStatus.CLOSED)
LATER_S = 0.4
"""What a thread, a queue or a retry that was left behind takes to do what should not be done any more."""
ITEMS = 24
PUTS = 20 * ITEMS
"""More than are made to fail, or to fail in vain, in one check."""
TAGS = 8
SIZES = (3 << 20, 65536)
"""One that is written in pieces, and one of which many are written in that time."""


@proves("KV-ATOM-01")
def test_a_reader_sees_the_old_record_or_the_new_one(store: Store, view: View) -> None:
    reader = store.open()
    for first in SIZES:
        # Of one size, and of two: a reader that asks for one of them may be told of the other.
        for sizes in {(view.fit(first), view.fit(first)), (view.fit(first), view.fit(first // 2))}:
            name = store.name()
            view.store((name, Record(sizes[0], 0)))
            reader.check_found(name, Record(sizes[0], 0))

            def replace(over: Over, name: str = name, sizes: tuple[int, int] = sizes) -> None:
                for number in rounds(over):
                    over.await_look()
                    view.put(name, Record(sizes[(number + 1) % 2], (number + 1) % TAGS), Mode.REPLACE, timeout_s=CALL_S)

            def read(over: Over, name: str = name, sizes: tuple[int, int] = sizes) -> None:
                turn = 0
                while not over.is_set():
                    asked = sizes[turn % 2]
                    turn += 1
                    _check_whole(reader.get(name, asked), name, sizes, asked)
                    over.look()

            race([replace], [read])


@proves("KV-ATOM-02")
def test_a_record_is_invisible_until_it_is_whole(store: Store, view: View) -> None:
    reader = store.open()
    for first in SIZES:
        size = view.fit(first)
        names = store.names(view.room_for(ROUNDS, size))
        done = [0]

        def create(over: Over, names: Sequence[str] = names, size: int = size, done: list[int] = done) -> None:
            for number in rounds(over, len(names)):
                over.await_look()
                view.put(names[number], Record(size, number % TAGS), timeout_s=CALL_S)
                done[0] = number + 1

        def read(over: Over, names: Sequence[str] = names, size: int = size, done: list[int] = done) -> None:
            while not over.is_set():
                number = min(done[0], len(names) - 1)
                _check_whole_or_none(reader, names[number], Record(size, number % TAGS))
                over.look()

        race([create], [read])


def _check_whole_or_none(reader: View, name: str, record: Record) -> None:
    note = "while it was being created"
    [there] = reader.exists(name)
    got = reader.get(name, record.size)
    status = got.result.status
    require(
        status in (GetStatus.FOUND, GetStatus.MISSING),
        f"FOUND or MISSING for {name}, which has {record.size} bytes when it is whole",
        got.result,
        note=note,
    )
    if status is GetStatus.FOUND:
        require(got.bytes == record.bytes, f"the whole record {name}, or none", pieces(got.bytes, [record.tag]), note=note)
    elif there is True and reader.capabilities.read_after_write:
        require(False, f"FOUND for {name}, after exists answered True", got.result, note=note)


@proves("KV-ATOM-03")
def test_a_create_that_fails_leaves_nothing(store: Store, view: View) -> None:
    size = view.fit(1 << 18, PUTS)
    failed = _failing_puts(store, Mode.CREATE, store.names, size)
    looker = store.open()
    # Some come late: a thread or a queue that nobody told.
    for when, wait_s in (("at once", 0.0), (f"{LATER_S:g} s later", LATER_S)):
        time.sleep(wait_s)
        for batch in looker.batches(list(failed)):
            there = looker.exists(*batch)
            found = looker.get_all([(name, size) for name in batch])
            for name, exists, got in zip(batch, there, found, strict=True):
                note = f"its CREATE answered {failed[name].name}; looked for {when}"
                require(exists is False, f"exists to answer False for {name}", exists, note=note)
                require(got.result.status is GetStatus.MISSING, f"MISSING for {name}", got.result, note=note)
    store.figures["failed_puts"] = len(failed)
    _check_bad_names(store, looker, size)


def _check_bad_names(store: Store, view: View, size: int) -> None:
    name = store.name()
    # What a store that mends names would make of them is the name itself.
    for bad in (f"./{name}", f"x/../{name}", f"/{name}", name.replace("/", "//", 1), f"{name}/", f"{name}/."):
        try:
            refused = view.put(bad, Record(size, 1), timeout_s=CALL_S).status in DEFINITE
        except CallRaised:
            refused = True
        if refused:
            view.check_missing(name, size, note=f"the CREATE of {bad!r} failed")


@proves("KV-ATOM-04")
def test_a_replace_that_fails_leaves_the_old_record(store: Store, view: View) -> None:
    old, size = view.fit(8192, PUTS), view.fit(1 << 18, PUTS)
    tags: dict[str, int] = {}

    def stored(count: int) -> list[str]:
        names = store.names(count)
        tags.update((name, tag) for tag, name in enumerate(names))
        view.store(*((name, Record(old, tags[name])) for name in names))
        return names

    failed = _failing_puts(store, Mode.REPLACE, stored, size)
    looker = store.open()
    for when, wait_s in (("at once", 0.0), (f"{LATER_S:g} s later", LATER_S)):
        time.sleep(wait_s)
        for batch in looker.batches(list(failed)):
            for name, got in zip(batch, looker.get_all([(name, old) for name in batch]), strict=True):
                note = f"its REPLACE answered {failed[name].name}; looked for {when}"
                require(got.result.status is GetStatus.FOUND, f"FOUND for {name}, which has {old} bytes", got.result, note=note)
                seen = show_difference(Record(old, tags[name]).bytes, got.bytes)
                require(got.bytes == Record(old, tags[name]).bytes, f"the bytes that {name} had", seen, note=note)
    store.figures["failed_puts"] = len(failed)


@proves("KV-ATOM-05")
def test_what_is_stored_is_visible_at_once_everywhere(store: Store, view: View) -> None:
    other = store.open()
    size = view.fit(4096)
    count = min(8, view.capabilities.max_batch)
    writers = [(view, other), (other, view)]
    for number in range(8):
        writer, reader = writers[number % 2]
        names = store.names(count)
        # Both have looked before: a miss, or a record, that is remembered must not be what they answer with.
        for looker in (view, other):
            looker.exists(*names)
            looker.get(names[0], size)
        for mode, tag in ((Mode.CREATE, 10), (Mode.REPLACE, 20)):
            records = [(name, Record(size, tag + index)) for index, name in enumerate(names)]
            writer.store(*records, mode=mode)
            note = f"stored by a call of another view that had returned, mode {mode.name}"
            there = reader.exists(*names)
            require(there == [True] * count, f"{count} times True", there, note=note)
            for name, record in records:
                reader.check_found(name, record, note=note)


# How puts are made to fail.


def _failing_puts(store: Store, mode: Mode, names: Callable[[int], Sequence[str]], size: int) -> dict[str, PutStatus]:
    """What failed, for good, of puts that had too little time, and of puts during which their view was closed."""
    failed: dict[str, PutStatus] = {}
    view = store.open()
    count = min(ITEMS, view.capabilities.max_batch)

    def put(view: View, some: Sequence[str], timeout_s: float) -> None:
        records = [(name, Record(size, 100 + tag)) for tag, name in enumerate(some)]
        # Of a call that raised nothing is known.
        with contextlib.suppress(CallRaised):
            results = view.put_all(records, mode, timeout_s=timeout_s)
            failed.update((name, result.status) for name, result in zip(some, results, strict=True) if result.status in DEFINITE)

    ready = [names(count) for _ in range(TRIES)]
    whole_s = took_s(lambda: put(view, ready.pop(), CALL_S))
    for timeout_s in (-1.0, 0.0, *(whole_s * part for part in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9))):
        put(view, names(count), timeout_s)
    view.close()
    put(view, names(count), CALL_S)
    for part in (0.0, 0.1, 0.3, 0.6):
        _race_with_close(store.open(), functools.partial(put, some=names(count), timeout_s=CALL_S), whole_s * part)
    return failed


def _race_with_close(view: View, put: Callable[[View], None], delay_s: float) -> None:
    def close(over: Over) -> None:
        time.sleep(delay_s)
        view.close()

    race([lambda over: put(view), close])


def _check_whole(got: Got, name: str, sizes: Sequence[int], asked: int) -> None:
    note = f"while it was being replaced by records of {' and '.join(str(size) for size in sorted(set(sizes)))} bytes"
    result = got.result
    if result.status is GetStatus.WRONG_SIZE:
        require(result.size_bytes in set(sizes) - {asked}, f"the size of a record that was stored as {name}", result, note=note)
        return
    require(result.status is GetStatus.FOUND, f"FOUND for {name}, the old record or the new one", result, note=note)
    require(which(got.bytes, range(TAGS)) is not None, "the old record or the new one, whole", pieces(got.bytes, range(TAGS)), note=note)
