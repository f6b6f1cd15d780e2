"""Profile core: records, and the memory that they come from and go to."""

from __future__ import annotations

import contextlib
import itertools
import time

from kvstore_sdk.backend import Deadline, Get, GetStatus, InvalidError, Mode, Put, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, NotApplicable, require, show_difference
from kvstore_sdk_conformance.memory import INSIDE
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import CALL_S

# Around what disks, pages and protocols count in; the largest is added by the check.
SIZES = (
    1,
    2,
    127,
    256,
    511,
    512,
    513,
    1023,
    4095,
    4096,
    4097,
    8192,
    65535,
    65536,
    65537,
    131071,
    1 << 20,
    (1 << 20) + 1,
    5 << 20,
    (16 << 20) + 1,
)
AFTER_S = 0.05
"""For a thread of the store that still reads what was put."""
FAR_S = 86400.0
MOST_PARTS = 4096


@proves("KV-CORE-01")
def test_get_answers_found_with_exactly_the_bytes_that_were_stored(store: Store, view: View, run: Run) -> None:
    # Half of a bounded store, and all others are a third of it.
    largest = view.fit(run.largest_bytes, 2)
    # Just below the limit there may be no room for what a store adds of its own.
    sizes = sorted({view.fit(size) for size in SIZES} | {largest, view.fit(max(1, largest - view.capabilities.align_bytes))})
    records = {store.name(): Record(size, tag) for tag, size in enumerate(sizes, 1) if size <= largest}
    # What looks like text, like nothing, or like a hole.
    records |= {store.name(): Record(view.fit(size), tag) for tag in (-1, -2, -3, -4) for size in (2, 4096, 1 << 20)}
    for name, record in records.items():
        result = view.put(name, record)
        require(result.status is PutStatus.STORED, f"STORED for a new record of {record.size} bytes", result)
        view.check_found(name, record)
    _check_far_deadline(store, view)
    # Others that were stored meanwhile must not have changed it.
    for name, record in records.items():
        if record.size < largest or largest <= 5 << 20:
            view.check_found(name, record, note="read again after all others were stored")


def _check_far_deadline(store: Store, view: View) -> None:
    name, record = store.name(), Record(view.fit(4096), 3)
    store.calls.append(f"# {name!r} is put with a deadline of {FAR_S:.0f} s")
    deadline = Deadline.after(FAR_S)
    with view.lend([record.size]) as arena:
        arena.buffers[0].view[:] = record.bytes
        puts = [Put(name, tuple(arena.buffers))]
        view.names.add(name)
        [result] = view.watched("put", lambda: view.backend.put(puts, deadline), CALL_S)
        require(result.status is not PutStatus.TIMED_OUT, f"an answer long before a deadline of {FAR_S:.0f} s", result)


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


@proves("KV-CORE-07")
def test_a_record_is_the_bytes_of_its_parts(store: Store, view: View) -> None:
    step, parts = view.capabilities.align_bytes, min(MOST_PARTS, view.capabilities.max_parts)
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
    if view.capabilities.max_batch > 1 and view.fit(3 * step) > 2 * step:
        _check_parts_in_a_batch(store, view, step)


def _check_parts_in_a_batch(store: Store, view: View, step: int) -> None:
    """Items of two parts each, in one call: none of them may get a part of another."""
    count = min(4, view.capabilities.max_batch)
    records = {store.name(): Record(view.fit(3 * step), tag) for tag in range(count)}
    store.calls.append(f"# {count} records of two parts each are put, and got, in one call")
    lengths = [length for record in records.values() for length in (step, record.size - step)]
    with view.lend(lengths) as arena:
        parts = [tuple(arena.buffers[2 * number : 2 * number + 2]) for number in range(count)]
        for (first, second), record in zip(parts, records.values(), strict=True):
            first.view[:], second.view[:] = record.bytes[:step], record.bytes[step:]
        puts = [Put(name, pair) for name, pair in zip(records, parts, strict=True)]
        stored = view.put_items(puts)
        require(all(result.status is PutStatus.STORED for result in stored), f"STORED for {count} records of two parts each", stored)
        for name, record in records.items():
            view.check_found(name, record, note="put in two parts, beside others in the same call")
        for buffer in arena.buffers:
            buffer.view[:] = bytes(buffer.length)
        found = view.get_items([Get(name, pair) for name, pair in zip(records, parts, strict=True)])
        require(all(result.status is GetStatus.FOUND for result in found), f"FOUND for {count} records into two buffers each", found)
        for (first, second), record in zip(parts, records.values(), strict=True):
            seen = bytes(first.view) + bytes(second.view)
            require(seen == record.bytes, "the record in its two buffers, beside others", show_difference(record.bytes, seen))


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
        [found] = view.get_items([Get(name, parts)])
        require(found.status is GetStatus.FOUND, "FOUND into buffers in two regions", found)
        seen = b"".join(part.view for part in parts)
        require(seen == record.bytes, "the record in two regions", show_difference(record.bytes, seen))


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
    names = {view.fit(size): store.name() for size in (4096, 65536, 3 << 20)}
    for size, mode in itertools.product(names, (Mode.CREATE, Mode.REPLACE)):
        # One that is new, and then one that replaces it.
        name, later = names[size], bytes([INSIDE]) * min(size, 64)
        with view.lend([size]) as arena, contextlib.suppress(CallRaised):
            view.put_from(arena, name, Record(size, 5), mode)
            arena.buffers[0].view[:] = bytes([INSIDE]) * size
            store.calls.append("# the buffers of this put were overwritten")
            # That a record is there at all, with its own bytes, is asked elsewhere.
            got = view.get(name, size)
            time.sleep(AFTER_S)
            got = got if got.result.status is not GetStatus.FOUND else view.get(name, size)
            seen = "bytes that were written into its buffers after the put had returned"
            require(got.result.status is not GetStatus.FOUND or later not in got.bytes, f"the bytes that were put as {name}", seen)


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
