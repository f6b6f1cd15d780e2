"""Profile regions: memory that is announced before it is used."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from kvstore_sdk.backend import Get, GetStatus, Put, PutStatus, Region, SupportsRegions
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import NotApplicable, require
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import CALL_S

REGION_BYTES = 2 << 20
SEVERAL = 3
TRIES = 30


@proves("KV-REG-01")
def test_regions_that_are_announced_late_are_served_together(store: Store, view: View) -> None:
    step = view.capabilities.align_bytes
    size = view.fit(8192)
    view.store((store.name(), Record(size, 1)))
    count = min(SEVERAL, view.capabilities.max_batch)
    names = store.names(count)
    with _regions(view, SEVERAL) as regions:
        # At other offsets of each: what is taken for another region shows.
        offsets = [number * 4096 for number in range(SEVERAL)]
        buffers = [region.buffer(offset, size) for region, offset in zip(regions, offsets, strict=True)][:count]
        for tag, buffer in enumerate(buffers):
            buffer.view[:] = Record(size, tag).bytes
        results = view.raw("put", [Put(name, (buffer,)) for name, buffer in zip(names, buffers, strict=True)])
        bad = [result for result in results if result.status is not PutStatus.STORED]
        require(not bad, f"STORED for {count} records in {count} regions of one call", bad)
        for tag, name in enumerate(names):
            view.check_found(name, Record(size, tag), note=f"stored from region {tag + 1} of {count} in one call")

        for region in regions:
            region.view[:] = bytes(region.size_bytes)
        turned = [region.buffer(offset, size) for region, offset in zip(regions[::-1], offsets, strict=True)][:count]
        results = view.raw("get", [Get(name, (buffer,)) for name, buffer in zip(names, turned, strict=True)])
        for tag, (buffer, result) in enumerate(zip(turned, results, strict=True)):
            right = result.status is GetStatus.FOUND and bytes(buffer.view) == Record(size, tag).bytes
            require(right, f"record {tag + 1} of {count} in its own region, in one call", result)

        if view.capabilities.max_parts > 1 and size > step:
            record, name = Record(size, 9), store.name()
            parts = (regions[0].buffer(0, step), regions[1].buffer(4096, size - step))
            for part, start in zip(parts, (0, step), strict=True):
                part.view[:] = record.bytes[start : start + part.length]
            [result] = view.raw("put", [Put(name, parts)])
            require(result.status is PutStatus.STORED, "STORED for a record with parts in two regions", result)
            view.check_found(name, record, note="stored from parts in two regions")


@proves("KV-REG-02")
def test_a_region_may_be_given_up_twice_and_the_others_stay(store: Store, view: View) -> None:
    size = view.fit(8192)
    with _regions(view, SEVERAL) as regions:
        first, middle, last = regions
        for time in ("", " a second time"):
            _call(view, "unregister_region", middle, f"unregister_region{time}")
        for tag, region in enumerate((first, last), 1):
            note = f"the region announced {'before' if region is first else 'after'} one that was given up"
            _check_served(store, view, region, Record(size, tag), note)
        _call(view, "unregister_region", first, "unregister_region")
        _call(view, "unregister_region", middle, "unregister_region a third time")
        _check_served(store, view, last, Record(size, 3), "the last region, after the others were given up")


@proves("KV-REG-03")
def test_a_region_in_the_place_of_an_earlier_one_is_served_as_itself(store: Store, view: View) -> None:
    size = view.fit(8192)
    kept: list[Region] = []
    try:
        for tag in itertools.count(1):
            if tag > TRIES:
                raise NotApplicable(f"the kernel did not give an address again in {TRIES} tries")
            with _regions(view, 1) as [old]:
                address = old.address
                _check_served(store, view, old, Record(size, tag), "a region that is new")
            new = Region(REGION_BYTES)
            if new.address == address:
                break
            # Stays, so that the next one cannot get this address.
            kept.append(new)
        try:
            _call(view, "register_region", new, "register_region")
            _check_served(store, view, new, Record(size, 1000), "a region at the address of one that was given up")
            _call(view, "unregister_region", new, "unregister_region")
        finally:
            new.close()
    finally:
        for region in kept:
            region.close()


@contextlib.contextmanager
def _regions(view: View, count: int) -> Iterator[list[Region]]:
    """New regions, announced; given up and unmapped in the end."""
    regions = [Region(REGION_BYTES) for _ in range(count)]
    try:
        for region in regions:
            _call(view, "register_region", region, "register_region")
        yield regions
        for region in regions:
            _call(view, "unregister_region", region, "unregister_region")
    finally:
        for region in regions:
            region.close()


def _call(view: View, op: str, region: Region, what: str) -> None:
    backend: Any = view.backend
    require(isinstance(backend, SupportsRegions), "both methods for regions", "one of them", breaks="KV-CORE-21")
    method = getattr(backend, op)
    view.watched(what, lambda: method(region), CALL_S)


def _check_served(store: Store, view: View, region: Region, record: Record, note: str) -> None:
    """A put from the region, and a get into it, at another place."""
    name = store.name()
    whence, whither = region.buffer(0, record.size), region.buffer(REGION_BYTES // 2, record.size)
    whence.view[:] = record.bytes
    [put] = view.raw("put", [Put(name, (whence,))])
    require(put.status is PutStatus.STORED, "STORED from a region that is announced", put, note=note)
    view.check_found(name, record, note=f"stored from {note}")
    whither.view[:] = bytes(record.size)
    [got] = view.raw("get", [Get(name, (whither,))])
    right = got.status is GetStatus.FOUND and bytes(whither.view) == record.bytes
    require(right, "the record in a region that is announced", got, note=note)
