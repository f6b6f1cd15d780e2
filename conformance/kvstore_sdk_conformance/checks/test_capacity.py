"""Profile capacity: how much is stored, and how much may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from kvstore_sdk.backend import Advice, BackendError, DeleteStatus, GetStatus, Mode, NoSpaceError, PutStatus, Usage
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.counting import is_counted, most_bytes
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, NotApplicable, require, show
from kvstore_sdk_conformance.steps import TRIES, is_lost, remove, until
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

COUNT_S, SETTLE_S = 5.0, 10.0
"""For what a store counts, and what it removes, in the background."""
UNIT = 256 << 10
RECORDS = 6
STORM = 1.6
"""Of the capacity: that much is put."""
STORM_S = 60.0
FILL = 48
"""Records that fill a bounded store, about."""
MOST_RECORDS, MOST_REPEATS = 5000, 32
TOLERANCE = 1.02
WRITERS = 4
FRACTIONS = (0.0, 0.3, 0.6)


@proves("KV-CAP-01")
def test_usage_counts_every_record_once(store: Store, view: View) -> None:
    elsewhere = store.elsewhere().open()
    unit = view.fit(UNIT)
    elsewhere.store((store.name(), Record(unit, 1)))
    before = view.usage()
    require(before.records == 0, "no record in usage of a new location", before)
    names = store.names(RECORDS)
    sizes = {name: (unit, view.fit(4096), view.fit(1))[number % 3] for number, name in enumerate(names)}
    began_s = time.monotonic()
    view.store(*((name, Record(size, number)) for number, (name, size) in enumerate(sizes.items())))
    took_s = (time.monotonic() - began_s) / RECORDS
    _require_counted(view, before, sizes, "after they were stored")
    # So often that one more record each time is more than what all of them may cost beside their bytes.
    beside_bytes = most_bytes(sizes, 0) - sum(sizes.values())
    for _ in range(min(MOST_REPEATS, max(3, beside_bytes // unit))):
        for mode in Mode:
            view.store((names[0], Record(unit, 0)), mode=mode)
    _require_counted(view, before, sizes, "after one was put again and again, with the same bytes")
    for turn, size in enumerate((view.fit(1), unit, view.fit(4096)), 50):
        view.store((names[0], Record(size, turn)), mode=Mode.REPLACE)
        sizes[names[0]] = size
        _require_counted(view, before, sizes, f"after one was replaced by one of {size} bytes")
    for fraction in FRACTIONS:
        name = store.name()
        result = view.put(name, Record(unit, 7), timeout_s=fraction * took_s)
        if result.status in (PutStatus.STORED, PutStatus.EXISTS):
            sizes[name] = unit
        elif is_lost(result) or view.exists(name) == [True]:
            # It may be there: then it has to be counted, so it is made sure of.
            view.store((name, Record(unit, 7)))
            sizes[name] = unit
        _require_counted(view, before, sizes, f"after a put that answered {result.status.name}")
    other = store.open()
    _require_counted(other, before, sizes, "in a second view")
    view.close()
    other.close()
    _require_counted(store.open(), before, sizes, "after the location was closed and opened again")


@proves("KV-CAP-02")
def test_usage_does_not_count_what_was_deleted(store: Store, view: View) -> None:
    unit, before = view.fit(UNIT), view.usage()
    sizes = dict.fromkeys(store.names(RECORDS), unit)
    view.store(*((name, Record(unit, number)) for number, name in enumerate(sizes)))
    _require_counted(view, before, sizes, "after they were stored", breaks="KV-CAP-01")
    # One of them twice, and one that was never there: neither may be taken off again.
    for some in (list(sizes)[:1], list(sizes)[:1], [*list(sizes)[1:4], store.name()], list(sizes)[4:]):
        answers = remove(view, *some)
        bad = [answer for answer in answers if not isinstance(answer, DeleteStatus)]
        require(not bad, "DELETED or ABSENT", bad, breaks="KV-DELETE-01")
        deleted = [name for name in some if name in sizes]
        sizes = {name: size for name, size in sizes.items() if name not in some}
        _require_counted(view, before, sizes, f"after {len(deleted)} more were deleted")


@proves("KV-CAP-03")
def test_a_store_stays_within_its_capacity(store: Store, view: View) -> None:
    capacity = _capacity(view)
    size, count = _filling(view, capacity)
    # Two views, for what each of them does not know of the other; each within the calls that it takes.
    writers = min(WRITERS, 2 * view.capabilities.max_concurrency)
    views = [view, store.open()]
    names = store.names(count)
    storm = [_Putter(views[number % 2], names[number::writers], size) for number in range(writers)]
    most = int(capacity * TOLERANCE)
    end_s = time.monotonic() + STORM_S
    try:
        while any(putter.running for putter in storm) and time.monotonic() < end_s:
            usage = view.usage()
            expected = f"at most {capacity} bytes used, 2 % above it, and {writers} records of {size} bytes that are being put"
            require(usage.used_bytes <= most + writers * size, expected, usage)
            time.sleep(0.005)
    finally:
        for putter in storm:
            putter.stop()
    for putter in storm:
        putter.check()
    until(lambda: view.usage().used_bytes <= most, SETTLE_S)
    usage = view.usage()
    require(usage.used_bytes <= most, f"at most {capacity} bytes used, and 2 %, once nothing was put any more", usage)
    # A count that is wrong must not hide what is there.
    until(lambda: view.usage().records == _count(view, names), SETTLE_S)
    there, usage = _count(view, names), view.usage()
    require(there * size <= most, f"records of at most {capacity} bytes, and 2 %", f"{there} of {size} bytes each: {there * size}")
    require(usage.records == there, f"{there} records in usage, as exists says", usage, breaks="KV-CAP-01")
    store.figures["capacity_used"] = usage.used_bytes / capacity


@proves("KV-CAP-04")
def test_a_full_store_makes_room_or_says_that_there_is_none(store: Store, view: View) -> None:
    capacity = _capacity(view)
    size, count = _filling(view, capacity)
    refused, end_s = 0, time.monotonic() + STORM_S
    for number, name in enumerate(store.names(count)):
        if time.monotonic() > end_s:
            if number * size <= capacity and not refused:
                raise NotApplicable(f"{number} records of {size} bytes took {STORM_S:g} s, and do not fill a capacity of {capacity}")
            break
        record = Record(size, number)
        how = f"put number {number + 1} of {size} bytes"
        if _put_or_refuse(view, name, record, f"STORED, or FAILED with NoSpaceError, for {how}"):
            got = view.get(name, size)
            require(got.result.status is GetStatus.FOUND, f"FOUND for {name}, which was STORED in a full store", got.result, note=how)
            require(got.bytes == record.bytes, f"the bytes of {name}", got.bytes, note=how)
        else:
            refused += 1
            view.check_missing(name, size, note=f"{how} was refused", breaks="KV-ATOM-03")
    store.figures["refused"] = float(refused)


@proves("KV-CAP-05")
def test_what_can_never_fit_is_refused_and_costs_nothing(store: Store, view: View) -> None:
    capacity = _capacity(view)
    step = view.capabilities.align_bytes
    size = (capacity // step + 1) * step
    small = view.fit(max(1, capacity // FILL))
    records = {name: Record(small, number) for number, name in enumerate(store.names(min(8, capacity // small // 3)))}
    view.store(*records.items())
    kept = next(iter(records))
    for name, mode in ((store.name(), Mode.CREATE), (store.name(), Mode.REPLACE), (kept, Mode.REPLACE)):
        try:
            result = view.put(name, Record(size, 1), mode)
        except CallRaised as raised:
            # With what a record above max_record_bytes is refused is another requirement's.
            refused = isinstance(raised.error, BackendError) or size > view.capabilities.max_record_bytes
            require(refused, f"a BackendError for a record of {size} bytes", raised.seen)
        else:
            expected = f"FAILED for a record of {size} bytes in a store of {capacity}"
            require(result.status is PutStatus.FAILED, expected, result)
            assert result.error is not None
            require(result.error.advice is not Advice.RETRY, f"an error that is not tried again in vain, {expected}", show(result))
        for other, record in records.items():
            view.check_found(other, record, note=f"after a record of {size} bytes was refused, which can never fit")


def _require_counted(view: View, before: Usage, sizes: dict[str, int], when: str, *, breaks: str | None = None) -> None:
    """Usage counts these records, each once."""
    until(lambda: is_counted(view.usage(), sizes, before.used_bytes), COUNT_S)
    usage = view.usage()
    least, most = sum(sizes.values()), most_bytes(sizes, before.used_bytes)
    expected = f"{len(sizes)} records in usage, of {least} bytes, or {most} with what each may cost beside them, {when}"
    require(is_counted(usage, sizes, before.used_bytes), expected, usage, breaks=breaks)


def _capacity(view: View) -> int:
    capacity_bytes = view.usage().capacity_bytes
    if capacity_bytes is None:
        raise ConformanceFailure("a capacity, as at the first look", "capacity_bytes=None", breaks="KV-CAP-01")
    return capacity_bytes


def _filling(view: View, capacity: int) -> tuple[int, int]:
    """The size of the records that fill the store, and how many of them are more than it takes.

    Raises:
        NotApplicable: so many that it would take for ever.
    """
    size = view.fit(max(1, capacity // FILL))
    count = int(capacity * STORM / size) + 2
    if count > MOST_RECORDS:
        raise NotApplicable(f"it takes {count} records of {size} bytes to fill a capacity of {capacity}; give it less")
    return size, count


def _count(view: View, names: Sequence[str]) -> int:
    """How many of them are there."""
    return sum(answer is True for batch in view.batches(names) for answer in view.exists(*batch))


def _put_or_refuse(view: View, name: str, record: Record, expected: str) -> bool:
    """Whether it was stored; False: there was no room.

    Raises:
        ConformanceFailure: neither.
    """
    for _ in range(TRIES):
        try:
            result = view.put(name, record)
        except CallRaised as raised:
            require(isinstance(raised.error, NoSpaceError), expected, raised.seen)
            return False
        if result.status in (PutStatus.STORED, PutStatus.EXISTS):
            return True
        if not is_lost(result):
            require(isinstance(result.error, NoSpaceError), expected, result)
            return False
    raise ConformanceFailure(expected, show(result))


class _Putter:
    """A thread that puts records one after another, whatever becomes of them."""

    def __init__(self, view: View, names: Sequence[str], size: int) -> None:
        self._view = view
        self._records: Iterator[tuple[str, Record]] = iter([(name, Record(size, number)) for number, name in enumerate(names)])
        self._problem: ConformanceFailure | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._put, name="kvstore-conformance-putter", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(STORM_S)

    def check(self) -> None:
        """Raises: ConformanceFailure: a call did not come to an end as it has to."""
        if self._problem:
            raise self._problem

    def _put(self) -> None:
        for name, record in self._records:
            if self._stopped.is_set():
                return
            try:
                self._view.put(name, record)
            except CallRaised:
                # A full store may raise; what it has to say is another requirement's.
                continue
            except ConformanceFailure as failure:
                self._problem = failure
                return
