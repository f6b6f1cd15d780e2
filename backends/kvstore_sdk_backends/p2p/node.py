"""What a node consists of, put together: its loop, its sockets, its records, its server and its data plane."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import importlib.util
import logging
import os

import zmq
import zmq.asyncio

from kvstore_sdk.backend import ConfigError, RecordSource, UnavailableError, UnsupportedError
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.p2p.addresses import Address, is_loopback, resolve
from kvstore_sdk_backends.p2p.admission import Admission
from kvstore_sdk_backends.p2p.data_path import Sender
from kvstore_sdk_backends.p2p.guard import Guard
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import NODE_BYTES
from kvstore_sdk_backends.p2p.options import WHERE, P2PSettings
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.security import Security
from kvstore_sdk_backends.p2p.server import Server
from kvstore_sdk_backends.p2p.shelf import Shelf

__all__ = ["Node"]

logger = logging.getLogger(__name__)

_OPEN_S = 10.0
_CLOSE_S = 2.0
_SECRET_BYTES = 32
_SPARE_DESCRIPTORS = 32
"""What is free when a session begins: it takes five, and others take some meanwhile."""
_SOCKETS_PER_PEER = 16
"""Three where it asks and six where it is asked, those of monitors among them; for a moment a session that ended has some, too."""
_IO_THREADS = 2
"""One for control, one for data: `Security` says which socket is whose."""


class Node:
    """Listens and serves from when it is made until it is closed. Asking is the backend's part, on the same loop.

    Attributes:
        id: Random, of this start: what it calls itself where it is asked. See `id_at` for where it asks.
        address: Where it listens, with its port.
        loop: Whose thread all sockets belong to.
        context: Of all sockets.
        security: Of all sockets.
        shelf: Of `serve_bytes`; None without.
        plane: NIXL; None where it may not be used or cannot be.
    """

    def __init__(self, settings: P2PSettings) -> None:
        """Takes some seconds where NIXL comes up.

        Raises:
            ConfigError: it cannot listen there, or NIXL was asked for and cannot be used.
            BackendError: memory for `serve_bytes` is not to be had.
        """
        self.id = os.urandom(NODE_BYTES)
        self._secret = os.urandom(_SECRET_BYTES)
        self.settings = settings
        self.security = Security(
            _number(settings.listen),
            key=settings.key,
            insecure=settings.insecure,
            data_ports=settings.data_ports,
            max_record_bytes=settings.max_record_bytes,
        )
        self.shelf: Shelf | None = None
        self.plane: Plane | None = None
        self._sources: list[RecordSource] = []
        self._server: Server | None = None
        self._guard: Guard | None = None
        self._admission: Admission | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.loop = EventLoop("kvstore-p2p")
        try:
            if settings.serve_bytes:
                self.shelf = Shelf(settings.serve_bytes, settings.max_record_bytes)
                self._sources.append(self.shelf)
            self.plane = _plane(settings)
            if self.plane is not None and self.shelf is not None:
                self.plane.add_region(self.shelf.region)
            self.loop.run(f"p2p open {settings.listen}", self._begin, _OPEN_S)
        except BaseException:
            if self.plane is not None:
                self.plane.close()
            self.close()
            raise
        if settings.key is None and (settings.off_loopback or settings.insecure):
            logger.warning(
                "%s: insecure: whoever reaches %s may ask for KV, and answer for it; key_file prevents that", WHERE, self.address
            )
        if self.plane is not None and settings.off_loopback:
            logger.warning(
                "%s: data_path_trusted: NIXL moves records over %s unencrypted; whoever reaches its ports may read and write its memory",
                WHERE,
                settings.ucx_devices,
            )
        self._say_unused()
        paths = " or ".join(self.paths(self.address))
        kept = f", keeps up to {settings.serve_bytes} bytes of records" if settings.serve_bytes else ""
        logger.info("%s: listens on %s, %s, data over %s%s", WHERE, self.address, self._who(), paths, kept)

    def __repr__(self) -> str:
        return f"Node({self.address})"

    def id_at(self, address: Address) -> bytes:
        """What this node calls itself where it asks: the same each time, and known to nobody who is not asked there. Whoever knows it may
        take its data, or have it lose its session.
        """
        own = self._hash(str(address).encode())
        return own + self._hash(own)

    def is_own(self, node: bytes) -> bool:
        """Whether that is one of this node's, at whatever address."""
        half = NODE_BYTES // 2
        return hmac.compare_digest(self._hash(node[:half]), node[half:])

    def _hash(self, value: bytes) -> bytes:
        return hashlib.blake2b(value, key=self._secret, digest_size=NODE_BYTES // 2).digest()

    def paths(self, address: Address) -> tuple[str, ...]:
        """The ways that data may take from a peer there, the preferred one first."""
        if self.plane is None:
            return ("zmq",)
        if self.settings.data == "nixl":
            return ("nixl",)
        # On loopback the child has no way to anywhere else.
        return ("nixl", "zmq") if self.settings.off_loopback or is_loopback(address.host) else ("zmq",)

    def add_source(self, source: RecordSource) -> None:
        """Serve its records from now on."""
        self._sources.append(source)

    def end_sessions(self, reason: str) -> None:
        """End those in which this node is asked. On the loop."""
        if self._server is not None:
            self._server.end_sessions("namespace", reason)

    def counters(self) -> dict[str, int]:
        """Of the server. From any thread."""
        return self._server.counters() if self._server is not None else {}

    def close(self) -> None:
        """End sessions and sockets, within two seconds, and give all loans back. What asks ends before, and so does the data plane.

        Idempotent, raises nothing.
        """
        self.loop.close(self._end, _CLOSE_S)
        if self.shelf is not None:
            self.shelf.close()

    async def _begin(self) -> None:
        self.context = zmq.asyncio.Context(io_threads=_IO_THREADS)
        self.context.set(zmq.MAX_SOCKETS, _most_sockets(self.settings.max_peers))
        if self.settings.key is not None:
            self._admission = Admission(self.context, self.settings.key, WHERE)
            self._tasks.append(asyncio.ensure_future(self._admission.run()))
        socket = self.context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        self.security.secure_server(socket, "control")
        listen, most = self.settings.listen, max(64, 4 * self.settings.max_peers)
        self._guard = guard = Guard(socket, most=most, secured=self.settings.key is not None)
        self.address = Address(listen.host, self.security.bind(socket, listen.port))
        guard.start(self.address.port, f"p2p {self.address}")
        self._server = Server(
            socket,
            node=self.id,
            is_own=self.is_own,
            sources=self._sources,
            plane=self.plane,
            make_sender=self._make_sender,
            limits=_limits(self.settings),
            paths=("nixl",) if self.settings.data == "nixl" else (),
            label=f"p2p {self.address}",
            guard=guard,
        )
        self._tasks += [asyncio.ensure_future(self._server.run()), asyncio.ensure_future(guard.run())]

    def _make_sender(self, node: bytes) -> Sender:
        # Without one libzmq ends this process in the middle of listening.
        if not _has_descriptors(_SPARE_DESCRIPTORS):
            raise UnavailableError(f"p2p: fewer than {_SPARE_DESCRIPTORS} file descriptors are free; raise ulimit -n")
        try:
            return Sender(self.context, self.security, node)
        except zmq.ZMQError as cause:
            raise UnavailableError(f"p2p: no data socket: {cause.strerror}; each peer that loads needs some") from None

    async def _end(self) -> None:
        context = getattr(self, "context", None)
        try:
            if self._guard is not None:
                self._guard.close()
            if self._server is not None:
                await self._server.close()
        finally:
            if self._admission is not None:
                self._admission.close()
            if context is not None:
                context.destroy(linger=0)

    def _say_unused(self) -> None:
        """What was set and has no effect, or less than it seems to have."""
        settings = self.settings
        nixls = {"data_path_trusted": settings.data_path_trusted, "ucx_tls": settings.ucx_tls, "ucx_devices": settings.ucx_devices}
        if settings.data == "zmq" and (unused := [name for name, value in nixls.items() if value]):
            logger.warning("%s: %s: without effect, since data goes over zmq", WHERE, ", ".join(unused))
        if settings.data != "nixl" and (ports := settings.data_ports) is not None and len(ports) < settings.max_peers:
            logger.warning("%s: data_ports: only %d of max_peers %d find a port at one time", WHERE, len(ports), settings.max_peers)

    def _who(self) -> str:
        return "open to holders of its key" if self.settings.key is not None else "open to whoever reaches it"


def _most_sockets(max_peers: int) -> int:
    """Of one context. libzmq has 1,023 unless it is told."""
    return 64 + _SOCKETS_PER_PEER * max_peers


def _has_descriptors(most: int) -> bool:
    """Whether so many are free, which others may take the moment after."""
    taken: list[int] = []
    try:
        # Those that were opened before one fails are in the list.
        taken.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(most))
    except OSError:
        return False
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return True


