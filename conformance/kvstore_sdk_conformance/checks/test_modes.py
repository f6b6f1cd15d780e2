"""Profile core: how a put treats what is there, and where nothing may be put."""

from __future__ import annotations

import contextlib

from kvstore_sdk.backend import BackendError, Mode, PutStatus, ReadOnlyError
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, require
from kvstore_sdk_conformance.steps import is_lost
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import CALL_S


@proves("KV-CORE-10")
def test_create_of_what_is_there_says_what_it_did(store: Store, view: View) -> None:
    size = view.fit(4096)
    for other in sorted({size, view.fit(8192), view.fit(1)}):
        name = store.name()
        view.store((name, Record(size, 1)))
        # One call alone: a repeated one, after an answer that was lost, could answer EXISTS for the new record.
        result = view.put(name, Record(other, 2), Mode.CREATE, timeout_s=CALL_S)
        if is_lost(result):
            continue
        require(result.status in (PutStatus.EXISTS, PutStatus.STORED), f"EXISTS or STORED for {name}, which is there", result)
        kept = result.status is PutStatus.EXISTS
        note = f"CREATE answered {result.status.name}, so the {'old' if kept else 'new'} record must be there"
        view.check_found(name, Record(size, 1) if kept else Record(other, 2), note=note)


@proves("KV-CORE-11")
def test_exists_is_answered_only_for_what_is_visible_and_to_create(store: Store, view: View) -> None:
    size = view.fit(4096)
    new, old = store.name(), store.name()
    view.store((old, Record(size, 1)))
    # Looked for before it is stored: a look must leave nothing behind that looks like a record.
    view.exists(new)
    with contextlib.suppress(CallRaised):
        view.get(new, size)
    result = view.put(new, Record(size, 2), Mode.CREATE)
    require(result.status is not PutStatus.EXISTS, f"STORED for {new}, which is not there", result)
    late = store.name()
    # One that was given up must not leave a lock behind, or a note that the record is there.
    gone = None
    with contextlib.suppress(CallRaised):
        gone = view.put(late, Record(size, 4), Mode.REPLACE, timeout_s=-1.0)
    if gone is not None and gone.status is PutStatus.TIMED_OUT:
        result = view.put(late, Record(size, 5), Mode.CREATE)
        require(result.status is not PutStatus.EXISTS, f"STORED for {late}, of which a REPLACE timed out", result)
    for name, what in ((old, "which is there"), (store.name(), "which is not there")):
        result = view.put(name, Record(size, 3), Mode.REPLACE)
        require(result.status is not PutStatus.EXISTS, f"STORED from a REPLACE of {name}, {what}", result)


@proves("KV-CORE-12")
def test_replace_takes_the_place_of_what_is_there(store: Store, view: View) -> None:
    sizes = [view.fit(size) for size in (8192, 4096, 4096, 12288, 1, 65536)]
    name = store.name()
    for tag, size in enumerate(sizes):
        result = view.put(name, Record(size, tag), Mode.REPLACE)
        require(result.status is PutStatus.STORED, f"STORED from REPLACE number {tag + 1} of {name}", result)
        view.check_found(name, Record(size, tag), note=f"after REPLACE number {tag + 1}; sizes were {sizes[: tag + 1]}")


@proves("KV-CORE-13")
def test_a_put_may_be_repeated(store: Store, view: View) -> None:
    size = view.fit(8192)
    for mode in Mode:
        name, record = store.name(), Record(size, 7)
        for time in range(3):
            result = view.put(name, record, mode)
            require(result.status in (PutStatus.STORED, PutStatus.EXISTS), f"STORED or EXISTS for put number {time + 1} of {name}", result)
            view.check_found(name, record, note=f"after put number {time + 1} of the same bytes, {mode}")


@proves("KV-CORE-23")
def test_a_read_only_backend_refuses_every_put(store: Store, view: View) -> None:
    for mode in Mode:
        name = store.name()
        error: BackendError | BaseException | None
        try:
            result = view.put(name, Record(view.fit(4096), 1), mode)
        except CallRaised as raised:
            error = raised.error
        else:
            require(result.status is PutStatus.FAILED, "FAILED", result)
            error = result.error
        require(isinstance(error, ReadOnlyError), "ReadOnlyError", repr(error))
        view.check_missing(name, note="after a put was refused")
