"""Profile core: what a call answers, item by item, and what a backend says of itself."""

from __future__ import annotations

import contextlib
from typing import Any

from kvstore_sdk.backend import GetStatus, Mode, Put, PutStatus, SupportsSettle
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require, show
from kvstore_sdk_conformance.steps import is_lost
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

MOST_ITEMS = 10_000
"""Of one call; more would be a matter of memory."""


@proves("KV-CORE-02")
def test_results_are_one_for_each_item_in_order(store: Store, view: View) -> None:
    # Enough for a client that goes to several servers with a large batch, and no pattern that reads the same from behind.
    count = min(41, view.capabilities.max_batch)
    size = view.fit(4096)
    names = store.names(count)
    stored = [name for number, name in enumerate(names) if number == 1 or store.random.random() < 0.4]
    # The form of each answer is judged by the view; how a miss, a refusal or a bad item is answered has requirements of its own.
    for tag, name in enumerate(stored):
        with contextlib.suppress(CallRaised):
            view.put(name, Record(size, tag))
    with contextlib.suppress(CallRaised):
        alone = [view.exists(name)[0] for name in names]
        _check_order("exists", alone, view.exists(*names), "its names")
    with contextlib.suppress(CallRaised):
        found = [view.get(name, size).result.status.name for name in names]
        _check_order("get", found, [got.result.status.name for got in view.get_all([(name, size) for name in names])], "its items")
    if view.capabilities.read_only:
        return
    # The names that are new were not looked for before.
    names = [name if name in stored else store.name() for name in names]
    with contextlib.suppress(CallRaised):
        put = view.put_all([(name, Record(size, tag)) for tag, name in enumerate(names)])
        told = [result.status is PutStatus.EXISTS for result in put]
        there = [name in stored for name in names]
        require(
            told == there or sorted(told) != sorted(there),
            "EXISTS from put in the places of what is there",
            [result.status for result in put],
        )


def _check_order(op: str, alone: list[Any], together: list[Any], items: str) -> None:
    # Other answers than before are another fault than answers in another order.
    if sorted(map(str, alone)) == sorted(map(str, together)):
        require(alone == together, f"{show(alone)} from {op}, in the order of {items}", together)


@proves("KV-CORE-03")
def test_exists_tells_what_is_there(store: Store, view: View) -> None:
    names = store.names(4)
    size = view.fit(4096)
    for name in names:
        [answer] = view.exists(name)
        require(answer is False, f"False for {name}, which was never stored", answer)
    if view.capabilities.read_only:
        return
    view.store(*((name, Record(size, tag)) for tag, name in enumerate(names[:2])))
    for name in names:
        [answer] = view.exists(name)
        require(answer is (name in names[:2]), f"{name in names[:2]} for {name}", answer)
    # What a store that keeps folders, or looks for prefixes, takes for a record.
    beside = [names[0].rpartition("/")[0], names[0][:-1], f"{names[0]}0"]
    for name in beside:
        [answer] = view.exists(name)
        require(answer is False, f"False for {name}, which was never stored", answer, note=f"{names[0]} was stored")


@proves("KV-CORE-04")
def test_get_of_a_missing_record_is_a_result(store: Store, view: View) -> None:
    for size in (view.fit(1), view.fit(4096)):
        name = store.name()
        got = view.get(name, size)
        require(got.result.status is GetStatus.MISSING, f"MISSING for {name}, which was never stored", got.result)
    if view.capabilities.read_only:
        return
    name, size = store.name(), view.fit(4096)
    view.store((name, Record(size, 1)))
    for beside in (name[:-1], f"{name}0"):
        got = view.get(beside, size)
        require(got.result.status is GetStatus.MISSING, f"MISSING for {beside}, which was never stored", got.result, note=f"{name} was")


@proves("KV-CORE-06")
def test_a_call_takes_as_many_items_as_declared(store: Store, view: View) -> None:
    count = min(MOST_ITEMS, view.capabilities.max_batch)
    size = view.fit(1)
    names = store.names(count)
    if view.capabilities.read_only:
        require(view.exists(*names) == [False] * count, f"{count} times False", "something else")
        return
    results = view.put_all([(name, Record(size, tag)) for tag, name in enumerate(names)])
    bad = [result for result in results if result.status is not PutStatus.STORED]
    require(not bad, f"STORED for each of {count} items", f"{len(bad)} others, {bad[:1]}")
    there = view.exists(*names)
    require(there == [True] * count, f"True for each of {count} names", f"{there.count(True)} times True")
    found = view.get_all([(name, size) for name in names])
    wrong = [name for (tag, name), got in zip(enumerate(names), found, strict=True) if got.bytes != Record(size, tag).bytes]
    require(not wrong, f"the right record for each of {count} items", f"{len(wrong)} wrong ones, {wrong[:1]}")


