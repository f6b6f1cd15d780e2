"""How much has come over a connection and was not read.

libzmq keeps the parts of a message that does not end, however many they are: its limits are for one part, and for whole messages. A limit
for those is worse than none: it ends the process when a connection that has reached it is lost and was pinged (4.3.5). What the kernel has
counted is what is left to go by.
"""

from __future__ import annotations

import ctypes
import socket as sockets
import time

__all__ = ["Unread"]

_BYTES_RECEIVED = 128
"""Of `tcpi_bytes_received` in `struct tcp_info`."""
_INFO_BYTES = _BYTES_RECEIVED + 8

_FRAMING_BYTES = 128
"""What headers and encryption add to a message, and more."""
_PINGS_BYTES_S = 128.0
"""What comes without being a message, and more."""

_getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt


class Unread:
    """Of one connection of libzmq's. A little more is taken for read than was."""

    __slots__ = ("_descriptor", "_looked_s", "_read", "bytes")

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: as libzmq tells it."""
        self._descriptor = descriptor
        self._looked_s = time.monotonic()
        self._read = 0.0
        self.bytes = 0
        """At the last `look`."""

    def read(self, size: int) -> None:
        """A message of so many bytes was read."""
        self._read += size + _FRAMING_BYTES

    def forget(self) -> None:
        """Take all that has come for read."""
        self._read = float(_received_bytes(self._descriptor))

    def look(self) -> int:
        """How much it is now."""
        now = time.monotonic()
        received = _received_bytes(self._descriptor)
        self._read = min(self._read + _PINGS_BYTES_S * (now - self._looked_s), received)
        self._looked_s = now
        self.bytes = int(received - self._read)
        return self.bytes


def _received_bytes(descriptor: int) -> int:
    """What a TCP connection has received since it stands; 0 for whatever else the descriptor is by now."""
    # A socket object would own the descriptor, which is libzmq's and may be closed, and another's, at any time.
    info = (ctypes.c_char * _INFO_BYTES)()
    length = ctypes.c_uint(_INFO_BYTES)
    if _getsockopt(descriptor, sockets.IPPROTO_TCP, sockets.TCP_INFO, info, ctypes.byref(length)) or length.value < _INFO_BYTES:
        return 0
    return int.from_bytes(info.raw[_BYTES_RECEIVED:], "little")
