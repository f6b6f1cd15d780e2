"""The line to one child, from the parent's side: frames out without waiting, messages in."""

from __future__ import annotations

import array
import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

from kvstore_sdk.isolation.regions import Descriptor
from kvstore_sdk.isolation.wire import MAX_FRAME_BYTES, Frames, WireError

__all__ = ["Link"]

_MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_RECEIVE_BYTES = 256 << 10
_MAX_READS = 16
"""A child that writes without end must not keep its reader."""
_SHORTEST_WAIT_S = 0.001
"""A time-out of zero would mean for ever."""
_CLOSE_S = 0.5
"""Whoever reads returns at once when the line is shut."""
_SMALLEST_LIMIT_BYTES = 128 << 10
"""Above a log record or an offer, each character of them escaped."""
_ITEM_BYTES = 16 << 10
"""Likewise the longest error."""


class Link:
    """One stream socket. Any thread may send; who holds `reader` may receive.

    Attributes:
        reader: Held by the one thread that receives. The first of all locks; `Exchange` says their order.
        ended: The child's end is closed: it is dead, or about to be.
        broken: What the child did that the protocol does not allow; then nothing more is read.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._frames = Frames(_SMALLEST_LIMIT_BYTES)
        self._unsent: deque[tuple[memoryview, Descriptor | None]] = deque()
        self._unsent_bytes = 0
        self._sending = threading.Lock()
        self.reader = threading.Lock()
        self.ended = False
        self.broken: str | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def readable(self) -> bool:
        """Whether something may come yet."""
        return not self.ended and self.broken is None

    def expect(self, count: int | None) -> None:
        """Let answers with so many items come; with None answers of any length that goes over. A child may write more than was asked
        for, and who reads it is the engine's thread."""
        size_bytes = MAX_FRAME_BYTES if count is None else _SMALLEST_LIMIT_BYTES + count * _ITEM_BYTES
        self._frames.limit_bytes = min(MAX_FRAME_BYTES, max(self._frames.limit_bytes, size_bytes))

    def send(self, frame: bytes, descriptor: Descriptor | None = None) -> bool:
        """Send a frame, with a descriptor if one belongs to it, as far as the socket takes it; the rest goes with the next one.

        Returns:
            Whether there was room. A child that reads nothing makes it run out.
        """
        with self._sending:
            if self.ended:
                # Who made the call is told of the child's end by whoever watches the process.
                return True
            if self._unsent_bytes > _MAX_UNSENT_BYTES:
                return False
            self._unsent.append((memoryview(frame), descriptor))
            self._unsent_bytes += len(frame)
            self._flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        if self._unsent and self._sending.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._sending.release()

    def _flush(self) -> None:
        while self._unsent and not self.ended:
            # Taken out before: an exception of a signal handler must not have it sent twice, and a call done twice.
            data, descriptor = self._unsent.popleft()
            passed = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor.fd]))]
            try:
                sent = self._socket.sendmsg([data], passed, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._unsent.appendleft((data, descriptor))
                return
            except OSError:
                # Its death is told by who watches the process.
                self.ended = True
                return
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent.appendleft((data[sent:], None))

    def receive(self, until_s: float | None) -> list[Any]:
        """Messages that have come; waits for some until `time.monotonic()` is `until_s`, or not at all. Only for who holds `reader`."""
        messages: list[Any] = []
        self.flush()
        try:
            for _ in range(_MAX_READS):
                if not self.readable:
                    break
                data = self._read(until_s)
                if data is None:
                    break
                if not data:
                    self.ended = True
                    break
                messages.extend(self._frames.feed(data))
                if len(data) < _RECEIVE_BYTES:
                    break
                until_s = None
        except WireError as cause:
            self.broken = str(cause)
        except OSError:
            self.ended = True
        return messages

    def _read(self, until_s: float | None) -> bytes | None:
        """Some bytes, none at the end, None when nothing came."""
        flags: int = socket.MSG_DONTWAIT
        if until_s is not None and (left_s := until_s - time.monotonic()) > 0:
            if self._unsent:
                # The child may not read before we do. Rare: the socket takes hundreds of frames.
                poll = select.poll()
                poll.register(self._socket, select.POLLIN | select.POLLOUT)
                poll.poll(max(1, left_s * 1000))
                self.flush()
            else:
                # One system call, not two: each gives the interpreter away.
                whole, part = divmod(max(left_s, _SHORTEST_WAIT_S), 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))
                flags = 0
        try:
            return self._socket.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            return None

    def shut(self) -> None:
        """Nothing more goes over: who waits in `receive` returns."""
        self.ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once nobody is in it. If somebody stays, as one does that a signal handler's exception took out of it, it is
        closed with the last reference to it."""
        self.shut()
        if self.reader.acquire(timeout=_CLOSE_S):
            try:
                with self._sending:
                    self._socket.close()
                    self._unsent.clear()
            finally:
                self.reader.release()

    def forget(self) -> None:
        """In a forked process: close this process's copy, and touch nothing else."""
        with contextlib.suppress(OSError):
            self._socket.close()
