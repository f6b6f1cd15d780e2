"""Profile concurrency: several threads call one view."""

from __future__ import annotations

import functools
import random

from kvstore_sdk.backend import GetStatus, Mode, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record, pieces, which
from kvstore_sdk_conformance.failure import require
from kvstore_sdk_conformance.race import Over, race, rounds
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import VISIBLE_S, View
from kvstore_sdk_conformance.watched import CALL_S

THREADS = 6
"""As many calls at the same time, if so many are declared: enough to meet, and few enough for a small machine."""
TAGS = 8
# What was answered UNKNOWN may have been done.
MAYBE = (PutStatus.UNKNOWN, PutStatus.IN_DOUBT)


def _threads(view: View) -> int:
    return min(THREADS, view.capabilities.max_concurrency)


@proves("KV-CONC-01")
def test_calls_at_the_same_time_get_the_answers_they_would_get_alone(store: Store, view: View) -> None:
    sizes = sorted({view.fit(size) for size in (1, 4096, 65536)})
    owned = [(store.names(TAGS), store.name(), random.Random(store.random.random())) for _ in range(_threads(view))]

    def use(over: Over, names: list[str], absent: str, draw: random.Random, number: int) -> None:
        # Names of its own: nobody else has a say in what it is answered.
        there: dict[str, Record] = {}
        for turn in rounds(over, 60):
            name = draw.choice(names)
            record = Record(draw.choice(sizes), number * 1000 + turn)
            view.store((name, record), mode=Mode.REPLACE)
            there[name] = record
            note = f"{_threads(view)} threads call the view, each with names of its own"
            view.check_found(name, record, note=note)
            asked = draw.sample(names, min(3, view.capabilities.max_batch, len(names)))
            answers = view.exists(*asked)
            wanted = [name in there for name in asked]
            require(answers == wanted, f"{wanted} from exists", answers, note=note)
            other = draw.choice(asked)
            got = view.get(other, there[other].size if other in there else sizes[0])
            good = got.bytes == there[other].bytes if other in there else got.result.status is GetStatus.MISSING
            require(good, f"{there.get(other, 'MISSING')} for {other}", got.result, note=note)
            got = view.get(absent, sizes[-1])
            require(got.result.status is GetStatus.MISSING, f"MISSING for {absent}", got.result, note=note)

    race(
        [functools.partial(use, names=names, absent=absent, draw=draw, number=number) for number, (names, absent, draw) in enumerate(owned)]
    )


@proves("KV-CONC-02")
def test_of_calls_that_create_one_record_all_succeed(store: Store, view: View) -> None:
    _race_for_one_record(store, view, Mode.CREATE, (PutStatus.STORED, PutStatus.EXISTS), same=True)
    _race_for_one_record(store, view, Mode.CREATE, (PutStatus.STORED, PutStatus.EXISTS), same=False)


@proves("KV-CONC-03")
def test_of_calls_that_replace_one_record_all_succeed(store: Store, view: View) -> None:
    _race_for_one_record(store, view, Mode.REPLACE, (PutStatus.STORED,), same=True)
    _race_for_one_record(store, view, Mode.REPLACE, (PutStatus.STORED,), same=False)


def _race_for_one_record(store: Store, view: View, mode: Mode, good: tuple[PutStatus, ...], *, same: bool) -> None:
    size, threads = view.fit(65536), _threads(view)
    for _ in rounds(Over(), 12):
        name = store.name()
        if mode is Mode.REPLACE:
            view.store((name, Record(size, TAGS)))

        def put(over: Over, tag: int, name: str = name) -> None:
            result = view.put(name, Record(size, tag), mode, timeout_s=CALL_S)
            expected = f"{' or '.join(status.name for status in good)} for {name}"
            require(result.status in (*good, *MAYBE), expected, result, note=f"{threads} threads put it, mode {mode.name}")

        tags = [0 if same else number for number in range(threads)]
        race([functools.partial(put, tag=tag) for tag in tags])
        view.wait_until(functools.partial(_is_there, view, name), 0.0 if view.capabilities.read_after_write else VISIBLE_S)
        got = view.get(name, size)
        note = f"{threads} threads have put it, mode {mode.name}"
        require(got.result.status is GetStatus.FOUND, f"FOUND for {name}", got.result, note=note)
        whole = which(got.bytes, tags) is not None
        require(whole, "the record of one of them, whole", pieces(got.bytes, tags), note=note)


@proves("KV-CONC-04")
def test_what_is_found_while_all_is_in_motion_was_put_under_that_name(store: Store, view: View) -> None:
    names = store.names(3)
    size = view.fit(65536)
    sizes = sorted({size, view.fit(size // 2)})
    # Each name has records of its own, of which each has its size.
    tags = {name: range(number * TAGS, (number + 1) * TAGS) for number, name in enumerate(names)}
    deletes = callable(getattr(view.backend, "delete", None))
    threads = max(2, _threads(view))
    readers = threads // 2
    seeds = [store.random.random() for _ in range(threads)]

    def write(over: Over, seed: float) -> None:
        draw = random.Random(seed)
        for _ in rounds(over, 1000, few=100):
            name = draw.choice(names)
            if deletes and draw.random() < 0.4:
                view.delete(name, timeout_s=CALL_S)
                continue
            tag = draw.choice(tags[name])
            view.put(name, Record(sizes[tag % len(sizes)], tag), draw.choice(list(Mode)), timeout_s=CALL_S)

    def read(over: Over, seed: float) -> None:
        draw = random.Random(seed)
        while not over.is_set():
            name, asked = draw.choice(names), draw.choice(sizes)
            got = view.get(name, asked)
            if got.result.status is GetStatus.FOUND:
                mine = [tag for tag in tags[name] if sizes[tag % len(sizes)] == asked]
                whole = which(got.bytes, mine) is not None
                every = range(len(names) * TAGS)
                note = f"{threads} threads use {len(names)} names at once; under this one were put tags {mine}"
                require(whole, f"one of the records that were put as {name}, whole", pieces(got.bytes, every), note=note)
            elif got.result.status is GetStatus.WRONG_SIZE:
                require(got.result.size_bytes in sizes, f"WRONG_SIZE with one of {sizes}", got.result)

    race(
        [functools.partial(write, seed=seed) for seed in seeds[readers:]],
        [functools.partial(read, seed=seed) for seed in seeds[:readers]],
    )


def _is_there(view: View, name: str) -> bool:
    return view.exists(name) == [True]
