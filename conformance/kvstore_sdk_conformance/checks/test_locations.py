"""Profile core: a location is one store, and another location another."""

from __future__ import annotations

from kvstore_sdk.backend import Mode
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View


@proves("KV-CORE-18")
def test_a_location_that_is_opened_again_is_the_same_store(store: Store, view: View) -> None:
    size = view.fit(4096)
    before, after = store.name(), store.name()
    view.store((before, Record(size, 1)))
    other = store.open()
    other.check_found(before, Record(size, 1), note="stored before the location was opened again, which is still open")
    other.store((after, Record(size, 2)))
    view.check_found(after, Record(size, 2), note="stored in the second view")
    other.close()
    view.check_found(before, Record(size, 1), note="after the second view was closed")
    view.close()
    again = store.open()
    for name, tag in ((before, 1), (after, 2)):
        again.check_found(name, Record(size, tag), note="after every view was closed, and the location opened again")


@proves("KV-CORE-19")
def test_another_location_is_another_store(store: Store, view: View) -> None:
    size, name = view.fit(4096), store.name()
    other = store.elsewhere().open()
    view.store((name, Record(size, 1)))
    other.check_missing(name, size, note="stored in another location")
    other.store((name, Record(size, 2)), mode=Mode.REPLACE)
    view.check_found(name, Record(size, 1), note="after a record of that name was stored in another location")
