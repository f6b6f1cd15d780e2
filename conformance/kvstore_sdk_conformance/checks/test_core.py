"""Profile core: what every backend promises, in one thread and one process."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from kvstore_sdk.backend import (
    BackendError,
    Get,
    GetStatus,
    InvalidError,
    Mode,
    PutStatus,
    ReadOnlyError,
    SupportsSettle,
    is_valid_name,
)
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, NotApplicable, require, show, show_difference
from kvstore_sdk_conformance.memory import INSIDE
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.steps import is_lost
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import CALL_S

# Around what disks, pages and protocols count in; the largest is added by the check.
SIZES = (1, 2, 511, 512, 513, 4095, 4096, 4097, 8192, 65536, 131071, 1 << 20, (1 << 20) + 1, 5 << 20)


@proves("KV-CORE-01")
def test_get_answers_found_with_exactly_the_bytes_that_were_stored(store: Store, view: View, run: Run) -> None:
    # Half of a bounded store, and all others are a third of it.
    largest = view.fit(run.largest_bytes, 2)
    sizes = sorted({view.fit(size) for size in SIZES} | {largest})
    records = {store.name(): Record(size, tag) for tag, size in enumerate(sizes, 1) if size <= largest}
    # What looks like text, like nothing, or like a hole.
    records |= {store.name(): Record(view.fit(size), tag) for tag in (-1, -2, -3, -4) for size in (2, 4096, 1 << 20)}
    for name, record in records.items():
        result = view.put(name, record)
        require(result.status is PutStatus.STORED, f"STORED for a new record of {record.size} bytes", result)
        view.check_found(name, record)
    # Others that were stored meanwhile must not have changed it.
    for name, record in records.items():
        if record.size < largest or largest <= 5 << 20:
            view.check_found(name, record, note="read again after all others were stored")


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


@proves("KV-CORE-05")
def test_another_size_is_told_with_both_sizes(store: Store, view: View) -> None:
    step = view.capabilities.align_bytes
    sizes = sorted({view.fit(size) for size in (step, 4096, 8192, 65536)})
    for size in sizes:
        name = store.name()
        view.store((name, Record(size, 1)))
        note = f"{name} has {size} bytes"
        for asked in sorted({view.fit(size + delta) for delta in (-4096, -step, step, 4096) if size + delta > 0} - {size}):
            # In two buffers as well: whoever counts the first one only finds what it looks for.
            lengths = [[asked]] + [[size, asked - size]] * (asked > size and view.capabilities.max_parts > 1)
            for some in lengths:
                got = view.get(name, *some)
                expected = f"WRONG_SIZE with size_bytes={size}, asked_bytes={asked} for buffers of {some} bytes"
                require(got.result.status is GetStatus.WRONG_SIZE, expected, got.result, note=note)
                require((got.result.size_bytes, got.result.asked_bytes) == (size, asked), expected, got.result, note=note)
        view.check_found(name, Record(size, 1), note="after gets of other sizes")


@proves("KV-CORE-06")
def test_a_call_takes_as_many_items_as_declared(store: Store, view: View) -> None:
    count = view.capabilities.max_batch
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


@proves("KV-CORE-07")
def test_a_record_is_the_bytes_of_its_parts(store: Store, view: View) -> None:
    step, parts = view.capabilities.align_bytes, view.capabilities.max_parts
    # Parts of one unit, of none, and of most of the record.
    size = view.fit(max(5 * 4096, parts * step))
    units = size // step
    cuts: list[list[int]] = [[step] * (units > 1), [size - step] * (units > 1), [step * (units // 2)] * 2]
    cuts.append(sorted(store.random.sample(range(1, units), min(parts - 1, units - 1))))
    cuts[-1] = [at * step for at in cuts[-1]]
    cuts = [cut for cut in cuts if 0 < len(cut) < parts]
    for tag, (some, backwards) in enumerate(itertools.product(cuts, (False, True)), 1):
        record, name = Record(size, tag), store.name()
        # The order is that of the list: parts may lie anywhere, also the later ones before the earlier ones.
        result = view.put(name, record, cuts=some, backwards=backwards)
        require(result.status is PutStatus.STORED, f"STORED for {len(some) + 1} parts", result)
        view.check_found(name, record, note=f"stored in {len(some) + 1} parts")
        lengths = [end - start for start, end in itertools.pairwise([0, *reversed([size - at for at in some]), size])]
        got = view.get(name, *lengths, backwards=backwards)
        require(got.result.status is GetStatus.FOUND, f"FOUND for buffers of {lengths[:4]}... bytes", got.result)
        require(got.bytes == record.bytes, f"the record in {len(lengths)} buffers, in their order", got.bytes)


@proves("KV-CORE-08")
def test_buffers_of_the_declared_alignment_are_taken_anywhere(store: Store, view: View) -> None:
    step = view.capabilities.align_bytes
    for shift in sorted({0, step, 3 * step, 7 * step, 64 * step} & set(range(0, 4096, step)) | {0}):
        for size in sorted({view.fit(step), view.fit(4096), view.fit(4096 + step), view.fit(12288 - step)}):
            record, name = Record(size, shift + size), store.name()
            result = view.put(name, record, shift=shift)
            where = f"a buffer of {size} bytes, {shift} bytes into a page"
            require(result.status is PutStatus.STORED, f"STORED from {where}", result)
            got = view.get(name, size, shift=shift)
            require(got.result.status is GetStatus.FOUND, f"FOUND into {where}", got.result)
            require(got.bytes == record.bytes, f"the record in {where}", got.bytes)
    if view.capabilities.max_parts > 1 and view.fit(2 * step) > step:
        _check_two_regions(store, view, step)


def _check_two_regions(store: Store, view: View, step: int) -> None:
    name, record = store.name(), Record(view.fit(4096 + step), 5)
    lengths = [step, record.size - step]
    store.calls.append(f"# {name!r} is put from two regions, and got into two others")
    with view.lend(lengths[:1]) as one, view.lend(lengths[1:], shift=step % 4096) as other:
        parts = (*one.buffers, *other.buffers)
        for part, piece in zip(parts, (record.bytes[:step], record.bytes[step:]), strict=True):
            part.view[:] = piece
        [result] = view.put_parts(name, parts)
        require(result.status is PutStatus.STORED, "STORED from parts in two regions", result)
        view.check_found(name, record, note="put from two regions")
        for part in parts:
            part.view[:] = bytes(part.length)
        [found] = view.raw("get", [Get(name, parts)])
        require(found.status is GetStatus.FOUND, "FOUND into buffers in two regions", found)
        seen = b"".join(part.view for part in parts)
        require(seen == record.bytes, "the record in two regions", show_difference(record.bytes, seen))


@proves("KV-CORE-09")
def test_every_valid_name_is_a_record_of_its_own(store: Store, view: View) -> None:
    longest = view.capabilities.max_name_bytes
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
    stem = store.name()
    # What a store that folds case, drops characters, cuts names or reads them as paths, patterns or numbers would confuse.
    names = [
        "a",
        "A",
        "0",
        "00",
        "1e2",
        "100",
        "-",
        "_",
        "a-b",
        "a_b",
        "a.b",
        "ab",
        "a.",
        "a..b",
        "d/a",
        "d_a",
        "d.a",
        "da",
        "d/A",
        "d/a.b",
        "d-a",
        "d/e/a",
        "d/e/A",
    ]
    names += [
        letters,
        letters[::-1],
        "x/" + "/".join("abcdefgh"),
        stem,
        stem[:-1] + "1",
        stem + "1",
        f"{stem}.tmp",
        f"{stem}-",
        "k.lock",
        "k.json",
    ]
    for length in (longest, longest - 1):
        segments = "/".join([letters[:50]] * (length // 51 + 1))
        full = (segments + "q" * length)[:length].rstrip("/")
        full += "q" * (length - len(full))
        names += [full, full[:-1] + "Q"]
    names = list(dict.fromkeys(name for name in names if is_valid_name(name, longest) and not _is_folder_of_another(name, names)))
    records = {name: Record(view.fit(64), tag) for tag, name in enumerate(names)}
    for name, record in records.items():
        [there] = view.exists(name)
        require(there is False, f"False for {name!r}, which was not stored yet", there, note=f"stored were {names[: names.index(name)]}")
        result = view.put(name, record)
        require(result.status is PutStatus.STORED, f"STORED for {name!r} ({len(name)} bytes)", result)
    for name, record in records.items():
        view.check_found(name, record)


def _is_folder_of_another(name: str, names: list[str]) -> bool:
    # The SDK has no name that another one continues after a slash: a filesystem cannot have both.
    return any(other.startswith(f"{name}/") for other in names)


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


@proves("KV-CORE-14")
def test_a_put_changes_no_memory(store: Store, view: View) -> None:
    step, parts = view.capabilities.align_bytes, min(2, view.capabilities.max_parts)
    record = Record(view.fit(8192), 3)
    lengths = [record.size] if parts == 1 or record.size < 2 * step else [step, record.size - step]
    with view.lend(lengths, step % 4096) as arena:
        arena.paint()
        view.put_from(arena, store.name(), record)
        seen = b"".join(buffer.view for buffer in arena.buffers)
        require(seen == record.bytes, "the buffers as they were", seen)
        at = arena.changed_around()
        require(
            at is None, "the memory beside the buffers as it was", f"a changed byte at offset {at} of the region; buffers: {arena.buffers}"
        )


@proves("KV-CORE-15")
def test_a_get_touches_its_buffers_alone(store: Store, view: View) -> None:
    step, size = view.capabilities.align_bytes, view.fit(8192)
    missing = store.name()
    asked: list[tuple[str, list[int]]] = [(missing, [size])]
    if not view.capabilities.read_only:
        name = store.name()
        view.store((name, Record(size, 3)))
        asked += [(name, [size]), (name, [view.fit(size + step)])]
        if size > step:
            asked += [(name, [size - step])]
            asked += [(name, [step, size - step]), (name, [size - step, step])] if view.capabilities.max_parts > 1 else []
    for name, lengths in asked:
        for shift in {0, step % 4096}:
            with view.lend(lengths, shift) as arena:
                arena.paint()
                # How it has to be answered is said elsewhere.
                with contextlib.suppress(CallRaised):
                    view.get_into(arena, name)
                at = arena.changed_around()
                where = f"a changed byte at offset {at} of the region, buffers of {lengths} bytes"
                require(at is None, "the memory beside the buffers as it was", where)


@proves("KV-CORE-16")
def test_what_was_stored_does_not_follow_its_buffers(store: Store, view: View) -> None:
    for size in sorted({view.fit(4096), view.fit(65536), view.fit(1 << 20)}):
        name, later = store.name(), bytes([INSIDE]) * min(size, 64)
        with view.lend([size]) as arena, contextlib.suppress(CallRaised):
            view.put_from(arena, name, Record(size, 5))
            arena.buffers[0].view[:] = bytes([INSIDE]) * size
            store.calls.append("# the buffers of this put were overwritten")
            # That a record is there at all, with its own bytes, is asked elsewhere.
            got = view.get(name, size)
            seen = "bytes that were written into its buffers after the put had returned"
            require(got.result.status is not GetStatus.FOUND or later not in got.bytes, f"the bytes that were put as {name}", seen)


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
    for bad, bad_size in ((missing, size), (good[0], view.fit(2 * size))):
        asked = [*gets[:place], (bad, bad_size), *gets[place:]]
        try:
            found = view.get_all(asked)
        except CallRaised as raised:
            raise ConformanceFailure(f"an answer for each item of a get, one of which is {bad!r}", raised.seen) from raised
        for index, (name, got) in enumerate(zip([name for name, _ in asked], found, strict=True)):
            if index != place:
                right = got.result.status is GetStatus.FOUND and got.bytes == Record(size, good.index(name)).bytes
                require(right, f"FOUND with its bytes for an item beside one of {bad!r}", got.result)
    try:
        there = view.exists(*good[:place], missing, *good[place:])
    except CallRaised as raised:
        raise ConformanceFailure("an answer for each item of exists, one of which is missing", raised.seen) from raised
    del there[place]
    require(there == [True] * len(good), "True for the names beside one that is missing", there)


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


@proves("KV-CORE-22")
def test_a_record_above_the_limit_is_refused(store: Store, view: View, run: Run) -> None:
    limit = view.capabilities.max_record_bytes
    if limit > run.largest_bytes:
        raise NotApplicable(f"max_record_bytes {limit} is more than is tried (--kvstore-largest)")
    size = limit + view.capabilities.align_bytes
    name = store.name()
    try:
        result = view.put(name, Record(size, 1))
    except CallRaised as raised:
        require(isinstance(raised.error, InvalidError), "InvalidError", raised.seen)
    else:
        refused = result.status is PutStatus.FAILED and isinstance(result.error, InvalidError)
        require(refused, f"FAILED with InvalidError for {size} bytes, of which {limit} are allowed", result)
    view.check_missing(name, note="after a record that is too large was refused")


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
