"""Profile liveness: calls whose time is short, or over."""

from __future__ import annotations

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
    SupportsList,
    SupportsUsage,
    TimedOutError,
)
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import require
from kvstore_sdk_conformance.pressing import pressing, took_s, whatever_it_answers
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

GRACE_S = 2.0
"""For a call that is due. What is in the middle of a write, or waits for the processor on a busy machine, needs some."""
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
    for op, call in _listing(view, LONG_OVER_S):
        with whatever_it_answers():
            _at_once(op, call)


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
    shapes = [(count, view.fit(min(ITEM_BYTES, run.largest_bytes))), (1, view.fit(min(LARGEST_BYTES, run.largest_bytes), 2))]
    for items, size in shapes:
        for timeout_s in DEADLINES_S:
            names = store.names(items)
            with view.lend([size] * items) as arena:
                for buffer in arena.buffers:
                    buffer.view[:] = Record(size, 1).bytes
                calls: list[tuple[str, Sequence[Any]]] = [
                    ("exists", names),
                    ("put", [Put(name, (buffer,)) for name, buffer in zip(names, arena.buffers, strict=True)]),
                    ("put", [Put(name, (buffer,), Mode.REPLACE) for name, buffer in zip(names, arena.buffers, strict=True)]),
                    ("get", [Get(name, (buffer,)) for name, buffer in zip(names, arena.buffers, strict=True)]),
                    ("exists", names),
                ]
                if isinstance(view.backend, SupportsDelete):
                    calls.append(("delete", names))
                for op, asked in calls:
                    # That it returns is judged by the view, and what it answers by other checks.
                    with whatever_it_answers():
                        view.raw(op, asked, timeout_s, grace_s=GRACE_S)
            for op, call in _listing(view, timeout_s):
                with whatever_it_answers():
                    view.watched(op, call, timeout_s, grace_s=GRACE_S)


def _over(view: View, op: str, items: Sequence[Any]) -> Any:
    results = _at_once(op, lambda: view.raw(op, items, LONG_OVER_S, settle=False))
    if tickets := [result.ticket for result in results if getattr(result, "status", None) in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT)]:
        view.settle(tickets)
    return results


def _put_over(view: View, names: Sequence[str], size: int, mode: Mode) -> Any:
    with view.lend([size] * len(names)) as arena:
        for buffer in arena.buffers:
            buffer.view[:] = Record(size, 2).bytes
        return _over(view, "put", [Put(name, (buffer,), mode) for name, buffer in zip(names, arena.buffers, strict=True)])


def _at_once(op: str, call: Callable[[], Any]) -> Any:
    began_s = time.monotonic()
    answer = call()
    seconds = time.monotonic() - began_s
    require(seconds < GRACE_S, f"{op} to return at once, its deadline has passed", f"its return after {seconds:.1f} s")
    return answer


def _listing(view: View, timeout_s: float) -> list[tuple[str, Callable[[], Any]]]:
    calls: list[tuple[str, Callable[[], Any]]] = []
    if isinstance(view.backend, SupportsList):
        calls.append(("list", lambda: view.page(timeout_s=timeout_s)))
    if isinstance(view.backend, SupportsUsage):
        calls.append(("usage", lambda: view.usage(timeout_s=timeout_s)))
    return calls


def _timed_out(answer: object) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, TimedOutError)
