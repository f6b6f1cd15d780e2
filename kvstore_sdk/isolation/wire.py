"""Frames between a process and its child: a length of four bytes, little-endian, and as many bytes of JSON.

The other end runs a vendor's code, which may write anything: nothing is believed before it was looked at, and no length is allocated
before it was compared with the largest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["MAX_FRAME_BYTES", "Frames", "WireError", "encode"]

MAX_FRAME_BYTES = 16 << 20
"""Some hundred thousand names: far above any batch or page."""
_LENGTH = struct.Struct("<I")
# Made once: `json.dumps` makes one a call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class WireError(Exception):
    """What came, or is to go, is no message of this protocol."""


def encode(message: object) -> bytes:
    """The frame of a message.

    Raises:
        WireError: it is too large, or no JSON.
    """
    try:
        body = _ENCODER.encode(message).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise WireError(f"cannot be written as JSON ({type(cause).__name__})") from None
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"has {len(body)} bytes, at most {MAX_FRAME_BYTES} go over")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes bytes as they come, and gives the messages that are whole."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        """`limit_bytes`: the longest body that is taken; it may be changed."""
        self.limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes.

        Raises:
            WireError: a length is out of bounds, or a body is no JSON. What comes after cannot be read either.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, start)
                if length > self.limit_bytes:
                    raise WireError(f"a frame of {length} bytes was announced, at most {self.limit_bytes} are allowed")
                end = start + _LENGTH.size + length
                if len(self._bytes) < end:
                    break
                body = bytes(self._bytes[start + _LENGTH.size : end])
                start = end
                try:
                    message = json.loads(body)
                except (ValueError, RecursionError):
                    raise WireError(f"a frame of {length} bytes is no JSON") from None
                yield message
        finally:
            del self._bytes[:start]
