"""An HTTP/1.1 proxy that fails as it is told, and remembers every request.

It runs on a thread of its own in the process of the test, speaks keep-alive to both sides, and forwards a request once all of it is there.
One `Fault` at a time is drawn for a request: the first scripted one that matches it and is not used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import random
import ssl
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from urllib.parse import unquote, urlsplit

from http_messages import Head, read_body, read_head
from proxy_faults import (
    Bandwidth,
    Delay,
    Fault,
    Kind,
    LongBody,
    NeverAnswers,
    ResetAfterBody,
    ResetBefore,
    ResetInsideBody,
    ResetInsideRequest,
    ShortBody,
    Status,
    WrongBytes,
)

__all__ = ["FaultProxy", "Seen"]

STOP_S = 10.0
SENT_S = 5.0
PIECE_BYTES = 1 << 16
END_TURNS = 5


@dataclass
class Seen:
    """One request as it arrived, `target` as it was signed. What became of it is known when it is answered; `status` 0: it was not.

    Times are of `time.monotonic`; `ended_s` is before the last bytes of the answer were sent.
    """

    method: str
    target: str
    headers: dict[str, str]
    at_s: float
    body_bytes: int = 0
    status: int = 0
    sent_bytes: int = 0
    ended_s: float = 0.0
    kind: Kind | None = None

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> str:
        return urlsplit(self.target).query

    @property
    def lists(self) -> bool:
        """Whether it asks what is in a bucket."""
        return self.method == "GET" and len(self.path.strip("/").split("/")) == 1


@dataclass
class _Link:
    """The connection to the server of one connection of a client, opened when it is needed."""

    host: str
    port: int
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        """Forward a request. One that meets a connection which the server closed meanwhile is sent again."""
        for fresh in (self.streams is None, True):
            try:
                if self.streams is None:
                    self.streams = await asyncio.open_connection(self.host, self.port)
                reader, writer = self.streams
                writer.write(head.request(body) + body)
                answer = await read_head(reader)
                if answer is None:
                    raise ConnectionResetError("the server closed the connection")
                found = await read_body(reader, answer, of=head.method)
                if answer.closes:
                    self.close()
                return answer, found
            except (OSError, asyncio.IncompleteReadError):
                self.close()
                if fresh:
                    raise
        raise AssertionError("the second attempt has a fresh connection")

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


@dataclass
class _Script:
    fault: Fault
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = float("inf") if self.fault.times is None else self.fault.times


class _DropError(Exception):
    """The connection of the client is to be reset."""


class FaultProxy:
    """Listens at once; whoever made it ends it with `stop`.

    Args:
        upstream: URL of the server.
        seed: Of everything that is drawn.
        tls: Makes `endpoint` an https one.

    Attributes:
        endpoint: What clients talk to.
    """

    def __init__(self, upstream: str, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        where = urlsplit(upstream)
        assert where.hostname is not None
        assert where.port is not None
        self._host, self._port = where.hostname, where.port
        self._tls = tls
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._scripts: list[_Script] = []
        self._errors: list[BaseException] = []
        self._clients: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._healed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.reset()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._client, "127.0.0.1", 0, ssl=tls, limit=1 << 20), self._loop)
        self._server = listening.result(STOP_S)
        scheme = "http" if tls is None else "https"
        self.endpoint = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def requests(self) -> list[Seen]:
        """Every request since the last `reset`, in the order of their arrival."""
        with self._lock:
            return list(self._requests)

    @property
    def peak(self) -> int:
        """Most requests that were on the way at the same time: from the head's arrival until the answer was sent."""
        return self.peak_of("*")

    def peak_of(self, verb: str) -> int:
        """The same of one method alone."""
        with self._lock:
            return self._peaks[verb]

    def script(self, *faults: Fault) -> None:
        """From now on, after what is scripted already."""
        with self._lock:
            self._scripts += map(_Script, faults)

    def heal(self) -> None:
        """Forget all faults. What never answers is reset, what is late answers now."""
        with self._lock:
            self._scripts.clear()
        self._loop.call_soon_threadsafe(self._release)

    def reset(self) -> None:
        """Heal, and forget the requests and the peaks. Requests that are on the way still count as such."""
        self.heal()
        with self._lock:
            self._requests: list[Seen] = []
            self._now: Counter[str] = getattr(self, "_now", Counter())
            self._peaks = Counter(self._now)

    def stop(self) -> None:
        """End every connection and the thread. Idempotent. Raises what went wrong in the proxy itself."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            self._loop.close()
        if self._errors:
            raise self._errors[0]

    async def _end(self) -> None:
        self._server.close()
        for _ in range(END_TURNS):
            for task in tuple(self._clients):
                task.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            # One that was accepted meanwhile begins in a later turn of the loop.
            await asyncio.sleep(0)

    def _release(self) -> None:
        self._healed.set()
        self._healed = asyncio.Event()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        if self._tls is None:
            # A drain then waits until the kernel has everything. Of TLS it would never end.
            writer.transport.set_write_buffer_limits(0)
        link = _Link(self._host, self._port)
        try:
            while await self._turn(reader, writer, link):
                pass
        except (_DropError, OSError, asyncio.IncompleteReadError):
            # The client is gone, or is to believe that the server is.
            _reset(writer)
        except asyncio.CancelledError:
            _reset(writer)
        except BaseException as error:  # noqa: BLE001  # a fault of the proxy: `stop` raises it
            self._errors.append(error)
            _reset(writer)
        finally:
            link.close()
            writer.close()
            self._clients.discard(task)

    async def _turn(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> bool:
        """One request and its answer. Whether the connection goes on."""
        head = await read_head(reader)
        if head is None:
            return False
        # Of the moment in which the fault is drawn: healing ends it, however far it has come by then.
        healed = self._healed
        seen = Seen(head.method, head.target, dict(head.headers), time.monotonic())
        kind = seen.kind = self._draw(seen)
        with self._counted(seen):
            if isinstance(kind, ResetBefore):
                raise _DropError
            if head.expects:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            rate = kind.bytes_per_s if isinstance(kind, Bandwidth) else None
            body = await read_body(reader, head, stop=isinstance(kind, ResetInsideRequest), bytes_per_s=rate)
            seen.body_bytes = len(body)
            if isinstance(kind, ResetInsideRequest):
                raise _DropError
            if isinstance(kind, NeverAnswers) and not kind.done:
                await _hold(reader, healed)
            if isinstance(kind, Status):
                answer, found = _refusal(kind, head)
            else:
                answer, found = await link.ask(head, body)
            if isinstance(kind, NeverAnswers):
                await _hold(reader, healed)
            if isinstance(kind, ResetAfterBody):
                raise _DropError
            if isinstance(kind, Delay):
                await _pause(healed, kind.seconds)
            return await self._send(writer, head, answer, found, seen)

    async def _send(self, writer: asyncio.StreamWriter, head: Head, answer: Head, body: bytes, seen: Seen) -> bool:
        kind, seen.status = seen.kind, answer.status
        cut = len(body)
        if isinstance(kind, WrongBytes):
            body = self._spoil(body, kind.count)
        elif isinstance(kind, LongBody):
            body += bytes(kind.extra_bytes)
            cut = len(body)
        elif isinstance(kind, ShortBody):
            cut = max(0, cut - kind.missing_bytes)
            body = body[:cut] if kind.told else body
        elif isinstance(kind, ResetInsideBody):
            cut = min(cut, kind.after_bytes)
        pieces = [b"", *(body[start : min(start + PIECE_BYTES, cut)] for start in range(0, cut, PIECE_BYTES))]
        pieces[0] = answer.response(len(body), of=head.method)
        for number, piece in enumerate(pieces, 1):
            if isinstance(kind, Bandwidth) and number > 1:
                await asyncio.sleep(len(piece) / kind.bytes_per_s)
            if number == len(pieces):
                # Whoever has the whole answer may send the next request, and that is not one more at the same time.
                self._over(seen)
            writer.write(piece)
            await writer.drain()
        seen.sent_bytes = cut
        if isinstance(kind, ResetInsideBody):
            await _sent(writer)
            raise _DropError
        return cut == len(body) and not head.closes

    def _draw(self, seen: Seen) -> Kind | None:
        with self._lock:
            for script in self._scripts:
                fault = script.fault
                if script.left > 0 and fault.verb in ("*", seen.method) and fault.match in seen.path:
                    script.left -= 1
                    return fault.kind
        return None

    @contextlib.contextmanager
    def _counted(self, seen: Seen) -> Iterator[None]:
        with self._lock:
            self._requests.append(seen)
            self._now.update(("*", seen.method))
            self._peaks |= self._now
        try:
            yield
        finally:
            self._over(seen)

    def _over(self, seen: Seen) -> None:
        with self._lock:
            if not seen.ended_s:
                seen.ended_s = time.monotonic()
                self._now.subtract(("*", seen.method))

    def _spoil(self, body: bytes, count: int) -> bytes:
        spoilt = bytearray(body)
        for at in self._random.sample(range(len(body)), min(count, len(body))):
            spoilt[at] ^= self._random.randrange(1, 256)
        return bytes(spoilt)


async def _hold(reader: asyncio.StreamReader, healed: asyncio.Event) -> None:
    """Until the client gives up or the proxy is healed; then its connection ends."""
    waits = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(healed.wait())
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    raise _DropError


async def _pause(healed: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(healed.wait(), seconds)


def _refusal(kind: Status, head: Head) -> tuple[Head, bytes]:
    headers = [("content-type", "application/xml"), ("x-amz-request-id", "fault-proxy")]
    if kind.retry_after is not None:
        headers.append(("retry-after", f"{kind.retry_after:g}"))
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{kind.code}</Code><Message>scripted</Message></Error>'
    return Head(f"HTTP/1.1 {kind.status} Scripted", tuple(headers)), b"" if head.method == "HEAD" else text.encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection so that the client sees a reset, and no end of data."""
    if (socket := writer.get_extra_info("socket")) is not None and socket.fileno() >= 0:
        socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _sent(writer: asyncio.StreamWriter) -> None:
    """Until the client's kernel has all that was written: a reset would take it back."""
    socket = writer.get_extra_info("socket")
    until_s = time.monotonic() + SENT_S
    # A client that goes away meanwhile takes the descriptor with it.
    while socket.fileno() >= 0 and time.monotonic() < until_s:
        if not struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0]:
            return
        await asyncio.sleep(0.001)
