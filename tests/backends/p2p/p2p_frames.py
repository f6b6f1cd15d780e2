"""Messages of every kind, and frames that are bent on purpose, from a seed."""

from __future__ import annotations

import random
import string
from typing import Any

import msgpack

from kvstore_sdk_backends.p2p import messages
from kvstore_sdk_backends.p2p.messages import Message

__all__ = ["KINDS", "Frames"]

KINDS = (
    messages.Hello,
    messages.Welcome,
    messages.Refused,
    messages.Target,
    messages.Ready,
    messages.Lookup,
    messages.Found,
    messages.Fetch,
    messages.Result,
    messages.Release,
    messages.Goodbye,
    messages.Cancel,
)

_LETTERS = string.ascii_letters + string.digits + "_-"
_EDGES = (0, 1, 127, 128, 255, 256, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    1.5,
    "",
    "..",
    "../../etc/passwd",
    b"",
    [],
    {},
    [[]],
    "\x00",
    "a" * 300,
    b"b" * 300,
)


class Frames:
    """Makes the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def message(self, kind: type | None = None) -> Message:
        """A good one."""
        number, up_to = self._edge(messages.MAX_NUMBER) or 1, self._random.randint
        match kind or self._random.choice(KINDS):
            case messages.Hello:
                low = up_to(0, 2**16 - 1)
                namespace, layout = self._random.choice(["", "0123456789abcdef" * 2]), self._text(string.punctuation, 0, 64)
                return messages.Hello(number, (low, up_to(low, 2**16 - 1)), self._bytes(16), namespace, layout, ("nixl", "zmq"))
            case messages.Welcome:
                return messages.Welcome(number, up_to(0, 9), self._bytes(16), "zmq", up_to(0, 65535), up_to(1, 256), up_to(1, 256))
            case messages.Refused:
                return messages.Refused(number, self._random.choice(messages.REFUSALS), self._text("not at all ", 0, 512), (0, up_to(0, 9)))
            case messages.Target:
                regions = tuple((base := self._edge(2**63) or 1, self._edge(2**63 - 1 - base // 2) or 1) for _ in range(up_to(1, 5)))
                return messages.Target(number, self._bytes(up_to(1, 700)), regions)
            case messages.Ready:
                return messages.Ready(number)
            case messages.Lookup:
                return messages.Lookup(number, self._edge(messages.MAX_WAIT_MS), self._names())
            case messages.Found:
                return messages.Found(number, tuple(self._edge(messages.MAX_RECORD_BYTES) for _ in range(self._count())))
            case messages.Fetch:
                items = tuple((name, self._edge(2**40) or 1, up_to(0, 63), self._edge(2**64 - 1)) for name in self._names())
                return messages.Fetch(number, self._edge(2**40), self._edge(messages.MAX_WAIT_MS), items)
            case messages.Result:
                return messages.Result(number, tuple((up_to(0, 4), self._edge(2**40)) for _ in range(self._count())))
            case messages.Release:
                return messages.Release(self._names())
            case messages.Goodbye:
                return messages.Goodbye(self._random.choice(messages.GOODBYES), self._text("not at all ", 0, 512))
            case _:
                return messages.Cancel(number)

    def bent(self) -> bytes:
        """A frame that most often is no message: a good one with some of it changed, or bytes of no kind."""
        match self._random.randrange(8):
            case 0:
                return self._bytes(self._random.randint(0, 64))
            case 1 | 2 | 3:
                return self._with_a_field_changed()
        frame = bytearray(messages.encode(self.message()))  # type: ignore[arg-type]
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(frame)) if frame else 0
            match self._random.randrange(5):
                case 0 if frame:
                    frame[at] ^= 1 << self._random.randrange(8)
                case 1 if frame:
                    frame[at] = self._random.choice((0x00, 0x7F, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xD4, 0xDC, 0xDD, 0xDE, 0xFF))
                case 2:
                    del frame[at:]
                case 3:
                    frame[at:at] = self._bytes(self._random.randint(1, 9))
                case _:
                    del frame[at : at + self._random.randint(1, 9)]
        return bytes(frame)

    def _with_a_field_changed(self) -> bytes:
        fields = msgpack.unpackb(messages.encode(self.message()), use_list=True)  # type: ignore[arg-type]
        at = fields
        while True:
            index = self._random.randrange(len(at))
            if isinstance(at[index], list) and at[index] and self._random.random() < 0.7:
                at = at[index]
                continue
            break
        match self._random.randrange(4):
            case 0:
                del at[index]
            case 1:
                at.insert(index, self._random.choice(_ODD))
            case 2:
                at[index:] = at[index:] * self._random.choice((2, 40, 300))
            case _:
                at[index] = self._random.choice(_ODD)
        frame: bytes = msgpack.packb(fields)
        return frame

    def _names(self) -> tuple[str, ...]:
        return tuple("/".join(self._text(_LETTERS, 1, 12) for _ in range(self._random.randint(1, 4))) for _ in range(self._count()))

    def _count(self) -> int:
        return self._random.choice((1, 1, 2, 3, 16, 16, 255, 256)) if self._random.random() < 0.2 else self._random.randint(1, 4)

    def _edge(self, most: int) -> int:
        return min(most, self._random.choice(_EDGES)) if self._random.random() < 0.5 else self._random.randint(0, most)

    def _text(self, letters: str, low: int, high: int) -> str:
        return "".join(self._random.choices(letters, k=self._random.randint(low, high)))

    def _bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)
