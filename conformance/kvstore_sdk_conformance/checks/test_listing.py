"""Profile listing: a walk shows what is there."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvstore_sdk.backend import ListEntry, Mode, PutStatus, SupportsDelete
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require
from kvstore_sdk_conformance.steps import is_lost, remove
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

# `-` and `.` come before `/`, and `0` after it: as text these are in another order than as paths.
PLAIN = ("a", "a-d", "a-b/c", "a.b/c", "a0", "b/c/d/e", "b/c/d-e", "b/c-d", "b/c.d", "b/c0", "B/c", "_/x", "-", "c/0", "c/00", "c/1")
PAGES = 10_000
WALK_S = 30.0
WRITER_S = 60.0
LARGE = 8 << 20
FRACTIONS = (0.2, 0.5, 0.8)

MANY = 1100
"""Of one more page than the default asks for."""


@proves("KV-LIST-01")
def test_a_walk_shows_every_record_once_with_its_size(store: Store, view: View) -> None:
    elsewhere = store.elsewhere().open()
    elsewhere.store((store.name(), Record(view.fit(4096), 1)))
    _require_shown(view.walk(), {}, "before anything was stored here")
    sizes = _stored(store, view, 4)
    _require_shown(view.walk(), sizes, "in one page")
    name = next(iter(sizes))
    sizes[name] = view.fit(65536)
    view.store((name, Record(sizes[name], 99)), mode=Mode.REPLACE)
    for limit in (7, 3):
        _require_shown(view.walk(limit=limit), sizes, f"in pages of {limit}")
    # More than one page of the default length, and of what databases and object stores give at once.
    if view.capabilities.max_batch >= 16 and view.room_for(MANY, view.fit(1)) == MANY:
        many = {name: view.fit(1) for name in store.names(MANY)}
        view.store(*((name, Record(size, 1)) for name, size in many.items()))
        _require_shown(view.walk(), sizes | many, f"after {MANY} more were stored")


@proves("KV-LIST-02")
def test_a_prefix_is_text_that_may_end_anywhere(store: Store, view: View) -> None:
    sizes = _stored(store, view, 2)
    sdk = max(sizes, key=len)
    prefixes = [
        "a",
        "a-",
        "a.b/",
        "b",
        "b/",
        "b/c",
        "b/c/",
        "b/c/d",
        "b/c-",
        "c/0",
        "c/00",
        "-",
        "B",
        "v",
        "v1/",
        "x",
        "b/x",
        "a/",
        "c/000",
        # What a pattern takes for any character.
        "a_",
        "b.",
        "_",
    ]
    prefixes += [sdk[:10], sdk[: sdk.rindex("/")], sdk[: sdk.rindex("/") + 1], sdk[: sdk.rindex("/") + 9], sdk, f"{sdk}0"]
    for prefix in prefixes:
        found = view.walk(prefix, limit=4)
        wanted = {name: size for name, size in sizes.items() if name.startswith(prefix)}
        _require_shown(found, wanted, f"under the prefix {prefix!r}", breaks=None)


@proves("KV-LIST-03")
def test_a_page_holds_at_most_its_limit_and_a_walk_ends(store: Store, view: View) -> None:
    names = store.names(7)
    view.store(*((name, Record(view.fit(64), tag)) for tag, name in enumerate(names)))
    for limit, prefix in itertools.product((1, 2, 3, 6, 7, 8), ("", "v1/0")):
        if prefix and limit > 2:
            continue
        cursor, end_s = None, time.monotonic() + WALK_S
        for number in range(PAGES):
            page = view.page(prefix, cursor, limit)
            expected = f"at most {limit} records in page {number + 1} of a walk with that limit"
            require(len(page.entries) <= limit, expected, f"{len(page.entries)} records")
            cursor = page.cursor
            if cursor is None or time.monotonic() >= end_s:
                break
        expected = f"the end of a walk of {len(names)} records, {limit} a page"
        require(cursor is None, expected, f"the cursor {cursor!r} still after {number + 1} pages")


@proves("KV-LIST-04")
def test_what_stays_is_shown_once_while_others_come_and_go(store: Store, view: View) -> None:
    size = view.fit(64)
    names = store.names(24)
    staying, going = names[::2], names[1::2]
    for limit in (1, 3):
        view.store(*((name, Record(size, 1)) for name in names))
        come: list[str] = []
        shown: list[str] = []
        cursor = None
        for number in range(PAGES):
            page = view.page("", cursor, limit)
            shown += [entry.name for entry in page.entries]
            cursor = page.cursor
            if cursor is None:
                break
            if number < len(staying):
                # The last one of the page above all: a cursor may be its name.
                leaving = [entry.name for entry in page.entries[-1:] if entry.name in going] + going[number : number + 1]
                if isinstance(view.backend, SupportsDelete):
                    remove(view, *dict.fromkeys(leaving))
                come.append(store.name())
                view.store((come[-1], Record(size, 2)))
                view.store((staying[number], Record(view.fit(128), 3)), mode=Mode.REPLACE)
        require(cursor is None, "a walk that ends", f"the cursor {cursor!r} after {PAGES} pages", breaks="KV-LIST-03")
        times = Counter(shown)
        note = f"pages of {limit}; between them records were deleted, created and replaced"
        for name in staying:
            require(times[name] == 1, f"{name}, which was there all the time, once", f"{times[name]} times", note=note)
        if isinstance(view.backend, SupportsDelete):
            remove(view, *come)


@proves("KV-LIST-05")
def test_parts_of_running_and_failed_puts_are_not_listed(store: Store, view: View) -> None:
    other, size = store.open(), view.fit(LARGE)
    sizes = {store.name(): view.fit(4096) for _ in range(2)}
    view.store(*((name, Record(one, 1)) for name, one in sizes.items()))
    names = store.names(4)
    took_s = 0.0
    for number, name in enumerate(names):
        writer = _Writer(other, name, Record(size, number))
        while not writer.ended:
            _require_parts_hidden(view.walk(), sizes, {name: {size}}, "while a put was running")
        writer.join()
        took_s = writer.took_s
        sizes[name] = size
    # A replace, during which either size is right.
    shorter = view.fit(4096)
    writer = _Writer(other, names[0], Record(shorter, 9), Mode.REPLACE)
    while not writer.ended:
        _require_parts_hidden(view.walk(), sizes, {names[0]: {size, shorter}}, "while a replace was running")
    writer.join()
    sizes[names[0]] = shorter
    # Puts that do not get the time they need.
    for fraction in (0.0, *FRACTIONS):
        name = store.name()
        result = other.put(name, Record(size, 20), timeout_s=fraction * took_s)
        # Whether it may be there at all is not the question here, nor what it answered.
        _require_parts_hidden(view.walk(), sizes, {name: {size}}, f"after a put that answered {result.status.name}")
        sizes[name] = size


class _Writer:
    """A thread that puts one record."""

    def __init__(self, view: View, name: str, record: Record, mode: Mode = Mode.CREATE) -> None:
        self.took_s = 0.0
        self._problem: ConformanceFailure | None = None
        self._thread = threading.Thread(target=self._put, args=(view, name, record, mode), name="kvstore-conformance-writer", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end.

        Raises:
            ConformanceFailure: the record was not stored.
        """
        self._thread.join(WRITER_S)
        if self._problem:
            raise self._problem

    def _put(self, view: View, name: str, record: Record, mode: Mode) -> None:
        begun_s = time.monotonic()
        try:
            result = view.put(name, record, mode)
            self.took_s = time.monotonic() - begun_s
            require(result.status is PutStatus.STORED or is_lost(result), f"STORED for {name}", result, breaks="KV-CORE-01")
        except CallRaised as raised:
            self._problem = ConformanceFailure(f"STORED for {name}", raised.seen, breaks="KV-CORE-01")
        except ConformanceFailure as failure:
            self._problem = failure


