"""The calls that a failure shows can be pasted, or are not called a script."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_sdk.backend import Mode, Put
from kvstore_sdk_conformance import store as store_module
from kvstore_sdk_conformance.calls import KEPT, NAMED, Script
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.replay import Store
from kvstore_sdk_conformance.target import Target


def run(script: Script) -> dict[str, Any]:
    """What the script defines, run as a report tells to."""
    found: dict[str, Any] = {"Mode": Mode, "Record": Record, "store": Store("memory:")}
    try:
        exec("\n".join(script.lines), found)
        # What it leaves in the store, before that is removed.
        found["records"] = {entry.name: entry.size_bytes for entry in found["store"].open().walk()}
        return found
    finally:
        found["store"].discard()


@pytest.fixture
def store() -> Any:
    made = Store("memory:")
    yield made
    made.discard()


def test_a_short_script_has_every_name_and_does_what_was_done(store: Store) -> None:
    view, other = store.open(), store.open()
    one, two = store.names(2)
    view.put(one, Record(8192, 1), cuts=[4096])
    other.put(two, Record(10, 2), Mode.REPLACE, backwards=True)
    view.get(one, 4096, 4096, shift=512)
    other.delete(one)
    script = store.calls.script()
    assert script.is_whole
    assert script.lines[:2] == [f"n1 = {one!r}", f"n2 = {two!r}"]
    assert run(script)["records"] == {two: 10}


@pytest.mark.parametrize("count", [NAMED + 1, 41, 200])
def test_a_batch_is_a_comprehension_and_stores_as_much(store: Store, count: int) -> None:
    view = store.open()
    names = store.names(count)
    view.put_all([(name, Record(100, 7 + number)) for number, name in enumerate(names)])
    view.put_all([(name, Record(300, 5)) for name in names[2:8]], Mode.REPLACE)
    view.get_all([(name, 100) for name in names[5:]])
    view.exists(*names)
    view.delete(*names[:2])
    script = store.calls.script()
    assert script.is_whole
    assert script.lines == [
        f"names = store.names({count})",
        "a = store.open()",
        f"a.put_all([(name, Record(size=100, tag=7 + number)) for number, name in enumerate(names[0:{count}])])",
        "a.put_all([(name, Record(size=300, tag=5)) for name in names[2:8]], Mode.REPLACE)",
        f"a.get_all([(name, 100) for name in names[5:{count}]])",
        f"a.exists(*names[0:{count}])",
        "a.delete(*names[0:2])",
    ]
    assert sorted(run(script)["records"].values()) == [100] * (count - 8) + [300] * 6


def test_what_opened_a_view_stays_when_its_calls_are_many(store: Store) -> None:
    view, unused = store.open(), store.open()
    for _ in range(3 * KEPT):
        view.exists(store.name())
    assert unused.capabilities
    script = store.calls.script()
    assert "a = store.open()" in script.lines
    assert "b = store.open()" not in script.lines
    assert len([line for line in script.lines if line.startswith("a.")]) == KEPT
    assert not script.is_whole, "it does not begin at the beginning"
    run(script)


def test_another_location_is_another_store_in_the_script_as_well(store: Store) -> None:
    view, other = store.open(), store.elsewhere().open()
    name = store.name()
    view.put(name, Record(10, 1))
    other.put(name, Record(20, 1))
    script = store.calls.script()
    assert script.lines[-4:-2] == ["elsewhere = store.elsewhere()", "b = elsewhere.open()"]
    assert run(script)["records"] == {name: 10}


def test_what_no_call_of_a_view_does_is_told_and_is_no_script(store: Store) -> None:
    view, name = store.open(), store.name()
    with view.lend([10]) as arena:
        view.raw("put", [Put(name, tuple(arena.buffers))], 5.0)
    script = store.calls.script()
    assert script.lines[-1] == "# a.put(n1), with a deadline 5 s away"
    assert not script.is_whole


def test_a_line_without_end_is_cut_and_is_no_script(store: Store) -> None:
    view, names = store.open(), store.names(100)
    store.random.shuffle(names)
    view.exists(*names[::2])
    view.exists(*reversed(names))
    script = store.calls.script()
    assert max(map(len, script.lines)) < 400
    assert not script.is_whole
    run(script)


def test_what_another_process_is_told_is_said(store: Store) -> None:
    files = store_module.Store(Target("fs"), "1")
    try:
        files.open()
        child = files.child()
        child.exists(files.names(5))
        child.kill()
        script = files.calls.script()
    finally:
        files.discard()
    assert script.lines[2:] == [
        "a = store.open()",
        "# another process opens the location",
        "# another process: exists(names=[n1, n2, and 3 more])",
        "# another process: kill -9",
    ]
    assert not script.is_whole
