"""The data plane of a node: NIXL over UCX, in a child process that maps the node's regions and nothing else of it.

The child is a `Backend` whose names are addresses at a peer: a put WRITEs a buffer there. So deadlines, doubts, restarts, and killing it
as the last way to take memory back are those of `kvstore_sdk.isolation`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_sdk.backend import (
    BackendError,
    Buffer,
    ConfigError,
    Deadline,
    Failure,
    Put,
    PutResult,
    PutStatus,
    Region,
    Ticket,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk.isolation import IsolatedBackend, IsolationLimits, open_isolated
from kvstore_sdk_backends.p2p import plane_names

__all__ = ["LOOPBACK_DEVICE", "LOOPBACK_TLS", "NETWORK_TLS", "Plane", "Target"]

logger = logging.getLogger(__name__)

LOOPBACK_DEVICE = "lo"
LOOPBACK_TLS = "tcp,cma,self"
"""CMA copies from process to process within a machine, and needs TCP beside it to find the other one."""
NETWORK_TLS = "tcp,self"
"""Without CMA, which passes by every network namespace and firewall."""

_TARGET = "kvstore_sdk_backends.p2p.nixl_plane:open_plane"
_LIMITS = IsolationLimits(restarts=300)
"""Most ends are fences, of which a peer that comes and goes costs one each. At one in two seconds something else is wrong."""
_CONTROL_S = 2.0
"""What the child answers from its own memory. Generous: it shares its cores with an engine."""
_DROP_S = 0.5
_AHEAD_S = 0.25
"""So much longer than it was asked to the child looks, so that not each load has to ask it."""
_KERNEL_S = 0.5
"""A copy over CMA that the kernel is in the middle of goes on when the process that it writes to is gone: half a MiB, which takes 0.1 ms,
or as long as a busy machine keeps that thread from running. A new child takes longer to come up."""

Target = tuple[int, bytes, list[tuple[Region, int, int]]]
"""Generation of the child, metadata of its agent, and of each region the address there and the size."""


@dataclass(slots=True)
class _Peer:
    """Somebody who may be written to. `target`: what its places are named by. `generation`: the child that knows it."""

    agent: bytes
    regions: tuple[tuple[int, int], ...]
    target: str
    generation: int = 0
    admitting: threading.Lock = field(default_factory=threading.Lock)


class Plane:
    """Both ends of transfers: memory that peers WRITE into, and WRITEs into the memory of peers.

    Blocking methods, of any thread; each says how long it takes. While the child is down all of them fail at once, and it is started again.
    """

    def __init__(self, *, tls: str = "", devices: str = "", label: str = "p2p") -> None:
        """Start the child, which takes 2 seconds and 250 MiB.

        Args:
            tls: Transports, as in UCX_TLS; without any `LOOPBACK_TLS` on loopback, elsewhere `NETWORK_TLS`.
            devices: Network devices, as in UCX_NET_DEVICES; without any loopback alone. Nothing listens anywhere else.
            label: What it is called in errors and logs.

        Raises:
            UnsupportedError: NIXL is missing, or does not come up; the message says why.
        """
        if importlib.util.find_spec("nixl") is None:
            raise UnsupportedError(f"{label}: nixl is not installed; pip install 'kvstore-sdk[nixl]'")
        devices = devices or LOOPBACK_DEVICE
        tls = tls or (LOOPBACK_TLS if devices == LOOPBACK_DEVICE else NETWORK_TLS)
        self._label = label
        try:
            self._backend: IsolatedBackend = open_isolated(_TARGET, {"tls": tls}, location=devices, limits=_LIMITS, label=f"{label} nixl")
        except (BackendError, ConfigError) as cause:
            said = cause.problem if isinstance(cause, ConfigError) else cause
            raise UnsupportedError(f"{label}: nixl did not come up: {said}") from cause
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        # Sessions that were dropped, and the child that may still know them.
        self._dropped: dict[bytes, int] = {}
        self._regions: dict[str, Region] = {}
        # Of what `target` answered last: the generation and the regions that it was asked with.
        self._target: tuple[int, int, Target] | None = None
        self._changes = 0
        self._expecting = threading.Lock()
        self._expected: tuple[int, float] = (0, 0.0)
        self._fenced = 0
        # What `generation` said last.
        self._named = self.child

    def __repr__(self) -> str:
        return f"Plane({self._label!r}, generation={self.generation}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        """Of the child that is up."""
        return self._backend.pid

    @property
    def up(self) -> bool:
        """Whether a child is; without one nothing can be written here or sent, for some seconds or, after many deaths, for longer."""
        return self._backend.state == "up"

    @property
    def generation(self) -> int:
        """Of the child that is up, 0 while none is. Never used twice: once it has changed, the child it named is gone, and nothing that
        was on its way into or out of this node's memory through it goes on.
        """
        with self._lock:
            child = self.child
            # Read after it: a child that ends in between makes this later, and so does one that cannot be killed.
            if child != self._named and time.monotonic() >= self._backend.died_s + _KERNEL_S:
                self._named = child
            return self._named

    @property
    def child(self) -> int:
        """The generation that is up now, 0 while none is; what was on its way may go on for a moment."""
        # A death is counted when the process is gone, and before the next one is started.
        return self._backend.deaths + 1 if self._backend.state == "up" else 0

    def add_region(self, region: Region) -> None:
        """Have the child map a region and register it, and those that come after it. `target` changes. Up to 30 seconds; idempotent.

        Raises:
            BackendError: the child, or NIXL, refused it; then it is not known.
            OSError: the region is closed.
        """
        key = plane_names.region_key(region)
        self._backend.register_region(region)
        with self._lock:
            if self._regions.setdefault(key, region) is region:
                self._changes += 1

    def withhold(self, region: Region) -> None:
        """Leave a region out of every `target` from now on. Answers at once; idempotent."""
        with self._lock:
            for key in [key for key, known in self._regions.items() if known is region]:
                del self._regions[key]
                self._changes += 1

    def remove_region(self, region: Region) -> None:
        """Have the child let go of a region. Up to 2 seconds; idempotent.

        Only when no peer writes into it any more: what is mapped next may lie at the same address. So `withhold` comes first, then the end
        of all doubts, by a `fence` where they do not end.
        """
        self.withhold(region)
        # The child that is told, or the next one, which maps it no more.
        with contextlib.suppress(BackendError):
            self._backend.unregister_region(region)

    def target(self) -> Target | None:
        """Where peers may write; None while the child is down. Answered at once unless something changed, then within 2 seconds.

        Only for peers that are trusted: who has it may read and write all regions, and whatever else the child has mapped.
        """
        generation = self.generation
        with self._lock:
            changes, known = self._changes, self._target
            regions = dict(self._regions)
        if not generation or self.child != generation:
            return None
        if known is not None and known[:2] == (generation, changes):
            return known[2]
        try:
            page = self._backend.list(plane_names.SELF, Deadline.after(_CONTROL_S))
            agent, bases = plane_names.read_self(page)
        except BackendError as cause:
            if self.child == generation:
                logger.warning("%s: the child does not say where peers may write: %s", self._label, cause)
            return None
        found = [(regions[key], base, size) for key, base, size in bases if key in regions]
        if self.child != generation:
            # It may be the answer of either.
            return None
        target = (generation, agent, found)
        with self._lock:
            self._target = (generation, changes, target)
        return target

    def admit(self, session: bytes, agent: bytes, regions: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Know a peer: `send` may write into its `regions` (base address, size in bytes) and nowhere else. Up to 3 seconds.

        Only for what came from an authenticated peer: loading it may end the child. A session that was admitted is replaced. Children that
        come after this one are told of it when it is written to.

        Raises:
            InvalidError: the metadata or the regions are not what they should be.
            BackendError: it cannot be loaded now.
        """
        checked = plane_names.checked_regions(agent, regions)
        peer = _Peer(agent, checked, plane_names.target_of(agent, checked))
        with self._lock:
            self._peers.pop(session, None)
        try:
            with peer.admitting:
                self._admit(session, peer, deadline)
        except BackendError:
            with self._lock:
                # The child may have done it, and said so too late.
                self._dropped[session] = self.child
            raise
        with self._lock:
            self._peers[session] = peer
            self._dropped.pop(session, None)

    def drop(self, session: bytes) -> None:
        """Forget a peer. What is on its way to it goes on. Up to half a second."""
        with self._lock:
            if self._peers.pop(session, None) is None:
                return
            self._dropped[session] = self.child
        self._forget_dropped(time.monotonic() + _DROP_S)

    def send(self, session: bytes, pieces: Sequence[tuple[Buffer, int]], deadline: Deadline) -> list[PutResult]:
        """WRITE each buffer to its address at a peer, all of them in one go. Within a quarter of a second of the deadline.

        Returns:
            For each piece: STORED: it has landed. IN_DOUBT: its buffer may still be read until `settle` says that it is over. FAILED,
            TIMED_OUT: nothing of it was sent. UNKNOWN: its buffer is free; some of it may have landed.

        Raises:
            UnavailableError: the session is not admitted, or not any more: it was dropped, or the child died while it was written to,
                which may have been this peer's doing.
        """
        with self._lock:
            peer = self._peers.get(session)
        if peer is None:
            raise UnavailableError(f"{self._label}: send: session {session.hex()[:16]} is not admitted; its peer has to say hello again")
        if deadline.expired:
            return [PutResult(PutStatus.TIMED_OUT)] * len(pieces)
        with peer.admitting:
            if not peer.generation or peer.generation != self.child:
                self._admit(session, peer, deadline)
                with self._lock:
                    if self._peers.get(session) is not peer:
                        # Dropped meanwhile.
                        self._dropped[session] = peer.generation
            generation = peer.generation
        results = self._backend.put(
            [Put(plane_names.place(session, peer.target, address), (buffer,)) for buffer, address in pieces], deadline
        )
        if any(result.status is PutStatus.FAILED for result in results):
            # It may not know the peer: it is told again before the next one.
            peer.generation = 0
        if self.child != generation and generation != self._fenced:
            with self._lock:
                if self._peers.get(session) is peer:
                    del self._peers[session]
                    # Another call may have told the next child of it.
                    self._dropped[session] = self.child
        return results

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        """For each ticket of `send` whether its buffer is free. Waits until all are, or the deadline has passed."""
        return self._backend.settle(tickets, deadline)

    def expect(self, until_s: float) -> None:
        """Until `time.monotonic()` is this, and a little longer: look for what peers write every 0.2 ms, and not every 50. Over TCP nothing
        lands in between.

        Never waits. Of several calls the latest time holds.
        """
        with self._expecting:
            generation = self.child
            if self._expected >= (generation, until_s) or not generation:
                return
            self._expected = (generation, until_s + _AHEAD_S)
            self._backend.take_answers()
            self._backend.begin("exists", [plane_names.expectation(until_s + _AHEAD_S)], Deadline.after(_CONTROL_S))

    def fence(self) -> None:
        """Kill the child at once, the last way to take memory back. `generation` changes when it is gone; another one is started.

        Peers have to be told of the new `target`.
        """
        self._fenced = self.child
        self._backend.fence()

    def close(self) -> None:
        """End the child; kill it where it does not. Up to 4 seconds; idempotent."""
        self._backend.close()
        with self._lock:
            self._peers.clear()
            self._regions.clear()

    def _forget_dropped(self, until_s: float) -> None:
        """Have the child forget who was dropped. What it does not answer in time is asked again before somebody is admitted: while it knows
        one session of an agent it takes no other one of it.
        """
        generation = self.child
        with self._lock:
            self._dropped = {session: known for session, known in self._dropped.items() if known == generation}
            asked = list(self._dropped)[: self._backend.capabilities.max_batch]
        if not asked:
            return
        with contextlib.suppress(BackendError):
            answers = self._backend.delete([session.hex() for session in asked], Deadline(until_s))
            with self._lock:
                for session, answer in zip(asked, answers, strict=True):
                    if not isinstance(answer, Failure):
                        self._dropped.pop(session, None)

    def _admit(self, session: bytes, peer: _Peer, deadline: Deadline) -> None:
        """Tell the child that is up of a peer."""
        self._forget_dropped(min(deadline.at_s, time.monotonic() + _DROP_S))
        generation = self.child
        name = plane_names.admission(session, peer.agent, peer.regions)
        [admitted] = self._backend.exists([name], Deadline(min(deadline.at_s, time.monotonic() + 3.0)))
        if isinstance(admitted, Failure):
            raise admitted.error
        if not generation or self.child != generation:
            raise UnavailableError(f"{self._label}: admit: the child ended meanwhile; try again")
        peer.generation = generation
