"""As much of HTTP/1.1 as a proxy needs: heads, and bodies of a length that is told or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Head", "read_body", "read_head"]

PIECE_BYTES = 1 << 16
# Of one connection, not of the message; a proxy makes its own. It has answered `expect` itself.
_OWN = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "upgrade")


@dataclass(frozen=True)
class Head:
    """First line and headers of a request or an answer. Names of headers are lower case."""

    line: str
    headers: tuple[tuple[str, str], ...]

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]

    @property
    def status(self) -> int:
        return int(self.line.split(" ")[1])

    @property
    def expects(self) -> bool:
        """Whether the body comes only after `100 Continue`."""
        return self.of("expect").lower() == "100-continue"

    @property
    def closes(self) -> bool:
        """Whether its sender ends the connection after it."""
        return self.of("connection").lower() == "close" or "HTTP/1.0" in self.line

    def of(self, name: str) -> str:
        return next((value for found, value in self.headers if found == name), "")

    def request(self, body: bytes) -> bytes:
        """This request, to be sent with this body."""
        length = [("content-length", str(len(body)))] if body or self.method in ("PUT", "POST") else []
        return _encoded(self.line, [*self._kept(), *length])

    def response(self, length: int, of: str) -> bytes:
        """This answer to a request of the method `of`, with a body of `length` bytes. One to HEAD keeps what it says of the body."""
        if of == "HEAD":
            told = [(name, value) for name, value in self.headers if name == "content-length"]
        else:
            told = [] if self.status in (204, 304) else [("content-length", str(length))]
        return _encoded(self.line, [*self._kept(), *told])

    def _kept(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.headers if name not in _OWN]


def _encoded(line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None: the sender ended the connection between two messages."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    line, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return Head(line, tuple((name.strip().lower(), value.strip()) for name, _, value in pairs))


async def read_body(
    reader: asyncio.StreamReader, head: Head, *, of: str = "", stop: bool = False, bytes_per_s: float | None = None
) -> bytes:
    """The body that follows `head`.

    Args:
        of: Of an answer: the method that it answers.
        stop: Leave the second half of the body where it is.
        bytes_per_s: Take it at this rate.
    """
    if of == "HEAD" or (of and head.status in (204, 304)):
        return b""
    if head.of("transfer-encoding").lower() == "chunked":
        return await _read_chunks(reader)
    if of and not head.of("content-length"):
        return await reader.read()
    left = int(head.of("content-length") or 0)
    if stop:
        left //= 2
    body = bytearray()
    while left:
        piece = await reader.read(min(left, PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(bytes(body), left)
        body += piece
        left -= len(piece)
        if bytes_per_s is not None:
            await asyncio.sleep(len(piece) / bytes_per_s)
    return bytes(body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return bytes(body)
