"""The data plane's child: a backend whose names are addresses at peers. `Plane` is the other side, and says what each call is for."""

from __future__ import annotations

import bisect
import logging
import os
import re
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from kvstore_sdk.backend import (
    Capabilities,
    ClosedError,
    ConfigError,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    InvalidError,
    ListPage,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    Region,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk.isolation import in_child
from kvstore_sdk_backends.p2p import plane_names
from kvstore_sdk_backends.p2p.lanes import Lanes, Sent
from kvstore_sdk_backends.p2p.nixl_driver import Driver

__all__ = ["UCX_SETTINGS", "NixlPlane", "open_plane"]

WHERE = "backend p2p"
MAX_SESSIONS = 1024
MAX_TRANSFER_BYTES = 64 << 20
"""Of one handle: over CMA all of it is copied inside one call, and nothing else of the agent happens meanwhile."""
_AGENT = re.compile(rb"kvstore-p2p-[0-9a-f]{32}")

# Larger segments: 2.6 GB/s for a batch over TCP instead of 1.0. The others end a peer whose link is cut after 3 seconds, where UCX's own
# settings wait a quarter of an hour, and connect without holding up what else is under way. What the environment says goes before them.
UCX_SETTINGS = {
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "256K",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_TCP_USER_TIMEOUT": "3s",
    "UCX_TCP_CONN_NB": "y",
}


def open_plane(devices: str, *, tls: str) -> NixlPlane:
    """Make an agent that listens on these network devices alone.

    Raises:
        ConfigError: NIXL cannot be used, or this is no child of `kvstore_sdk.isolation`.
    """
    if not in_child():
        raise ConfigError(WHERE, "data", "nixl runs in a child process alone: its settings are those of a whole process")
    # Always: who may reach us is decided by these, and not by what somebody set for another user of UCX.
    os.environ |= {"UCX_TLS": tls, "UCX_NET_DEVICES": devices}
    os.environ |= {name: os.environ.get(name, value) for name, value in UCX_SETTINGS.items()}
    try:
        nixl = _agent()
    except ImportError as cause:
        raise ConfigError(WHERE, "data", f"nixl cannot be imported ({cause}); pip install 'kvstore-sdk[nixl]'") from None
    except Exception as cause:
        problem = f"nixl raised {type(cause).__name__} for UCX_TLS={tls} on {devices}; mend ucx_tls or ucx_devices"
        raise ConfigError(WHERE, "data", problem) from cause
    # Only over CMA are records copied by the thread that sends them.
    return NixlPlane(Lanes(Driver(nixl), (lambda: Driver(_agent())) if "cma" in tls.split(",") else None))


def _agent() -> Any:
    first = "nixl" not in sys.modules
    from nixl import _api

    if first and "NIXL_LOG_LEVEL" not in os.environ:
        # It tells of each agent.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    # A name is never used twice: a peer knows agents by their names, and would take this one for the one before it.
    name = f"kvstore-p2p-{uuid.uuid4().hex}"
    nixl = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    nixl.create_backend("UCX", {})
    return nixl


class _Peer:
    """Who may be written to, and where."""

    def __init__(self, agent: str, metadata: bytes, regions: Sequence[tuple[int, int]]) -> None:
        self.agent = agent
        self.metadata = metadata
        self.regions = sorted(regions)
        self.target = plane_names.target_of(metadata, self.regions)
        self.loaded = False

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether all of it lies within one region."""
        at = bisect.bisect(self.regions, (address, sys.maxsize)) - 1
        return at >= 0 and address + size_bytes <= sum(self.regions[at])


class NixlPlane:
    """put: WRITE to `session/target/address`. exists: admit a peer, or expect what peers write. delete: drop one. list: what peers need of
    this one."""

    capabilities = Capabilities(max_record_bytes=1 << 40, max_batch=256, max_concurrency=64, in_doubt=True)

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = threading.Event()

    def register_region(self, region: Region) -> None:
        try:
            self._lanes.register(region)
        except Exception as cause:
            raise UnavailableError(f"p2p: nixl does not take {region!r}: it raised {type(cause).__name__}") from cause

    def unregister_region(self, region: Region) -> None:
        self._lanes.deregister(region)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        return [self._told(name) for name in names]

    def _told(self, name: str) -> bool | Failure:
        if (until_s := plane_names.read_expectation(name)) is not None:
            self._lanes.expect(until_s)
            return True
        if (admission := plane_names.read_admission(name)) is not None:
            return self._admit(*admission)
        return Failure(InvalidError(f"p2p: {name[:40]!r} is nothing that can be asked"))

    def _admit(self, session: str, metadata: bytes, regions: list[tuple[int, int]]) -> bool | Failure:
        known = self._peers.get(session)
        if known is not None and known.loaded and (known.metadata, known.regions) == (metadata, sorted(regions)):
            return True
        self._drop(session)
        names = set(_AGENT.findall(metadata))
        with self._lock:
            if len(self._peers) >= MAX_SESSIONS:
                return Failure(NoSpaceError(f"p2p: admit {session[:16]}: {MAX_SESSIONS} sessions are known already"))
            agent = names.pop().decode() if len(names) == 1 else ""
            if not agent:
                return Failure(InvalidError(f"p2p: admit {session[:16]}: its metadata names no agent"))
            if any(peer.agent == agent for peer in self._peers.values()):
                # Which may be about to end.
                return Failure(UnavailableError(f"p2p: admit {session[:16]}: its metadata names an agent of another session"))
            peer = self._peers[session] = _Peer(agent, metadata, regions)
        try:
            self._lanes.load(agent, metadata, regions)
        except Exception as cause:  # noqa: BLE001  # NIXL raises classes of its own, one for each status
            with self._lock:
                self._peers.pop(session, None)
            return Failure(InvalidError(f"p2p: admit {session[:16]}: nixl does not take its metadata ({type(cause).__name__})"))
        peer.loaded = True
        return True

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        return [DeleteStatus.DELETED if self._drop(name) else DeleteStatus.ABSENT for name in names]

    def _drop(self, session: str) -> bool:
        with self._lock:
            peer = self._peers.pop(session, None)
        if peer is not None:
            self._lanes.unload(peer.agent)
        return peer is not None

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        results: list[PutResult | None] = [None] * len(puts)
        sent: list[tuple[Sent, list[int]]] = []
        for agent, batch in self._batches(puts, results):
            if self._closed.is_set() or deadline.expired:
                break
            for written, indexes in self._lanes.write(agent, [piece for _, piece in batch]):
                sent.append((written, [batch[index][0] for index in indexes]))
        for written, places in sent:
            result = self._result(written, deadline)
            for place in places:
                results[place] = result
        unsent = PutResult(PutStatus.CLOSED, ClosedError("p2p: write: closed")) if self._closed.is_set() else PutResult(PutStatus.TIMED_OUT)
        return [result or unsent for result in results]

    def _batches(self, puts: Sequence[Put], results: list[PutResult | None]) -> list[tuple[str, list[tuple[int, tuple[int, int, int]]]]]:
        """What may be written, as agents and their batches; each piece with its place in `results`, where all others are answered."""
        batches: list[tuple[str, list[tuple[int, tuple[int, int, int]]]]] = []
        batch_bytes = 0
        for place, put in enumerate(puts):
            session, target, address = plane_names.read_place(put.name)
            peer = self._peers.get(session)
            [buffer] = put.parts
            if peer is None or not peer.loaded or peer.target != target:
                # Its addresses are of the memory of another process, where the session has told of another one since.
                results[place] = PutResult.failed(UnavailableError(f"p2p: write: session {session[:16]} is not admitted"))
            elif not buffer.length or not peer.holds(address, buffer.length):
                where = f"{buffer.length} bytes at {address:#x}"
                results[place] = PutResult.failed(InvalidError(f"p2p: write: {where} are not in memory that {session[:16]} offered"))
            else:
                if not batches or batches[-1][0] != peer.agent or batch_bytes + buffer.length > MAX_TRANSFER_BYTES:
                    batches.append((peer.agent, []))
                    batch_bytes = 0
                batches[-1][1].append((place, (buffer.address, address, buffer.length)))
                batch_bytes += buffer.length
        return batches

    def _result(self, sent: Sent, deadline: Deadline) -> PutResult:
        """Of each of its pieces, at the deadline at the latest."""
        if not self._waited(sent, deadline):
            return PutResult(PutStatus.IN_DOUBT, ticket=sent)
        if sent.error is not None and not sent.transfers:
            return PutResult.failed(UnavailableError(f"p2p: write: nixl raised {type(sent.error).__name__}"))
        failures = [transfer.failure for transfer in sent.transfers if transfer.failure]
        if sent.error is not None:
            failures.append(type(sent.error).__name__)
        if failures:
            return PutResult(PutStatus.UNKNOWN, UnavailableError(f"p2p: write: the peer is gone, or cannot be reached ({failures[0]})"))
        return PutResult(PutStatus.STORED)

    def _waited(self, sent: Sent, deadline: Deadline) -> bool:
        """Whether nothing of it goes on."""
        return all(transfer.over.wait(0.0 if self._closed.is_set() else deadline.remaining_s()) for transfer in sent.transfers)

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        """Refused: over TCP a reader that dies while its peer is paused takes the peer with it."""
        raise UnsupportedError("p2p: the owner of a record writes it; nobody reads")

    def settle(self, tickets: Sequence[Sent], deadline: Deadline) -> list[bool]:
        return [self._waited(sent, deadline) for sent in tickets]

    def close(self) -> None:
        """The process ends after this: what is under way ends with it."""
        self._closed.set()

    # The last method: in a class body that has one of this name, `list` is no type any more.
    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        if prefix != plane_names.SELF:
            raise InvalidError(f"p2p: list {prefix!r}: only {plane_names.SELF} is there to be listed")
        return plane_names.self_page(self._lanes.metadata(), self._lanes.regions)