@proves("KV-CORE-17")
def test_a_bad_item_fails_alone(store: Store, view: View) -> None:
    size, count = view.fit(4096), min(3, view.capabilities.max_batch)
    good, old, missing = store.names(count - 1), store.name(), store.name()
    view.store((old, Record(size, 8)))
    # Between good ones, where there is room: what follows a failure is lost more easily than what goes before it.
    place = 1 if count > 2 else 0
    puts = [(name, Record(size, tag)) for tag, name in enumerate(good)]
    puts.insert(place, (old, Record(size, 9)))
    try:
        results = view.put_all(puts)
    except CallRaised as raised:
        raise ConformanceFailure("an answer for each item of a put, one of which is there already", raised.seen) from raised
    statuses = [result.status for (name, _), result in zip(puts, results, strict=True) if name in good]
    require(statuses == [PutStatus.STORED] * len(good), "STORED for the items beside one that is there already", results)
    gets = [(name, size) for name in good]
    short, long = store.names(2)
    view.store((short, Record(size, 6)))
    view.store((long, Record(view.fit(2 * size), 7)))
    # Missing, and with buffers that are too large and too small.
    for bad, bad_size in dict.fromkeys(((missing, size), (short, view.fit(2 * size)), (long, size))):
        asked = [*gets[:place], (bad, bad_size), *gets[place:]]
        try:
            found = view.get_all(asked)
        except CallRaised as raised:
            raise ConformanceFailure(f"an answer for each item of a get, one of which is {bad!r}", raised.seen) from raised
        for index, (name, got) in enumerate(zip([name for name, _ in asked], found, strict=True)):
            if index != place:
                right = got.result.status is GetStatus.FOUND and got.bytes == Record(size, good.index(name)).bytes
                require(right, f"FOUND with its bytes for an item beside one of {bad!r}", got.result)
    _check_modes_beside_each_other(store, view, size)
    try:
        there = view.exists(*good[:place], missing, *good[place:])
    except CallRaised as raised:
        raise ConformanceFailure("an answer for each item of exists, one of which is missing", raised.seen) from raised
    del there[place]
    require(there == [True] * len(good), "True for the names beside one that is missing", there)


def _check_modes_beside_each_other(store: Store, view: View, size: int) -> None:
    kept, replaced = store.names(2)
    view.store((kept, Record(size, 1)), (replaced, Record(size, 2)))
    store.calls.append(f"# in one call a CREATE of {kept!r} and a REPLACE of {replaced!r}, in both orders")
    for tag, modes in enumerate(({kept: Mode.CREATE, replaced: Mode.REPLACE}, {replaced: Mode.REPLACE, kept: Mode.CREATE}), 3):
        with view.lend([size, size]) as arena:
            for buffer in arena.buffers:
                buffer.view[:] = Record(size, tag).bytes
            puts = [Put(name, (buffer,), mode) for (name, mode), buffer in zip(modes.items(), arena.buffers, strict=True)]
            answers = dict(zip(modes, view.put_items(puts), strict=True))
        if not is_lost(answers[replaced]):
            require(answers[replaced].status is PutStatus.STORED, "STORED from a REPLACE beside a CREATE", answers[replaced])
            view.check_found(replaced, Record(size, tag), note="after a REPLACE beside a CREATE")
        if answers[kept].status is PutStatus.EXISTS:
            view.check_found(kept, Record(size, 1), note="after a CREATE beside a REPLACE answered EXISTS")
        else:
            view.store((kept, Record(size, 1)), mode=Mode.REPLACE)


@proves("KV-CORE-20")
def test_capabilities_do_not_change(store: Store, view: View) -> None:
    before = view.capabilities
    size = view.fit(4096)
    name = store.name()
    if not view.capabilities.read_only:
        view.put(name, Record(size, 1))
    # How it has to be answered is said elsewhere.
    with contextlib.suppress(CallRaised):
        view.get(name, size)
    view.exists(name)
    require(view.backend.capabilities == before, f"{before}", view.backend.capabilities)


@proves("KV-CORE-21")
def test_an_optional_surface_is_whole(view: View) -> None:
    backend = view.backend
    has = {name: getattr(backend, name, None) for name in ("register_region", "unregister_region", "settle", "delete", "list", "usage")}
    for name, method in has.items():
        require(method is None or callable(method), f"{name} to be a method, or not there", repr(method))
    both = [name for name in ("register_region", "unregister_region") if has[name] is not None]
    require(len(both) != 1, "register_region and unregister_region together", f"{both} alone")
    settles = isinstance(backend, SupportsSettle)
    require(settles or not view.capabilities.in_doubt, "settle beside in_doubt=True", "no settle")
