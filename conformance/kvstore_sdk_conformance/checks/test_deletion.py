"""Profile deletion: records that are removed are gone, and nothing else is."""

from __future__ import annotations

import threading
import time

from kvstore_sdk.backend import DeleteStatus, GetStatus, Mode, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require, show
from kvstore_sdk_conformance.steps import remove
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

RACES, FEWEST = 40, 6
RACE_S = 2.0
LOOK_S = 1.0
"""Until the reader looks at a new record: what a store over a network takes for a few calls."""
READER_S = 60.0
"""For a reader to end once it is told to: a call of it may run into its deadline."""


@proves("KV-DELETE-01")
def test_a_deleted_record_is_gone(store: Store, view: View) -> None:
    sizes = sorted({view.fit(size) for size in (1, 4096, 1 << 20)})
    names = {store.name(): size for size in sizes}
    other = store.open()
    for name, size in names.items():
        view.store((name, Record(size, 1)))
        # Both have seen it: what one of them remembers must not outlive the record.
        for one in (view, other):
            one.check_found(name, Record(size, 1), breaks="KV-CORE-18")
    for name, size in names.items():
        [deleted] = remove(view, name)
        require(deleted is DeleteStatus.DELETED, f"DELETED for {name}, which was there", deleted)
        view.check_missing(name, size, note="after it was deleted")
        other.check_missing(name, size, note="after it was deleted in another view")
    again = store.open()
    for name, size in names.items():
        again.check_missing(name, size, note="deleted before the location was opened again")


@proves("KV-DELETE-02")
def test_a_delete_of_what_is_not_there_is_a_result(store: Store, view: View) -> None:
    never, twice = store.names(2)
    view.store((twice, Record(view.fit(4096), 1)))
    other = store.open()
    [deleted] = remove(view, twice)
    require(deleted is DeleteStatus.DELETED, f"DELETED for {twice}", deleted, breaks="KV-DELETE-01")
    for one, name, what in (
        (view, never, "which was never stored"),
        (view, twice, "which was deleted before"),
        (other, twice, "which was deleted in another view"),
    ):
        [deleted] = remove(one, name)
        require(deleted is DeleteStatus.ABSENT, f"ABSENT for {name}, {what}", deleted)


@proves("KV-DELETE-03")
def test_a_delete_removes_what_it_names_and_no_more(store: Store, view: View) -> None:
    stem = store.name()[:-3]
    folder = stem.rsplit("/", 1)[0]
    digest = stem.rsplit("/", 1)[1]
    # What a store would take along that reads a name as a pattern, a prefix, a folder, or without its end.
    kept = [
        f"{stem}-g1",
        f"{stem}-g10",
        f"{stem}-g0.x",
        f"{stem}",
        f"{folder}/{digest[:-1]}-g0",
        f"{folder}/x/{digest}-g0",
        f"v2/{digest}-g0",
    ]
    gone = [f"{stem}-g0", store.name(), f"{folder}/y/z/{digest}-g0"]
    size = view.fit(4096)
    records = {name: Record(size, tag) for tag, name in enumerate([*kept, *gone])}
    view.store(*records.items())
    elsewhere = store.elsewhere().open()
    elsewhere.store((gone[0], Record(size, 1)))
    absent = [folder, store.name(), f"{folder}/y"]
    asked = [gone[0], absent[0], gone[1], absent[1], gone[2], absent[2]]
    answers = dict(zip(asked, remove(view, *asked), strict=True))
    for name in gone:
        require(answers[name] is DeleteStatus.DELETED, f"DELETED for {name}", answers[name])
        view.check_missing(name, size, note=f"after a delete of {len(asked)} names, of which it was one", breaks="KV-DELETE-01")
    for name in absent:
        require(answers[name] is DeleteStatus.ABSENT, f"ABSENT for {name}, which is no record", answers[name])
    for name in kept:
        view.check_found(name, records[name], note=f"after a delete of {gone} and {absent}")
    elsewhere.check_found(gone[0], Record(size, 1), note="after a delete of that name in another location")


@proves("KV-DELETE-04")
def test_a_deleted_record_is_stored_anew(store: Store, view: View) -> None:
    other, name = store.open(), store.name()
    for turn in range(4):
        record = Record(view.fit(4096 * (turn + 1)), turn)
        by = (view, other)[turn % 2]
        result = by.put(name, record, Mode.CREATE)
        when = f"after it was deleted {turn} times" if turn else "for the first time"
        require(result.status is PutStatus.STORED, f"STORED from CREATE of {name} {when}", result)
        for one in (view, other):
            one.check_found(name, record, note=f"stored {when}")
        [deleted] = remove(view, name)
        require(deleted is DeleteStatus.DELETED, f"DELETED for {name}, {when}", deleted, breaks="KV-DELETE-01")


@proves("KV-DELETE-05")
def test_a_get_that_races_with_a_delete_finds_all_or_nothing(store: Store, view: View) -> None:
    reader = _Reader(store.open())
    # Large ones take long to read, small ones give many races.
    sizes = [view.fit(size) for size in (4096, 1 << 20, 4 << 20)]
    end_s = time.monotonic() + RACE_S
    try:
        for turn in range(RACES):
            name, record = store.name(), Record(sizes[turn % len(sizes)], turn)
            view.store((name, record))
            reader.read(name, record)
            # Once it has read the record it is about to read it again.
            reader.has_read.wait(LOOK_S)
            time.sleep(store.random.uniform(0.0, 0.004))
            [deleted] = remove(view, name)
            require(deleted is DeleteStatus.DELETED, f"DELETED for {name}", deleted, breaks="KV-DELETE-01")
            if reader.failure or (turn + 1 >= FEWEST and time.monotonic() >= end_s):
                break
    finally:
        reader.stop()
    if reader.failure:
        raise reader.failure


class _Reader:
    """A thread that reads the record it was last told, again and again, until it is stopped or got a wrong answer.

    Attributes:
        failure: The wrong answer.
        has_read: Set once it has read what it was last told.
    """

    def __init__(self, view: View) -> None:
        self.failure: ConformanceFailure | None = None
        self.has_read = threading.Event()
        self._view = view
        self._wanted: tuple[str, Record] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kvstore-conformance-reader", daemon=True)
        self._thread.start()

    def read(self, name: str, record: Record) -> None:
        self._wanted = (name, record)
        self.has_read.clear()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(READER_S)

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                if (wanted := self._wanted) is None:
                    self._stop.wait(0.001)
                    continue
                self._one(*wanted)
                if wanted is self._wanted:
                    self.has_read.set()
        except ConformanceFailure as failure:
            self.failure = failure
            self.has_read.set()

    def _one(self, name: str, record: Record) -> None:
        note = "while another view deleted it"
        try:
            got = self._view.get(name, record.size)
        except CallRaised as raised:
            raise ConformanceFailure(f"FOUND or MISSING for {name}", raised.seen, note=note) from raised
        status = got.result.status
        if status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT):
            return
        require(status in (GetStatus.FOUND, GetStatus.MISSING), f"FOUND or MISSING for {name}", got.result, note=note)
        if status is GetStatus.FOUND and got.bytes != record.bytes:
            raise ConformanceFailure(f"the whole of {name}, or MISSING", show(got.bytes), note=note)