def _stored(store: Store, view: View, count: int) -> dict[str, int]:
    """Some records of any name and some as the SDK has them, each of a size of its own."""
    names = [*PLAIN, *(store.name(group) for group in range(count))]
    store.random.shuffle(names)
    sizes = {name: view.fit(64 * (number + 1)) for number, name in enumerate(names)}
    view.store(*((name, Record(size, number)) for number, (name, size) in enumerate(sizes.items())))
    return sizes


def _require_shown(found: Sequence[ListEntry], sizes: dict[str, int], how: str, *, breaks: str | None = None) -> None:
    times = Counter(entry.name for entry in found)
    twice = [name for name, count in times.items() if count > 1]
    require(not twice, f"every record once in a walk {how}", f"{twice} more than once", breaks=breaks)
    missing, strange = sorted(set(sizes) - set(times)), sorted(set(times) - set(sizes))
    require(not missing, f"{len(sizes)} records in a walk {how}", f"{len(missing)} are missing: {missing[:4]}", breaks=breaks)
    require(not strange, f"{len(sizes)} records in a walk {how}", f"others as well: {strange[:4]}", breaks=breaks)
    wrong = [f"{entry.name} of {entry.size_bytes} bytes" for entry in found if sizes[entry.name] != entry.size_bytes]
    require(not wrong, "the size of every record", f"{wrong[:4]}; {[sizes[entry.name] for entry in found][:4]} were stored", breaks=breaks)


def _require_parts_hidden(found: Sequence[ListEntry], sizes: dict[str, int], running: dict[str, set[int]], when: str) -> None:
    for entry in found:
        allowed = running.get(entry.name) or {sizes.get(entry.name, -1)}
        require(entry.size_bytes in allowed, f"whole records alone in a listing {when}", f"{entry.name} of {entry.size_bytes} bytes")
