"""Profile performance: how cost grows, and figures. Nothing is judged by a time alone: a slow store that scales is a good one.

What is compared is measured in turns within one run, as the shortest of several rounds, with wide margins.
"""

from __future__ import annotations

import time

from kvstore_sdk.backend import Buffer
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import NotApplicable, require
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.stopwatch import Stopwatch, best, fill, quantile_ms
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

ROUNDS, LIMIT_S = 30, 3.0
"""Of a comparison; a slow store does fewer within its time."""
WATCH_S = 90.0
"""Of a whole series of calls: well beyond the time that each is given."""
FACTOR, SLACK_S = 4.0, 0.0003
"""What may cost more: four times as much, and what a timer and a cache miss are off by."""

SMALL_BYTES, LARGE_BYTES = 4096, 16 << 20
BATCH = 64
FULL_RECORDS, FILL_S = 2000, 15.0

FIGURE_BYTES = {"4KiB": 4 << 10, "256KiB": 256 << 10, "4MiB": 4 << 20}
FIGURE_RECORDS = {"4KiB": 512, "256KiB": 128, "4MiB": 16}
FIGURE_S = 0.5
"""For each figure."""


@proves("KV-PERF-01")
def test_exists_moves_no_payload(store: Store, view: View, run: Run) -> None:
    small, large = view.fit(SMALL_BYTES), view.fit(min(LARGE_BYTES, run.largest_bytes), 4)
    if large < 16 * small:
        raise NotApplicable(f"records of up to {large} bytes are too small to tell")
    one, other = store.names(2)
    view.store((one, Record(small, 1)))
    view.store((other, Record(large, 2)))
    watch = Stopwatch(view)
    cheap, dear = view.watched(
        "exists", lambda: best(lambda: watch.exists([one]), lambda: watch.exists([other]), rounds=ROUNDS, limit_s=LIMIT_S), WATCH_S
    )
    _note(store, exists_small_ms=cheap * 1e3, exists_large_ms=dear * 1e3)
    expected = f"exists of a record of {large} bytes to cost at most {FACTOR:g} times what it costs for one of {small}"
    require(dear <= FACTOR * cheap + SLACK_S, expected, _ratio(dear, cheap))


@proves("KV-PERF-02")
def test_a_batch_costs_no_more_than_its_items_alone(store: Store, view: View) -> None:
    size = view.fit(SMALL_BYTES)
    watch = Stopwatch(view)
    known = store.name()
    view.store((known, Record(size, 1)))
    # So few that a slow store is done in time.
    [pace_s] = view.watched("exists", lambda: best(lambda: watch.exists([known]), rounds=3, limit_s=LIMIT_S), WATCH_S)
    count = min(view.capabilities.max_batch, max(4, min(BATCH, int(0.3 / pace_s))))
    with view.lend([size] * count) as arena:
        fill(arena.buffers, 1)
        there = store.names(count)
        view.store(*((name, Record(size, tag)) for tag, name in enumerate(there)))

        def alone(op: str, names: list[str], buffers: list[Buffer]) -> float:
            return sum(_call(watch, op, [name], [buffer]) for name, buffer in zip(names, buffers, strict=True))

        for op in ("exists", "get", "put"):

            def both(op: str = op) -> list[float]:
                return best(
                    lambda: _call(watch, op, store.names(count) if op == "put" else there, arena.buffers),
                    lambda: alone(op, store.names(count) if op == "put" else there, arena.buffers),
                    rounds=8,
                    limit_s=LIMIT_S,
                )

            together, singly = view.watched(op, both, WATCH_S)
            _note(store, **{f"{op}_{count}_in_one_call_ms": together * 1e3, f"{op}_{count}_alone_ms": singly * 1e3})
            expected = f"a call of {op} with {count} items to cost at most what {count} calls do, and half as much again"
            require(together <= 1.5 * singly + SLACK_S, expected, _ratio(together, singly))


