"""Records over ZMQ, where NIXL is not: one connection for each session, which the asker opens.

The asker sends one empty message when it has connected. Then only the owner sends: messages of two frames, a header and the record. All of
this runs on the node's event loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import zmq

from kvstore_sdk.backend import Buffer, Deadline
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.arrivals import Arrival
from kvstore_sdk_backends.p2p.guard import Guard
from kvstore_sdk_backends.p2p.messages import MAX_RECORD_BYTES
from kvstore_sdk_backends.p2p.monitor import FLOODED, Monitor
from kvstore_sdk_backends.p2p.security import Security

__all__ = ["HEADER", "MAX_QUEUED_BYTES", "Receiver", "Sender", "routing_id"]

HEADER = struct.Struct(">QIQ")
"""Number of the Fetch, index of the item in it, bytes of the record."""

MAX_QUEUED_BYTES = 32 << 20
"""Handed to the transport of one session and not yet taken by the kernel. A record that is larger goes alone."""

_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LOOK_S = 0.001
_FAREWELL_S = 0.1
"""When a data connection has ended, for what its owner may have said of that on the control connection."""
_GRACE_S = 1.0
"""How long after its deadline a record may still be on its way, before the connection is ended to have its memory back."""
_TURN = 8
"""Messages taken from one socket before the loop does something else; records only until they have `_TURN_BYTES`, which takes a millisecond
or two."""
_TURN_BYTES = 4 << 20
_CONNECTIONS = 4
"""To one data port at a time. The asker needs one, and whoever else connects does not stay."""
_FROM_ASKER_BYTES = 4096
"""An asker sends one empty frame; one that is longer than this ends its connection. What a key takes to be proven is shorter."""
_UNREAD_BYTES = 8 << 20
"""What may have come to an asker and not been read, beside twice the most that it has waited for at a time: some may be late."""


def routing_id(node: bytes) -> bytes:
    """What the asker's data connection calls itself: the owner sends to nobody else. `node` is that of the asker's Hello."""
    # An identity of ZMQ must not begin with a zero.
    return b"d" + node


class _Sent:
    __slots__ = ("freed", "late_at", "over", "size", "tracker")

    def __init__(self, tracker: zmq.MessageTracker, size: int, late_at: float) -> None:
        self.tracker = tracker
        self.size = size
        self.late_at = late_at
        self.over = False
        # Of whoever waits, who may be cancelled.
        self.freed: asyncio.Future[None] | None = None

    def free(self) -> None:
        self.over = True
        if self.freed is not None and not self.freed.done():
            self.freed.set_result(None)


class Sender:
    """The owner's end: sends records of one session from the memory where they lie."""

    def __init__(self, context: zmq.Context, security: Security, node: bytes, *, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        """Listen on a port of its own. `node`: of the asker.

        Raises:
            UnavailableError: there is no free port.
        """
        self._loop = asyncio.get_running_loop()
        self._to = routing_id(node)
        self._max_queued_bytes = max_queued_bytes
        self._sent: deque[_Sent] = deque()
        self._queued_bytes = 0
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._news = asyncio.Event()
        self._asker = -1
        self._closed = False
        # Not one of asyncio's: its sends would wait inside the library, where a deadline and `close` do not reach them.
        self._socket: zmq.Socket = context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        try:
            security.secure_server(self._socket, "data")
            self._socket.maxmsgsize = _FROM_ASKER_BYTES
            # What may wait is bounded in bytes, by `max_queued_bytes`.
            self._socket.sndhwm = 0
            self._socket.router_mandatory = 1
            self._guard = Guard(
                self._socket,
                most=_CONNECTIONS,
                secured=security.key is not None,
                label="p2p data",
                max_unread_bytes=16 * _FROM_ASKER_BYTES,
            )
            try:
                self._guard.lost = self._lost
                self.port = security.bind_data(self._socket)
            except BaseException:
                self._guard.close()
                raise
        except BaseException:
            self._socket.close(0)
            raise
        self._guard.start(self.port)
        self._guarding = self._loop.create_task(self._guard.run())
        self._loop.add_reader(self._socket.FD, self._take)
        # The descriptor tells of changes alone, and there may have been one before it was looked at.
        self._loop.call_soon(self._take)

    @property
    def closed(self) -> bool:
        """Whether the connection is over: `close` was called, the asker is gone, or it did not take what was sent."""
        return self._closed

    @property
    def queued_bytes(self) -> int:
        """Memory that the transport still reads."""
        return self._queued_bytes

    async def send(self, number: int, index: int, buffer: Buffer, deadline: Deadline) -> bool:
        """Send the record in `buffer`, which must not change before this returns; afterwards the transport reads it no more.

        That holds when it is cancelled, too: the connection is then ended, which is the only way to have the memory back. So is one whose
        asker has not taken a record by a second after its deadline.

        Returns:
            Whether the transport took all of it, before the connection ended. Whether it arrived, only the asker knows.
        """
        if (self._waiting or not self._may_send(buffer.length)) and not await self._wait(buffer.length, deadline):
            return False
        if (sent := self._hand_over(number, index, buffer, deadline)) is None:
            return False
        cancelled: asyncio.CancelledError | None = None
        while not sent.over:
            sent.freed = self._loop.create_future()
            try:
                await sent.freed
            except asyncio.CancelledError as cause:
                cancelled = cause
                self.close()
        if cancelled is not None:
            raise cancelled
        return not self._closed

    def close(self) -> None:
        """End the connection. The memory of all that is under way is free within milliseconds. Idempotent."""
        if not self._closed:
            self._closed = True
            self._news.set()
            self._loop.remove_reader(self._socket.FD)
            self._guarding.cancel()
            self._guard.close()
            self._socket.close(0)

    async def _wait(self, size: int, deadline: Deadline) -> bool:
        """For a turn, in the order of coming, and for room."""
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline.remaining_s()), self._turn:
                while not self._closed and not self._may_send(size):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def _may_send(self, size: int) -> bool:
        return self._asker >= 0 and (not self._queued_bytes or self._queued_bytes + size <= self._max_queued_bytes)

    def _hand_over(self, number: int, index: int, buffer: Buffer, deadline: Deadline) -> _Sent | None:
        if self._closed:
            return None
        try:
            for part in (self._to, HEADER.pack(number, index, buffer.length)):
                self._socket.send(part, _MORE)
            tracker = self._socket.send(buffer.view, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:
            self.close()
            return None
        sent = _Sent(tracker, buffer.length, deadline.at_s + _GRACE_S)
        self._sent.append(sent)
        self._queued_bytes += sent.size
        if len(self._sent) == 1:
            self._look()
        return sent

    def _look(self) -> None:
        """Not a task: those are cancelled when the loop ends, and whoever waits for its memory then still waits for this."""
        # Sending may use up the signal that something has come; and the memory of a connection that is lost is free only when the socket
        # is asked something.
        self._take()
        while self._sent and self._sent[0].tracker.done:
            sent = self._sent.popleft()
            self._queued_bytes -= sent.size
            sent.free()
            self._news.set()
        if self._sent:
            if Deadline(self._sent[0].late_at).expired:
                self.close()
            self._loop.call_later(_LOOK_S, self._look)

    def _take(self) -> None:
        for _ in range(_TURN):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError:
                self.close()
                return
            # What the guard knows of a connection must be as new as what comes over it.
            self._guard.look()
            if self._asker >= 0 or len(frames) != 2 or frames[0].bytes != self._to or len(frames[1]):
                # Of a stranger, whose connection the guard ends when its time is up: by now the descriptor may be another's.
                continue
            if not self._guard.knows(frames[1]):
                # The asker came, and is gone.
                self.close()
                return
            self._guard.welcome(frames[1])
            self._asker = int(frames[1].get("__fd"))
            self._news.set()
        self._loop.call_soon(self._take)

    def _lost(self, descriptor: int) -> None:
        if descriptor == self._asker:
            self.close()


class _BreachError(Exception):
    """The owner does not keep to the protocol. The text is a clause."""


class Receiver:
    """The asker's end: copies records into the buffers that wait for them, and drops what nobody waits for."""

    def __init__(self, context: zmq.Context, security: Security, address: Address, node: bytes, lost: Callable[[str], None]) -> None:
        """Connect.

        Args:
            address: The owner's, with the data port of its Welcome.
            node: This node's, as in its Hello.
            lost: Called once, on the loop, with the reason as a clause, when the connection is lost or its other end breaks the protocol.
                There is no second connection in a session.
        """
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._lost = lost
        self._arrivals: dict[int, Arrival] = {}
        self._header = bytearray(HEADER.size)
        self._waited_bytes = self._most_waited_bytes = 0
        self._closed = False
        self._again = False
        self._socket: zmq.Socket = context.socket(zmq.DEALER, socket_class=zmq.Socket)
        self._monitor: Monitor | None = None
        try:
            security.secure_client(self._socket, "data", address)
            self._socket.routing_id = routing_id(node)
            self._monitor = Monitor(self._socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED, self._note, self._most)
            self._socket.connect(address.endpoint)
            # Which of the connections to its port is this one, the owner learns from this.
            # It may have failed by now; then the monitor tells of it.
            with suppress(zmq.Again):
                self._socket.send(b"", zmq.NOBLOCK)
        except BaseException:
            self._end_sockets()
            raise
        self._loop.add_reader(self._socket.FD, self._take)
        # The descriptor tells of changes alone, and there may have been one before it was looked at.
        self._loop.call_soon(self._take)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """Fetches of which records are to come."""
        return len(self._arrivals)

    def expect(self, number: int, buffers: Mapping[int, Buffer]) -> Arrival:
        """Wait for the records of a Fetch, before it is sent. Cancel the arrival at the end, whatever became of it.

        Args:
            buffers: By index of the item, each as long as the record.
        """
        arrival = Arrival(lambda: self._drop(number), buffers)
        if self._closed:
            arrival.cancel()
        elif not arrival.over:
            self._arrivals[number] = arrival
            self._waited_bytes += arrival.total_bytes
            self._most_waited_bytes = max(self._most_waited_bytes, self._waited_bytes)
        return arrival

    def close(self) -> None:
        """End the connection and all arrivals. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._end_sockets()
            for arrival in list(self._arrivals.values()):
                arrival.cancel()

    def _end_sockets(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(0)

    def _drop(self, number: int) -> None:
        if (arrival := self._arrivals.pop(number, None)) is not None:
            self._waited_bytes -= arrival.total_bytes

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._lost(reason)

    def _note(self, event: int, value: int) -> None:
        if event == FLOODED:
            self._fail("more came over its data connection than was asked for")
        else:
            self._loop.call_later(_FAREWELL_S, self._fail, "the data connection is lost")

    def _most(self) -> int:
        return _UNREAD_BYTES + 2 * self._most_waited_bytes

    def _take_again(self) -> None:
        self._again = False
        self._take()

    def _take(self) -> None:
        taken_bytes = 0
        try:
            for _ in range(_TURN):
                if self._closed:
                    return
                taken_bytes += self._take_one()
                if taken_bytes >= _TURN_BYTES:
                    break
        except zmq.Again:
            return
        except _BreachError as breach:
            self._fail(str(breach))
            return
        except zmq.ZMQError as cause:
            self._fail(f"the data connection failed: {cause.strerror}")
            return
        # Once, however often the descriptor tells of more meanwhile.
        if not self._again:
            self._again = True
            self._loop.call_soon(self._take_again)

    def _take_one(self) -> int:
        """Take a message, into its buffer where one waits. Returns the bytes of its record."""
        if self._socket.recv_into(self._header, flags=zmq.NOBLOCK) != HEADER.size or not self._socket.get(zmq.RCVMORE):
            raise _BreachError("a data message is not a header and a record")
        number: int
        index: int
        size: int
        number, index, size = HEADER.unpack(self._header)
        if not 0 < size <= MAX_RECORD_BYTES:
            raise _BreachError("a data header has no size of a record")
        arrival = self._arrivals.get(number)
        buffer = None if arrival is None else arrival.waiting.get(index)
        if buffer is not None and buffer.length != size:
            raise _BreachError(f"a record of {size} bytes came for one of {buffer.length}")
        # An empty buffer drops the frame. A frame that is longer than its buffer is cut, never written beyond it.
        came = self._socket.recv_into(bytearray() if buffer is None else buffer.view, flags=zmq.NOBLOCK)
        if came != size or self._socket.get(zmq.RCVMORE):
            raise _BreachError("a data message is not a header and a record")
        if arrival is not None and buffer is not None:
            arrival.take(index)
        assert self._monitor is not None
        self._monitor.read(size + HEADER.size)
        return size
