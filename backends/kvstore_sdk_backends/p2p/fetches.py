"""What a node does for a Fetch: lend the records, seal them, send them, and give them back when nothing reads them any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore_sdk.backend import BackendError, Deadline, PutResult, PutStatus, Ticket
from kvstore_sdk_backends.p2p.leases import Borrowed, Leases
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import BUSY, FAILED, FOUND, MISSING, WRONG_SIZE, Fetch, Result, Target
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.sessions import Session
from kvstore_sdk_backends.p2p.workers import Workers

__all__ = ["Fetches"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20
"""Records of one Fetch that are lent, sealed and sent together."""
_LOAN_POLL_S = 0.005
"""Between two tries to borrow a record that is there while all that may be lent is lent."""
_LATE_S = 5.0
"""How much longer than its asker the data plane waits for a transfer. One that lands late has a result, which settles the asker's doubts;
of one that is given up nobody can say any more whether it landed."""
_SETTLE_S = 0.5

Item = tuple[str, int, int, int]
Status = tuple[int, int]


class _Job:
    """A Fetch that is being done, and what its items point into: a Target that comes later may mean other memory by the same regions."""

    __slots__ = ("deadline", "items", "number", "session", "statuses", "target")

    def __init__(self, session: Session, fetch: Fetch, deadline: Deadline) -> None:
        self.session = session
        self.number = fetch.number
        self.items: Sequence[Item] = fetch.items
        self.deadline = deadline
        self.statuses: list[Status] = [(FAILED, 0)] * len(fetch.items)
        # The last one that the peer was told is ready; none while another one is being read.
        self.target: Target | None = session.target
        if self.target is not None and self.target.number != fetch.target:
            self.target = None

    @property
    def over(self) -> bool:
        return self.session.ended or self.deadline.expired

    def may_send(self, index: int) -> bool:
        """Whether the peer has room for this, as far as this node is to look after that."""
        if self.session.path != "nixl":
            return True
        _, size_bytes, region, offset = self.items[index]
        target = self.target
        return target is not None and region < len(target.regions) and offset + size_bytes <= target.regions[region][1]

    def address(self, target: Target, index: int) -> int:
        _, _, region, offset = self.items[index]
        return target.regions[region][0] + offset


class Fetches:
    """The transfers of all sessions. No loan goes back while the transport may still read it, also when its session has ended."""

    def __init__(self, leases: Leases, plane: Plane | None, workers: Workers, limits: Limits, lost: Callable[[Session, str], None]) -> None:
        """`lost`: called with the reason when a session's transport is over."""
        self._leases = leases
        self._plane = plane
        self._workers = workers
        self._limits = limits
        self._lost = lost
        self._doubts: dict[Ticket, asyncio.Future[bool]] = {}
        self._settling: asyncio.Task[None] | None = None
        self._notices = Notices()
        self.records_sent = 0
        self.bytes_sent = 0

    async def run(self, session: Session, fetch: Fetch) -> Result:
        """Move what is asked for. Returns when the transport is over with every item, which may be long after the deadline.

        Where nobody can say that nothing more lands at the peer, the session has ended by then, and the result is not to be sent.
        """
        job = _Job(session, fetch, Deadline.after(min(fetch.deadline_ms / 1000, self._limits.max_fetch_s)))
        # What is not there as it is asked for must not take room: its size is whatever the peer says.
        fitting = []
        for index, there in enumerate(self._leases.sizes([item[0] for item in fetch.items])):
            if there != fetch.items[index][1]:
                job.statuses[index] = (WRONG_SIZE if there else MISSING, there)
            elif job.may_send(index):
                fitting.append(index)
        await _all([self._batch(job, batch) for batch in _batches(fetch.items, fitting)])
        return Result(fetch.number, tuple(job.statuses))

    def unfinished(self) -> int:
        """Pieces whose buffers the data plane may still read."""
        return len(self._doubts)

    async def _batch(self, job: _Job, indexes: Sequence[int]) -> None:
        try:
            await self._move_batch(job, indexes)
        except Exception:
            # Its loans stay out until the node closes: nobody knows whether something still reads them.
            logger.exception("p2p: a transfer to %s failed unexpectedly", job.session.host)
            if job.session.path == "nixl":
                # Nor whether something of it lands yet: a result would say that nothing does.
                self._lost(job.session, "a transfer to it failed unexpectedly")

    async def _move_batch(self, job: _Job, indexes: Sequence[int]) -> None:
        size_bytes = sum(job.items[index][1] for index in indexes)
        if not await job.session.room.enter(size_bytes, job.deadline):
            for index in indexes:
                job.statuses[index] = (BUSY, 0)
            return
        try:
            left, moved = list(indexes), True
            patience = Deadline.after(self._limits.loan_s)
            while left:
                # While nothing is lent, one of them is enough to ask for.
                asked = left if moved else left[:1]
                again, lent = await self._pass(job, asked)
                left = again + left[len(asked) :]
                moved = lent or not again
                if moved:
                    patience = Deadline.after(self._limits.loan_s)
                elif patience.expired:
                    break
                else:
                    await asyncio.sleep(_LOAN_POLL_S)
        finally:
            job.session.room.leave(size_bytes)

    async def _pass(self, job: _Job, indexes: Sequence[int]) -> tuple[list[int], bool]:
        """Send what may be lent now. Returns what is there and may not, and whether anything was lent."""
        if job.over:
            return [], False
        names = [job.items[index][0] for index in indexes]
        lent: dict[int, Borrowed] = {}
        pending: list[int] = []
        misfits: list[Borrowed] = []
        for index, borrowed in zip(indexes, self._leases.take(job.session.id, names), strict=True):
            name, size_bytes, _, _ = job.items[index]
            if borrowed is None:
                there = self._leases.sizes([name])[0]
                job.statuses[index] = (BUSY if there else MISSING, there)
                if there:
                    pending.append(index)
            elif borrowed.size_bytes != size_bytes:
                job.statuses[index] = (WRONG_SIZE, borrowed.size_bytes)
                misfits.append(borrowed)
            else:
                job.statuses[index] = (FAILED, 0)
                lent[index] = borrowed
        self._leases.give_back(misfits)
        if lent:
            await self._move(job, lent)
        return pending, bool(lent)

    async def _move(self, job: _Job, lent: dict[int, Borrowed]) -> None:
        if job.session.path == "nixl":
            sent = await self._write(job, lent)
        else:
            sent = await self._send(job, lent)
        for index in sent:
            job.statuses[index] = (FOUND, lent[index].size_bytes)
            self.records_sent += 1
            self.bytes_sent += lent[index].size_bytes
        self._leases.give_back(lent.values())

    async def _send(self, job: _Job, lent: dict[int, Borrowed]) -> list[int]:
        """Over the session's data connection. Returns the indexes of what was sent."""
        sender = job.session.sender
        if sender is None:
            return []
        try:
            good = lent if all(map(_is_sealed, lent.values())) else await self._workers.run(partial(_sealed, lent))
        except BackendError as error:
            self._notices.say(logger.warning, "seal", "p2p: records cannot be sealed: %s", error)
            return []
        done = await _all([sender.send(job.number, index, borrowed.buffer, job.deadline) for index, borrowed in good.items()])
        sent = [index for index, is_sent in zip(good, done, strict=True) if is_sent]
        if sender.closed:
            self._lost(job.session, "its data connection is over")
        return sent

    async def _write(self, job: _Job, lent: dict[int, Borrowed]) -> list[int]:
        """Into the peer's memory. Returns the indexes of what has landed."""
        plane, target, session = self._plane, job.target, job.session
        if plane is None or target is None:
            return []

        def write() -> tuple[dict[int, Borrowed], list[PutResult]]:
            # It may have waited for a thread, and sealing takes a while.
            good = {} if job.over else _sealed(lent)
            if session.target is not target:
                return {}, []
            pieces = [(borrowed.buffer, job.address(target, index)) for index, borrowed in good.items()]
            return good, plane.send(session.id, pieces, Deadline(job.deadline.at_s + _LATE_S)) if pieces else []

        async with session.calls:
            if job.over or session.target is not target:
                # The session has another target, which may have no room for this.
                return []
            try:
                good, results = await self._workers.run(write)
            except BackendError as error:
                self._lost(session, str(error))
                return []
        doubts = [self._doubt(result.ticket) for result in results if result.status is PutStatus.IN_DOUBT]
        sure = all(result.status is not PutStatus.UNKNOWN for result in results)
        for doubt in doubts:
            sure = await asyncio.shield(doubt) and sure
        if not sure:
            # What UCX has handed to the kernel lands whatever becomes of the transfer, and of the process that began it.
            self._lost(session, "a transfer to it broke off")
        return [index for index, result in zip(good, results, strict=True) if result.status is PutStatus.STORED]

    def _doubt(self, ticket: Ticket | None) -> asyncio.Future[bool]:
        """Done when nothing reads the piece any more; then whether it landed."""
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if ticket is None:
            over.set_result(False)
            return over
        self._doubts[ticket] = over
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle())
        return over

    async def _settle(self) -> None:
        """Ask for all doubts together, on one thread, while there are any."""
        plane = self._plane
        while self._doubts and plane is not None:
            tickets = list(self._doubts)
            began_s = time.monotonic()
            try:
                over = await self._workers.run(partial(plane.settle, tickets, Deadline.after(_SETTLE_S)))
            except BackendError as error:
                self._notices.say(logger.warning, "settle", "p2p: what was sent cannot be settled for now: %s", error)
                over = [False] * len(tickets)
            for ticket, is_over in zip(tickets, over, strict=True):
                if is_over and not (doubt := self._doubts.pop(ticket)).done():
                    doubt.set_result(False)
            if self._doubts and not any(over):
                await asyncio.sleep(max(0.05, began_s + 0.1 - time.monotonic()))


async def _all(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    # A task for one alone would have it wait for its turn twice.
    return [await steps[0]] if len(steps) == 1 else await asyncio.gather(*steps)


def _is_sealed(borrowed: Borrowed) -> bool:
    return getattr(borrowed.loan, "sealed", False)


def _sealed(lent: Mapping[int, Borrowed]) -> dict[int, Borrowed]:
    """Those that may be sent. Up to ms of work for each."""
    return {index: borrowed for index, borrowed in lent.items() if borrowed.loan.seal()}


def _batches(items: Sequence[Item], indexes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    batch_bytes = 0
    for index in indexes:
        size_bytes = items[index][1]
        if batch and batch_bytes + size_bytes > _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(index)
        batch_bytes += size_bytes
    if batch:
        yield batch
