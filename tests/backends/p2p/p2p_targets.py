"""Nodes as the conformance suite opens them: with the records of a location on their own shelf, or at a peer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal
from unittest import mock

import kvstore_sdk_backends.p2p.node as p2p_node_module
import kvstore_sdk_backends.p2p.security as p2p_security_module
from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    ClosedError,
    Deadline,
    Failure,
    Get,
    GetResult,
    Put,
    PutResult,
    PutStatus,
    Region,
    Ticket,
    open_backend,
)
from kvstore_sdk_backends.p2p.shelf import Shelf

__all__ = ["Asker", "open_asker", "open_node"]

Data = Literal["zmq", "nixl"]

# Both ends of every session are in one process of the suite: none is lost because that had to wait for a core for seconds.
p2p_security_module._SILENCE_MS = 60_000

MAX_SHELVES = 4
"""Of the locations that were opened last; a check uses three at most."""


class _Shelf(Shelf):
    """Stays when its node is closed, as the suite asks of a location. A node has its own otherwise."""

    def close(self) -> None:
        pass


_shelves: OrderedDict[str, _Shelf] = OrderedDict()
_opening = threading.Lock()


def open_node(location: str, *, serve_bytes: int = 64 << 20, data: Data = "zmq") -> Backend:
    """A node without peers. In this process all of a location share a shelf."""
    with _opening:
        shelf = _shelves.pop(location, None) or _Shelf(serve_bytes)
        _shelves[location] = shelf
        while len(_shelves) > MAX_SHELVES:
            _, old = _shelves.popitem(last=False)
            Shelf.close(old)
        with mock.patch.object(p2p_node_module, "Shelf", return_value=shelf):
            return open_backend("p2p://127.0.0.1:0", {"serve_bytes": serve_bytes, "data": data})


@functools.cache
def owner(data: Data, pid: int) -> Any:
    """The peer of this process, for all locations; it lives as long as the process."""
    return open_backend("p2p://127.0.0.1:0", {"serve_bytes": 1 << 30, "data": data, "ucx_tls": "tcp" if data == "nixl" else ""})


class Asker:
    """A node of its own, which has nothing. What is put goes to the peer; what is looked up and loaded comes from there."""

    def __init__(self, location: str, data: Data) -> None:
        self._prefix = hashlib.sha256(location.encode()).hexdigest()[:16]
        self._owner = owner(data, os.getpid())
        options = {"peers": str(self._owner.address), "data": data, "ucx_tls": "tcp" if data == "nixl" else "", "answer_timeout_s": 20.0}
        self._node: Any = open_backend("p2p://127.0.0.1:0", options)
        self._closed = False
        mine = self._node.capabilities
        self.capabilities: Capabilities = dataclasses.replace(
            mine, read_only=False, max_name_bytes=mine.max_name_bytes - len(self._inside(""))
        )

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        answers: list[bool | Failure] = self._node.exists([self._inside(name) for name in names], deadline)
        return answers

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if self._closed:
            return [PutResult(PutStatus.CLOSED, ClosedError("asker put: it is closed")) for _ in puts]
        results: list[PutResult] = self._owner.put([dataclasses.replace(put, name=self._inside(put.name)) for put in puts], deadline)
        return results

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        results: list[GetResult] = self._node.get([dataclasses.replace(get, name=self._inside(get.name)) for get in gets], deadline)
        return results

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        over: list[bool] = self._node.settle(tickets, deadline)
        return over

    def register_region(self, region: Region) -> None:
        self._node.register_region(region)

    def unregister_region(self, region: Region) -> None:
        self._node.unregister_region(region)

    def close(self) -> None:
        self._closed = True
        self._node.close()

    def _inside(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def open_asker(location: str, *, data: Data = "zmq") -> Asker:
    """Each location is a part of what the peer has."""
    return Asker(location, data)