@proves("KV-PERF-03")
def test_calls_cost_no_more_as_the_store_fills(store: Store, view: View) -> None:
    size = view.fit(SMALL_BYTES)
    empty = store.elsewhere().open()
    names = store.names(FULL_RECORDS)
    until_s = time.monotonic() + FILL_S
    stored: list[str] = []
    for batch in view.batches(names):
        view.store(*((name, Record(size, 1)) for name in batch))
        stored += batch
        if time.monotonic() > until_s:
            break
    if len(stored) < 100:
        raise NotApplicable(f"{len(stored)} records in {FILL_S:g} s are too few to tell")
    known = stored[len(stored) // 2]
    empty.store((known, Record(size, 1)))
    with view.lend([size]) as full_arena, empty.lend([size]) as empty_arena:
        fill([*full_arena.buffers, *empty_arena.buffers], 1)
        full_watch, empty_watch = Stopwatch(view), Stopwatch(empty)
        for op in ("exists", "get", "put"):

            def both(op: str = op) -> list[float]:
                return best(
                    lambda: _call(full_watch, op, [store.name() if op == "put" else known], full_arena.buffers),
                    lambda: _call(empty_watch, op, [store.name() if op == "put" else known], empty_arena.buffers),
                    rounds=ROUNDS,
                    limit_s=LIMIT_S,
                )

            dear, cheap = view.watched(op, both, WATCH_S)
            _note(store, **{f"{op}_in_a_full_store_ms": dear * 1e3, f"{op}_in_an_empty_store_ms": cheap * 1e3})
            expected = f"{op} among {len(stored)} records to cost at most {FACTOR:g} times what it costs in a store that is all but empty"
            require(dear <= FACTOR * cheap + SLACK_S, expected, _ratio(dear, cheap))


@proves("KV-PERF-03")
def test_figures(store: Store, view: View) -> None:
    """Measures, and judges nothing. The last of its profile: the others have seen that calls return."""
    watch = Stopwatch(view)
    most = min(8, view.capabilities.max_concurrency)
    for label, size in {label: size for label, size in FIGURE_BYTES.items() if view.fit(size, 8 * FIGURE_RECORDS[label]) == size}.items():
        with view.lend([size] * most) as arena:
            fill(arena.buffers, 1)
            for threads in sorted({1, most}):
                names = [store.names(-(-FIGURE_RECORDS[label] // threads)) for _ in range(threads)]
                for op in ("put", "get"):

                    def measure(op: str = op, names: list[list[str]] = names) -> object:
                        return watch.pace(op, names, arena.buffers[: len(names)], FIGURE_S)

                    pace = view.watched(op, measure, WATCH_S)
                    if not pace.took_s:
                        continue
                    what = f"{op}_{label}_{threads}_thread{'s' if threads > 1 else ''}"
                    _note(store, **{f"{what}_MB_per_s": len(pace.took_s) * size / pace.wall_s / 1e6})
                    _note(store, **{f"{what}_p{share}_ms": quantile_ms(pace, share / 100) for share in (50, 99)})
    names_asked = store.names(min(BATCH, view.capabilities.max_batch))
    view.store(*((name, Record(view.fit(SMALL_BYTES), 1)) for name in names_asked[::2]))
    for label, some in {"exists_per_s": names_asked[:1], "exists_in_batches_per_s": names_asked}.items():

        def ask(some: list[str] = some) -> list[float]:
            return best(lambda: watch.exists(some), rounds=ROUNDS, limit_s=FIGURE_S)

        [took_s] = view.watched("exists", ask, WATCH_S)
        _note(store, **{label: len(some) / took_s})


def _call(watch: Stopwatch, op: str, names: list[str], buffers: list[Buffer]) -> float:
    return watch.exists(names) if op == "exists" else (watch.put if op == "put" else watch.get)(names, buffers)


def _ratio(dear_s: float, cheap_s: float) -> str:
    return f"{dear_s / cheap_s:.1f} times as much: {dear_s * 1e3:.3g} ms and {cheap_s * 1e3:.3g} ms"


def _note(store: Store, **figures: float) -> None:
    """Figures for the report, in digits that mean something."""
    store.figures |= {name: float(f"{value:.4g}") for name, value in figures.items()}
