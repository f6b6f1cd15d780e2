"""A backend whose code runs in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstore_sdk.backend import (
    Buffer,
    Capabilities,
    ClosedError,
    Deadline,
    DeleteStatus,
    Failure,
    Fork,
    Get,
    GetResult,
    InvalidError,
    ListPage,
    Put,
    PutResult,
    Region,
    Ticket,
    UnavailableError,
    UnsupportedError,
    Usage,
)
from kvstore_sdk.isolation.calls import failed
from kvstore_sdk.isolation.exchange import Exchange
from kvstore_sdk.isolation.hello import Spec
from kvstore_sdk.isolation.keeper import Keeper
from kvstore_sdk.isolation.limits import IsolationLimits
from kvstore_sdk.isolation.regions import Descriptor

__all__ = ["IsolatedBackend", "open_isolated"]

_REGION_S = 30.0
"""A backend may pin a region's pages, which takes a second for some ten GiB."""
_UNREGISTER_S = 2.0
"""Less: the child's mapping is its own, memory is free without its word, and whoever closes a tier waits for it."""
_MAX_PAGE = 20_000
"""Entries of one page of a listing: some MiB on the wire, whatever the caller asks for."""
_POLLED_OPS = frozenset({"exists", "put", "get", "delete", "settle"})


def open_isolated(
    target: str,
    options: Mapping[str, object] | None = None,
    *,
    location: str | None = None,
    limits: IsolationLimits | None = None,
    label: str = "",
) -> IsolatedBackend:
    """Open a backend in a process of its own, which ends with this one at the latest.

    Args:
        target: As `open_backend` takes it, like `options` and `location`. They go to the child over a private socket.
        options: Text, numbers, truth values and None alone.
        location: Likewise.
        limits: Of the child.
        label: What the backend is called in errors, logs and the name of its thread.

    Raises:
        ConfigError: as `open_backend` raises it.
        BackendError: likewise; or the child died, or did not come up in 75 seconds.
    """
    name = label or f"isolated {target.split(':', 1)[0].split('?', 1)[0][:40]}"
    return IsolatedBackend(Spec(target, dict(options or {}), location), limits or IsolationLimits(), name)


