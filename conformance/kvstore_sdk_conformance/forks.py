"""What a process does to see what becomes of a backend when it forks, or opens and closes it again and again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from kvstore_sdk.backend import SupportsDelete, SupportsList, SupportsUsage
from kvstore_sdk_conformance.data import Record, which
from kvstore_sdk_conformance.failure import ConformanceFailure, show
from kvstore_sdk_conformance.target import Place
from kvstore_sdk_conformance.view import View

__all__ = ["FORKED_S", "Forks"]

FORKED_S = 45.0
"""What a forked child has for its calls: all of them may end at their deadlines, and the first that hangs is the last."""
_CALL_S = 5.0
"""Also of a call in a child that has just been forked, on a machine that stands still for a while."""

_WARM_CALLS = 4

Tell = Callable[[str, str], None]


class Forks:
    """Programs of `child.Programs`: arguments and answers are JSON.

    What a forked child did is answered as `ended`, whether it ended in time, and `answers`, by call: what it answered or raised, as text,
    as far as it came.
    """

    view: View
    place: Place

    def fork(self, busy: float | None, missing: str, there: str, size: int, tag: int, new: str) -> dict[str, Any]:
        """Fork, and let the child use the view.

        `busy`: while another thread of this process uses it as well, when about this share of a call of it is over.
        """

        def use(view: View, tell: Tell) -> None:
            def one(name: str, call: Callable[[], object]) -> None:
                try:
                    tell(name, str(call()))
                except ConformanceFailure as failure:
                    hung = failure.breaks == "KV-LIVE-03"
                    tell(name, f"{'hung' if hung else 'raised'}: {failure.seen}")
                    if hung:
                        # One is enough, and the others would take as long.
                        os._exit(0)

            def read() -> str:
                got = view.get(there, size, timeout_s=_CALL_S)
                return f"{got.result.status.name} {which(got.bytes, [tag])}"

            one("exists", lambda: show(view.exists(there, timeout_s=_CALL_S)[0]))
            one("missing", lambda: show(view.exists(missing, timeout_s=_CALL_S)[0]))
            one("get", read)
            one("put", lambda: view.put(new, Record(size, tag), timeout_s=_CALL_S).status.name)
            if isinstance(view.backend, SupportsDelete):
                one("delete", lambda: _text(view.delete(missing, timeout_s=_CALL_S)[0]))
            if isinstance(view.backend, SupportsList):
                one("list", lambda: "a page" if view.page(timeout_s=_CALL_S) else "nothing")
            if isinstance(view.backend, SupportsUsage):
                one("usage", lambda: "a number" if view.usage(timeout_s=_CALL_S) else "nothing")

        with contextlib.nullcontext() if busy is None else self._in_use(missing, busy):
            return self._forked(use)

    def fork_and_close(self) -> dict[str, Any]:
        """Fork, and let the child close the view that it inherited."""

        def use(view: View, tell: Tell) -> None:
            try:
                view.close()
                tell("close", "returned")
            except ConformanceFailure as failure:
                tell("close", failure.seen)

        return self._forked(use)

    def fork_and_exit(self) -> dict[str, Any]:
        """Fork, and let the child end as Python programs do: what is registered for that is run."""

        def leave(view: View, tell: Tell) -> None:
            raise SystemExit(0)

        return self._forked(leave)

    def churn(self, times: int) -> None:
        """Open, use and close the location so many times beside the view."""
        for number in range(times):
            view = View("churn", self.place.open(), lambda _: None)
            view.exists(f"v1/{number}")
            view.get(f"v1/{number}", view.fit(4096))
            if not view.capabilities.read_only:
                view.put(f"v1/{number}", Record(view.fit(4096), number))
            view.close()

    def held(self) -> dict[str, int]:
        """What this process holds now."""
        return {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}

    @contextlib.contextmanager
    def _in_use(self, name: str, share: float) -> Iterator[None]:
        """A thread asks for a record, again and again. This begins when it is in the middle of a call, as far as others before it tell."""
        stop, begins, warm = threading.Event(), threading.Event(), threading.Event()
        took_s = 0.0

        def ask() -> None:
            nonlocal took_s
            for number in itertools.count(1):
                if stop.is_set():
                    return
                begins.set()
                began_s = time.monotonic()
                with contextlib.suppress(ConformanceFailure):
                    self.view.exists(name, timeout_s=_CALL_S)
                took_s = time.monotonic() - began_s
                if number == _WARM_CALLS:
                    warm.set()

        thread = threading.Thread(target=ask, name="kvstore-conformance-busy", daemon=True)
        thread.start()
        warm.wait(2 * _CALL_S)
        begins.clear()
        begins.wait(_CALL_S)
        time.sleep(share * took_s)
        try:
            yield
        finally:
            stop.set()
            thread.join(2 * _CALL_S)

    def _forked(self, use: Callable[[View, Tell], None]) -> dict[str, Any]:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # That it may go wrong beside threads is what this is about.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:

            def tell(name: str, answer: str) -> None:
                os.write(writing, json.dumps([name, answer]).encode() + b"\n")

            try:
                use(View("forked", self.view.backend, lambda _: None), tell)
            except SystemExit:
                raise
            except BaseException as error:  # noqa: BLE001  # nobody else would hear of it
                tell("suite", f"{type(error).__name__}: {error}")
            os._exit(0)
        os.close(writing)
        ended = _wait(pid, FORKED_S)
        with os.fdopen(reading, "rb") as source:
            lines = [json.loads(line) for line in source.read().splitlines() if line.endswith(b"]")]
        return {"ended": ended, "answers": dict(lines)}


def _text(answer: object) -> str:
    return str(getattr(answer, "name", "") or show(answer))


def _wait(pid: int, limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        select.select([], [], [], 0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
