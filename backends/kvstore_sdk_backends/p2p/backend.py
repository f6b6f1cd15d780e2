"""The peer-to-peer backend: what this node's own shelf has, and what its peers have in host memory."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvstore_sdk.backend import (
    BackendError,
    Capabilities,
    ClosedError,
    Deadline,
    Durability,
    Failure,
    Fork,
    Get,
    GetResult,
    GetStatus,
    Hint,
    InvalidError,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    RecordSource,
    Region,
    Ticket,
    TimedOutError,
    Usage,
    is_valid_name,
)
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.asking import Asking
from kvstore_sdk_backends.p2p.doubts import Doubts
from kvstore_sdk_backends.p2p.hints import Hinted, Hints
from kvstore_sdk_backends.p2p.landing import Landing
from kvstore_sdk_backends.p2p.link import Greeting, Link
from kvstore_sdk_backends.p2p.loading import Loading
from kvstore_sdk_backends.p2p.lookups import Lookups
from kvstore_sdk_backends.p2p.messages import MAX_NAMES, Goodbye
from kvstore_sdk_backends.p2p.node import Node
from kvstore_sdk_backends.p2p.options import WHERE, P2PSettings
from kvstore_sdk_backends.p2p.peers import Peers
from kvstore_sdk_backends.p2p.places import Places
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.ways import Ways

__all__ = ["P2PBackend"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 1024
"""As many as a message takes."""
BATCH_BYTES = 8 << 20
"""A call takes some ms of Python at both ends, as long as copying a dozen MiB. No more, so that while what one call of a load has brought
is verified the next one moves."""
GRACE_S = 0.25
"""After its deadline a call is given up, if the loop has not ended it by then. A call may be half a second late."""
OPEN_S = 10.0
PLANE_S, PART_S = 1.5, 0.5
"""For the data plane to end, which was killed, and for the peers that are asked. What is left of the 5 s of `close` is the node's."""
HINT_LOG_EVERY_S = 60.0

_TIMED_OUT = GetResult(GetStatus.TIMED_OUT)