class IsolatedBackend:
    """Blocking methods and polled ones (`PolledBackend`) over one child; how calls end that the child does not answer:

    - 0.25 s after its deadline a call is given up. Items of a put or get then answer IN_DOUBT, and `settle` says when the call has
      returned after all, or the child is gone.
    - A child that dies ends all its calls at once: a put is UNKNOWN, all else FAILED with `UnavailableError`. The next child is started
      after a wait; until then every call answers `UnavailableError` at once.
    - A child that is too late, too large or breaks the protocol is killed.

    A process that is forked from this one gets errors.
    """

    def __init__(self, spec: Spec, limits: IsolationLimits, label: str) -> None:
        """Use `open_isolated`."""
        self._label = label
        self._keeper = Keeper(spec, limits, label)
        self._exchange: Exchange = self._keeper.exchange
        self._pid = os.getpid()
        self._forked_numbers = itertools.count(1)
        self._forked_answers: deque[tuple[int, object]] = deque()
        self._announcing = threading.Lock()
        _watch_forks(self)
        offer = self._keeper.start()
        self.capabilities: Capabilities = dataclasses.replace(offer.capabilities, in_doubt=True, fork=Fork.REFUSES)
        # Attributes of the instance, not methods: what the class had, every instance would seem to support.
        if "SupportsDelete" in offer.surfaces:
            self.delete = self._delete
        if "SupportsList" in offer.surfaces:
            self.list = self._list
        if "SupportsUsage" in offer.surfaces:
            self.usage = self._usage

    def __repr__(self) -> str:
        return f"IsolatedBackend({self._label!r}, state={self.state!r}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        """Of the child that is up."""
        return self._keeper.pid

    @property
    def state(self) -> str:
        """ "up"; "down" until the next child is up; "given up" for longer than that; or "closed"."""
        return self._keeper.state

    @property
    def deaths(self) -> int:
        """How many children have ended that were not asked to, and how many did not come up."""
        return self._keeper.deaths

    @property
    def died_s(self) -> float:
        """When the last child was gone, on the monotonic clock; -inf: none is yet, inf: one was left that cannot be killed."""
        return self._keeper.died_s

    @property
    def restarts(self) -> int:
        """How many children have come up after one that ended."""
        return self._keeper.restarts

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        result: list[bool | Failure] = self._call("exists", names, lambda: list(names), deadline)
        return result

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        result: list[PutResult] = self._call("put", puts, lambda: self._puts(puts), deadline)
        return result

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        result: list[GetResult] = self._call("get", gets, lambda: self._gets(gets), deadline)
        return result

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        result: list[bool] = self._call("settle", tickets, lambda: None, deadline)
        return result

    def close(self) -> None:
        """Close the store in the child and end it; kill it if that takes more than 2 seconds. Returns within 4 seconds. Idempotent."""
        if not self._forked:
            self._keeper.close()

    def fence(self) -> None:
        """Kill the child at once, the last way to take memory back from it. `settle` says when it is gone; another one is started."""
        if not self._forked:
            self._keeper.fence()

    def register_region(self, region: Region) -> None:
        """Have this child, and those that come after it, map a region. After `close` nothing happens.

        Raises:
            BackendError: the child could not map it, or the backend refused it; then it is not known.
            OSError: the region is closed, or there are no more descriptors.
        """
        self._refuse_fork("register_region")
        exchange = self._exchange
        # Before all other locks. Who announces a region that another thread is announcing may use it afterwards.
        with self._announcing:
            with exchange.lock:
                if region.id in exchange.regions:
                    return
                known = exchange.regions.add(region)
            if known is None:
                return
            try:
                self._tell("register", known.announcement(), _REGION_S, known.descriptor)
            except BaseException:
                with exchange.lock:
                    exchange.regions.drop(region.id)
                raise

    def unregister_region(self, region: Region) -> None:
        """Have the child unmap a region. Idempotent."""
        self._refuse_fork("unregister_region")
        with self._exchange.lock:
            known = self._exchange.regions.drop(region.id)
        if known:
            self._tell("unregister", region.id, _UNREGISTER_S)

    def begin(self, op: str, items: Sequence[Any], deadline: Deadline) -> int:
        """As `PolledBackend.begin`."""
        if self._forked:
            number = next(self._forked_numbers)
            self._forked_answers.append((number, self._fork_error(op)))
            return number
        exchange = self._exchange
        if op not in _POLLED_OPS or (op == "delete" and not hasattr(self, "delete")):
            return exchange.refused(op, UnsupportedError(f"{self._label} {op}: the backend does not offer it"))
        # A copy: what the caller does to its list afterwards must not change how many answers there are.
        own = list(items)
        payload: Callable[[], Any]
        if op == "put":
            payload = lambda: self._puts(own)  # noqa: E731
        elif op == "get":
            payload = lambda: self._gets(own)  # noqa: E731
        else:
            payload = lambda: own  # noqa: E731
        return exchange.submit(op, own, payload, deadline, None).number

    def take_answers(self) -> list[tuple[int, object]]:
        """As `PolledBackend.take_answers`."""
        if self._forked:
            taken = list(self._forked_answers)
            self._forked_answers.clear()
            return taken
        return self._exchange.take()

    def wait_answers(self, until_s: float) -> None:
        """As `PolledBackend.wait_answers`."""
        if not self._forked:
            self._exchange.wait_polled(until_s)

    def _delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        result: list[DeleteStatus | Failure] = self._call("delete", names, lambda: list(names), deadline)
        return result

    def _list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        result: ListPage = self._call("list", (prefix,), lambda: [prefix, cursor, min(limit, _MAX_PAGE)], deadline)
        return result

    def _usage(self, deadline: Deadline) -> Usage:
        result: Usage = self._call("usage", (None,), lambda: None, deadline)
        return result

    def _call(self, op: str, items: Sequence[Any], payload: Callable[[], Any], deadline: Deadline) -> Any:
        if self._forked:
            answer = failed(op, len(items), self._fork_error(op), sent=False)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return self._exchange.wait(self._exchange.submit(op, items, payload, deadline, threading.Event()))

    def _tell(self, op: str, payload: Any, timeout_s: float, descriptor: Descriptor | None = None) -> None:
        call = self._exchange.submit(op, (None,), lambda: payload, Deadline.after(timeout_s), threading.Event(), descriptor)
        try:
            self._exchange.wait(call)
        except (UnavailableError, ClosedError):
            # The next child, if there is one, is told of the regions that are known then.
            if not call.lost:
                raise

    def _puts(self, puts: Iterable[Put]) -> list[Any]:
        return [[put.name, put.mode.value, self._parts(put.parts)] for put in puts]

    def _gets(self, gets: Iterable[Get]) -> list[Any]:
        return [[get.name, self._parts(get.into)] for get in gets]

    def _parts(self, buffers: Iterable[Buffer]) -> list[Any]:
        known = self._exchange.regions
        parts = []
        for buffer in buffers:
            if buffer.region.id not in known:
                raise InvalidError(f"{self._label}: a buffer lies in {buffer.region!r}, which was not registered with this backend")
            parts.append([buffer.region.id, buffer.offset, buffer.length])
        return parts

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _fork_error(self, op: str) -> UnavailableError:
        return UnavailableError(f"{self._label} {op}: this process was forked from the one that opened it; open a backend of its own")

    def _refuse_fork(self, op: str) -> None:
        if self._forked:
            raise self._fork_error(op)

    def _forget(self) -> None:
        """In a forked process: let go of the line, so that it ends with the process that opened it."""
        self._keeper.forget()


_open: weakref.WeakSet[IsolatedBackend] = weakref.WeakSet()
_watches_forks = False


def _watch_forks(backend: IsolatedBackend) -> None:
    global _watches_forks
    _open.add(backend)
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for backend in list(_open):
        backend._forget()