def _number(listen: Address) -> str:
    """Sockets listen on numbers."""
    try:
        return resolve(listen)[0].host
    except OSError as cause:
        raise ConfigError(WHERE, "location", f"{listen.host} does not resolve ({cause.strerror or cause}); write an address") from None


def _limits(settings: P2PSettings) -> Limits:
    limits = Limits(max_sessions=settings.max_peers, lease_s=settings.lease_s)
    if not settings.serve_bytes:
        return limits
    # Half of a shelf may be lent: no session is to have all of that.
    return dataclasses.replace(limits, session_bytes=min(limits.session_bytes, max(1, settings.serve_bytes // 8)))


def _plane(settings: P2PSettings) -> Plane | None:
    if settings.data == "zmq":
        return None
    if settings.data == "auto" and importlib.util.find_spec("nixl") is None:
        logger.info("%s: data over zmq, since nixl is not installed; pip install 'kvstore-sdk[nixl]'", WHERE)
        return None
    try:
        return Plane(tls=settings.ucx_tls, devices=settings.ucx_devices, label="p2p")
    except UnsupportedError as cause:
        if settings.data == "nixl":
            raise ConfigError(WHERE, "data", f"{str(cause).removeprefix('p2p: ')}; or write data=zmq") from cause
        logger.warning("%s: data over zmq, since nixl cannot be used: %s", WHERE, cause)
        return None