class P2PBackend:
    """A node. Made by `open_p2p`.

    `put` keeps records on the node's own shelf, in its memory, where peers find them; without a shelf it is refused. `exists` and `get`
    look there first, and then ask peers: those that a request named, and those that were listed. No peer is trusted with more than the
    bytes of a record, which the caller verifies. What NIXL may still write when a call is over is IN_DOUBT; over ZMQ nothing ever is,
    unless this process has stood still for so long that its own loop did not end the call.
    """

    def __init__(self, settings: P2PSettings) -> None:
        """Listen, and start the data plane if there is one.

        Raises:
            ConfigError: the address cannot be listened on, or NIXL was asked for and is not there.
            BackendError: the node does not come up.
        """
        self.capabilities = Capabilities(
            max_record_bytes=min(settings.max_record_bytes, settings.serve_bytes or settings.max_record_bytes),
            max_batch=MAX_NAMES,
            max_parts=1,
            max_concurrency=256,
            batch_bytes=BATCH_BYTES,
            max_name_bytes=MAX_NAME_BYTES,
            shared=False,
            read_after_write=True,
            read_only=not settings.serve_bytes,
            durability=Durability.NONE,
            in_doubt=True,
            fork=Fork.REFUSES,
        )
        self._pid = os.getpid()
        self._closed = False
        self._settings = settings
        self._namespace = self._layout = ""
        self._hint_said_s = 0.0
        self._closing = threading.RLock()
        self._node = Node(settings)
        self._loop = self._node.loop
        self._ways = Ways(self._node.paths, self._node.plane)
        self._shelf = self._node.shelf
        if self._shelf is not None:
            # An attribute of the instance: without a shelf there is nothing to say.
            self.usage = self._usage
        self._hints = Hints()
        self._doubts = Doubts(self._node.plane)
        self._landing = Landing(self._node.plane, self._doubts) if self._node.plane is not None else None
        try:
            self._peers, self._lookups, self._asking = self._loop.run("p2p open", self._begin, OPEN_S)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"P2PBackend({str(self.address)!r})"

    @property
    def address(self) -> Address:
        """Where it listens, its port as the system gave it."""
        return self._node.address

    def counters(self) -> dict[str, int]:
        """What was done since the start, and what is held now, for operators."""
        peers = self._peers.all()
        # Asked once of each: the loop may end a session meanwhile.
        paths = [link.welcome.path for peer in peers if (link := peer.link) is not None]
        counts = {f"asked_{name}": count for name, count in (self._lookups.counts | self._asking.counts).items()}
        counts |= {f"served_{name}": count for name, count in self._node.counters().items()}
        return counts | {
            "peers_now": sum(not peer.itself for peer in peers),
            "peers_up_now": len(paths),
            "peers_nixl_now": paths.count("nixl"),
            "peer_connects": sum(peer.connects for peer in peers),
            "doubt_bytes_now": self._doubts.late_bytes,
            "fences": self._doubts.fences,
        }

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        if refused := self._refused("exists"):
            return [Failure(refused) for _ in names]
        answers: dict[str, bool | Failure] = {name: Failure(bad) for name in names if (bad := self._bad_name("exists", name))}
        asked = [name for name in names if name not in answers]
        if self._shelf is not None:
            answers |= dict.fromkeys((name for name, own in zip(asked, self._shelf.exists(asked), strict=True) if own), True)
            asked = [name for name in asked if name not in answers]
        # On the thread of the hint, and also where there is nobody to ask: it is not for what this thread asks later.
        hinted = self._hints.take(asked, wait=True)
        if not self._may_ask:
            answers |= dict.fromkeys(asked, False)
        elif asked:
            answers |= zip(asked, self._ask_whether(asked, hinted, deadline), strict=True)
        return [answers[name] for name in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        """On the shelf. Nothing here waits: the deadline is looked at between two records."""
        if refused := self._refused("put"):
            return [PutResult(PutStatus.CLOSED, refused) for _ in puts]
        return [PutResult(PutStatus.TIMED_OUT) if done and deadline.expired else self._put(put) for done, put in enumerate(puts)]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if refused := self._refused("get"):
            return [GetResult(GetStatus.CLOSED, refused) for _ in gets]
        answers = [_TIMED_OUT if done and deadline.expired else self._get_own(get) for done, get in enumerate(gets)]
        asked = [index for index, answer in enumerate(answers) if answer.status is GetStatus.MISSING]
        while asked and self._may_ask:
            # Whoever loads goes by names. A caller that keeps to the contract has each once.
            once = sorted({gets[index].name: index for index in reversed(asked)}.values())
            for index, answer in zip(once, self._load([gets[index] for index in once], deadline), strict=True):
                answers[index] = answer
            asked = [index for index in asked if index not in once]
        return answers

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        if os.getpid() != self._pid:
            raise self._forked("settle")
        return self._doubts.settle(tickets, deadline)

    def register_region(self, region: Region) -> None:
        """Let peers write into it, where data comes over NIXL. Up to 30 s. After `close` nothing happens.

        Raises:
            BackendError: NIXL was asked for, and does not take it. Where it was not, ZMQ is used instead.
        """
        if os.getpid() != self._pid:
            raise self._forked("register_region")
        if self._landing is None or self._closed:
            return
        try:
            self._landing.add_region(region)
        except (BackendError, OSError) as cause:
            if self._settings.data == "nixl":
                raise
            logger.warning("p2p: records come over zmq from now on, since nixl does not take memory: %s", cause)
            self._ways.zmq_only = True
            self._loop.call_soon(self._renew, "records are to come over zmq")

    def unregister_region(self, region: Region) -> None:
        """Afterwards no peer writes into it."""
        if self._landing is not None and self._refused("unregister_region") is None:
            self._landing.remove_region(region)

    def serve(self, source: RecordSource) -> None:
        if self._shelf is not None:
            logger.warning("%s: serve_bytes: keeps a second copy of host memory, which is served as it is; leave serve_bytes out", WHERE)
        self._node.add_source(source)

    def use_identity(self, namespace: str, layout: str) -> None:
        """Peers that have another namespace or layout refuse this node from now on, and are refused. What others leased is theirs no more,
        also where the identity is that of before: it was host memory of before a reset."""
        changed = (self._namespace, self._layout) != (namespace, layout)
        self._namespace, self._layout = namespace, layout
        if self._shelf is not None:
            self._shelf.use_identity(namespace, layout)
        self._loop.call_soon(self._node.end_sessions, "its records are others from now on")
        if changed:
            self._hints.clear()
            self._loop.call_soon(self._renew, "this node has another namespace or layout")

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        try:
            self._hints.note(names, hint)
        except ValueError as cause:
            if (now_s := time.monotonic()) - self._hint_said_s > HINT_LOG_EVERY_S:
                self._hint_said_s = now_s
                logger.warning("p2p: a request names a peer that cannot be asked: %s", cause)

    def report_corrupt(self, names: Sequence[str]) -> None:
        """Whoever gave them is asked after all other peers for a while, for them and for anything else. What is on the own shelf stays
        there until it is replaced: as likely as the record it is this process's memory that is bad, and others may read it well."""
        if self._refused("report_corrupt") is None:
            own = self._shelf.exists(names) if self._shelf is not None else [False] * len(names)
            self._loop.call_soon(self._lookups.suspect, [name for name, here in zip(names, own, strict=True) if not here])

    def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            # All of it is the parent's.
            return
        with self._closing:
            try:
                if self._node.plane is not None:
                    _end_plane(self._node.plane)
                with suppress(BackendError):
                    self._loop.run("p2p close", self._part, PART_S)
            finally:
                self._node.close()

    @property
    def _may_ask(self) -> bool:
        return bool(self._settings.peers) or len(self._hints) > 0

    def _refused(self, verb: str) -> ClosedError | None:
        if self._closed:
            return ClosedError(f"p2p {verb}: the backend is closed")
        return self._forked(verb) if os.getpid() != self._pid else None

    def _forked(self, verb: str) -> ClosedError:
        return ClosedError(f"p2p {verb}: opened by process {self._pid}; a forked child must open its own")

    def _bad_name(self, verb: str, name: str) -> InvalidError | None:
        if is_valid_name(name, MAX_NAME_BYTES):
            return None
        return InvalidError(f"p2p {verb}: {name!r} is not a valid name of at most {MAX_NAME_BYTES} bytes")

    def _put(self, put: Put) -> PutResult:
        if bad := self._bad_name("put", put.name):
            return PutResult.failed(bad)
        if self._shelf is None:
            return PutResult.failed(ReadOnlyError(f"p2p put {put.name}: this node keeps no records; open it with serve_bytes"))
        return self._shelf.put(put)

    def _get_own(self, get: Get) -> GetResult:
        if bad := self._bad_name("get", get.name):
            return GetResult.failed(bad)
        if len(get.into) > 1:
            return GetResult.failed(InvalidError(f"p2p get {get.name}: {len(get.into)} buffers are more than max_parts 1"))
        return self._shelf.get(get) if self._shelf is not None else GetResult(GetStatus.MISSING)

    def _usage(self, deadline: Deadline) -> Usage:
        """Of the shelf."""
        if refused := self._refused("usage"):
            raise refused
        assert self._shelf is not None
        return self._shelf.usage()

    def _ask_whether(self, names: Sequence[str], hinted: Mapping[Hinted, Sequence[str]], deadline: Deadline) -> list[bool | Failure]:
        try:
            ask = lambda: self._asking.exists(names, deadline.at_s, hinted)  # noqa: E731
            answers = self._run("exists", ask, deadline)
        except BackendError as error:
            answers = [Failure(error) for _ in names]
        if self._closed:
            refused = ClosedError("p2p exists: the backend is closed")
            return [Failure(refused) if isinstance(answer, Failure) else answer for answer in answers]
        return answers

    def _load(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        loading = Loading(self._asking, gets, deadline)
        try:
            answers = self._run("get", loading.run, deadline)
        except (TimedOutError, ClosedError) as error:
            # Either the loop stands still, or it has just been ended.
            loading.give_up()
            if loading.doubt.over:
                answers = [_TIMED_OUT for _ in gets]
            else:
                answers = [GetResult(GetStatus.IN_DOUBT, error, loading.doubt) for _ in gets]
        except Exception as error:
            loading.give_up()
            if loading.doubt.over:
                raise
            cause = error if isinstance(error, BackendError) else BackendError(f"p2p get: raised {type(error).__name__}")
            answers = [GetResult(GetStatus.IN_DOUBT, cause, loading.doubt) for _ in gets]
        return self._as_closed(answers) if self._closed else answers

    def _as_closed(self, answers: Sequence[GetResult]) -> list[GetResult]:
        """What a call answers that `close` has ended, with the data plane that was to fill its buffers."""
        doubts = [answer.ticket for answer in answers if answer.ticket is not None]
        over = dict(zip(doubts, self._doubts.settle(doubts, Deadline.after(PLANE_S)), strict=True))
        ended = GetResult(GetStatus.CLOSED, ClosedError("p2p get: the backend is closed"))
        return [
            ended
            if answer.status in (GetStatus.FAILED, GetStatus.TIMED_OUT) or (answer.ticket is not None and over[answer.ticket])
            else answer
            for answer in answers
        ]

    def _run(self, verb: str, make: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        limit_s = min(deadline.remaining_s() + GRACE_S, threading.TIMEOUT_MAX)
        return self._loop.run(f"p2p {verb}", make, limit_s)

    async def _begin(self) -> tuple[Peers, Lookups, Asking]:
        settings = self._settings
        peers = Peers(
            settings.peers,
            self._connect,
            max_peers=settings.max_peers,
            resolve_s=settings.resolve_s,
            may_connect=self._node.security.may_connect,
        )
        if self._node.plane is not None:
            self._watching = asyncio.ensure_future(self._ways.watch(peers))
        places = Places()
        lookups = Lookups(peers, places, self._hints, fan_out=settings.fan_out, answer_timeout_s=settings.answer_timeout_s)
        return peers, lookups, Asking(lookups, places, self._landing)

    async def _connect(self, address: Address) -> Link:
        greeting = Greeting(self._node.id_at(address), self._namespace, self._layout, self._ways.offer(address))
        link = await Link.open(address, greeting, self._node.context, self._node.security)
        self._ways.note(link)
        return link

    def _renew(self, why: str) -> None:
        self._asking.forget()
        self._peers.start()
        self._peers.renew(why)

    async def _part(self) -> None:
        """Before the node ends: leave the peers that were asked."""
        if not hasattr(self, "_peers"):
            return
        for peer in self._peers.all():
            if (link := peer.link) is not None:
                link.tell(Goodbye("closing", "this node closes"))
        self._peers.close("this node was closed")


def _end_plane(plane: Plane) -> None:
    # Nothing is written or read any more, whatever else there is to wait for.
    plane.fence()
    ending = threading.Thread(target=plane.close, name="kvstore-p2p-close", daemon=True)
    try:
        ending.start()
    except RuntimeError:
        # The process may have no more threads. What was killed is seldom waited for long.
        plane.close()
    else:
        ending.join(PLANE_S)
