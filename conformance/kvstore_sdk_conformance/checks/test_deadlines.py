"""Profile liveness: calls whose time is short, or over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import (
    DeleteStatus,
    Failure,
    Get,
    GetStatus,
    Mode,
    Put,
    PutStatus,
    SupportsDelete,
    TimedOutError,
)
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import require
from kvstore_sdk_conformance.pressing import LATE_S, listing, pressing, took_s, whatever_it_answers
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

TRIES, PAUSE_S = 5, 0.1
"""Of a call that was late, and between two of them, times their number: so that they do not fall into one busy moment."""
DEADLINES_S = (0.05, 0.5)
ITEMS = 64
ITEM_BYTES = 256 << 10
LARGEST_BYTES = 64 << 20
LONG_OVER_S = -1.0
OVER = "the deadline had passed"


@proves("KV-LIVE-01")
def test_a_call_whose_deadline_has_passed_returns_at_once_and_lies_not(store: Store, view: View) -> None:
    size = view.fit(65536)
    count = min(4, view.capabilities.max_batch)
    old, new, missing, doomed = (store.names(count) for _ in range(4))
    view.store(*((name, Record(size, 1)) for name in [*old, *doomed]))

    for name, answer in zip(old, _over(view, "exists", old), strict=True):
        # Whether it may say False is asked by itself.
        require(answer in (True, False) or _timed_out(answer), f"True, or a Failure with TimedOutError, for {name}", answer, note=OVER)
    for name, answer in zip(missing, _over(view, "exists", missing), strict=True):
        require(answer is False or _timed_out(answer), f"False, or a Failure with TimedOutError, for {name}", answer, note=OVER)

    for mode, names in ((Mode.CREATE, new), (Mode.REPLACE, old)):
        results = _put_over(view, names, size, mode)
        for name, result in zip(names, results, strict=True):
            allowed = {PutStatus.STORED, PutStatus.TIMED_OUT, PutStatus.UNKNOWN, PutStatus.IN_DOUBT}
            require(result.status in allowed, f"TIMED_OUT for {name}, or what became of it", result, note=OVER)
            what = f"{mode} answered {result.status.name}, when its deadline had passed"
            if result.status is PutStatus.STORED:
                view.check_found(name, Record(size, 2), note=what)
            elif result.status is PutStatus.TIMED_OUT and mode is Mode.CREATE:
                view.check_missing(name, size, breaks="KV-ATOM-03", note=what)
            elif result.status is PutStatus.TIMED_OUT:
                view.check_found(name, Record(size, 1), breaks="KV-ATOM-04", note=what)

    with view.lend([size] * count) as arena:
        for buffer in arena.buffers:
            buffer.view[:] = bytes(size)
        results = _over(view, "get", [Get(name, (buffer,)) for name, buffer in zip(doomed, arena.buffers, strict=True)])
        for buffer, name, result in zip(arena.buffers, doomed, results, strict=True):
            allowed_gets = {GetStatus.FOUND, GetStatus.TIMED_OUT, GetStatus.IN_DOUBT}
            require(result.status in allowed_gets, f"TIMED_OUT or FOUND for {name}, which is there", result, note=OVER)
            right = result.status is not GetStatus.FOUND or bytes(buffer.view) == Record(size, 1).bytes
            require(right, f"the bytes of {name} with FOUND", buffer.view, note=OVER)

    if isinstance(view.backend, SupportsDelete):
        for name, answer in zip(doomed, _over(view, "delete", doomed), strict=True):
            require(answer is DeleteStatus.DELETED or _timed_out(answer), f"DELETED, or a Failure with TimedOutError, for {name}", answer)
            if answer is DeleteStatus.DELETED:
                view.check_missing(name, size, note="delete answered DELETED, when its deadline had passed")
    _require_all_prompt(store, view, old, size, LONG_OVER_S)


@proves("KV-LIVE-02")
def test_an_exists_that_runs_out_of_time_says_not_false(store: Store, view: View) -> None:
    names = store.names(min(ITEMS, view.capabilities.max_batch))
    size = view.fit(1)
    view.store(*((name, Record(size, tag)) for tag, name in enumerate(names)))
    alone_s = took_s(lambda: view.exists(*names))
    for timeout_s in pressing(alone_s):
        with whatever_it_answers():
            answers = view.exists(*names, timeout_s=timeout_s)
            wrong = answers.count(False)
            note = f"the deadline passed after {timeout_s:.4f} s; without one exists took {alone_s:.4f} s"
            require(not wrong, f"no False for {len(names)} records that are there", f"{wrong} times False", note=note)


@proves("KV-LIVE-03")
def test_every_call_returns_by_its_deadline(store: Store, view: View, run: Run) -> None:
    count = min(ITEMS, view.capabilities.max_batch)
    shapes = [(count, view.fit(min(ITEM_BYTES, run.largest_bytes), 16 * count)), (1, view.fit(min(LARGEST_BYTES, run.largest_bytes), 16))]
    for items, size in shapes:
        there = store.names(items)
        if not view.capabilities.read_only:
            view.store(*((name, Record(size, 1)) for name in there))
        for timeout_s in DEADLINES_S:
            _require_all_prompt(store, view, there, size, timeout_s)


def _require_all_prompt(store: Store, view: View, there: Sequence[str], size: int, timeout_s: float) -> None:
    """Every method returns by its deadline: of these records, which have this size, and of as many new ones."""
    with view.lend([size] * len(there)) as arena:
        for buffer in arena.buffers:
            buffer.view[:] = Record(size, 1).bytes

        def puts(names: Sequence[str], mode: Mode) -> Sequence[Put]:
            return [Put(name, (buffer,), mode) for name, buffer in zip(names, arena.buffers, strict=True)]

        def doomed() -> Sequence[str]:
            names = store.names(len(there))
            view.store(*((name, Record(view.fit(1), 1)) for name in names))
            return names

        calls: list[tuple[str, Callable[[], Sequence[Any]]]] = [
            ("exists", lambda: there),
            ("put", lambda: puts(store.names(len(there)), Mode.CREATE)),
            ("put", lambda: puts(there, Mode.REPLACE)),
            ("get", lambda: [Get(name, (buffer,)) for name, buffer in zip(there, arena.buffers, strict=True)]),
        ]
        if isinstance(view.backend, SupportsDelete):
            calls.append(("delete", lambda: there if view.capabilities.read_only else doomed()))
        calls += [(op, tuple) for op, _ in listing(view, timeout_s)]
        for op, items in calls:
            _require_prompt(store, view, op, items, timeout_s)


def _require_prompt(store: Store, view: View, op: str, items: Callable[[], Sequence[Any]], timeout_s: float) -> None:
    """The best of a few calls is not late: a busy machine makes one of them late, a backend each."""
    best_s = math.inf
    for number in range(TRIES):
        time.sleep(number * PAUSE_S)
        best_s = min(best_s, _late_s(view, op, items(), timeout_s))
        if best_s <= LATE_S:
            break
    store.figures["late_s"] = max(store.figures.get("late_s", 0.0), best_s)
    when = f"by its deadline, {timeout_s:g} s away" if timeout_s > 0 else "at once, as its deadline has passed"
    require(best_s <= LATE_S, f"{op} to return {when}, or {LATE_S:g} s later", f"its return {best_s:.1f} s later, at best of {TRIES} calls")


def _late_s(view: View, op: str, items: Sequence[Any], timeout_s: float) -> float:
    """How long after its deadline a call returns. What it answers is judged by other checks."""
    call = dict(listing(view, timeout_s)).get(op, lambda: view.raw(op, items, timeout_s, settle=False))
    answer: Any = None
    began_s = time.monotonic()
    with whatever_it_answers():
        answer = call()
    late_s = time.monotonic() - began_s - max(0.0, timeout_s)
    if isinstance(answer, list):
        _settle(view, answer)
    return late_s


def _settle(view: View, results: Sequence[Any]) -> None:
    if tickets := [result.ticket for result in results if getattr(result, "status", None) in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT)]:
        view.settle(tickets)


def _over(view: View, op: str, items: Sequence[Any]) -> Any:
    results = view.raw(op, items, LONG_OVER_S, settle=False)
    _settle(view, results)
    return results


def _put_over(view: View, names: Sequence[str], size: int, mode: Mode) -> Any:
    with view.lend([size] * len(names)) as arena:
        for buffer in arena.buffers:
            buffer.view[:] = Record(size, 2).bytes
        return _over(view, "put", [Put(name, (buffer,), mode) for name, buffer in zip(names, arena.buffers, strict=True)])


def _timed_out(answer: object) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, TimedOutError)
