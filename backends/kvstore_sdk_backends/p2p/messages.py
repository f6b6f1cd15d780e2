"""The control messages between two nodes, as docs/p2p-protocol.md describes them.

One message is one frame: a msgpack array `[version, kind, number, *fields]`. `number`, from 1, ties an answer to its question; messages
that belong to no question have the number 0. `decoding` reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import msgpack

from kvstore_sdk_backends.p2p.strict import MessageError

__all__ = [
    "BUSY",
    "FAILED",
    "FOUND",
    "GOODBYES",
    "MAX_AGENT_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_ITEMS",
    "MAX_NAMES",
    "MAX_NUMBER",
    "MAX_RECORD_BYTES",
    "MAX_REGIONS",
    "MAX_TEXT",
    "MAX_WAIT_MS",
    "MISSING",
    "NODE_BYTES",
    "REFUSALS",
    "VERSION",
    "VERSIONS",
    "WRONG_SIZE",
    "Cancel",
    "Fetch",
    "ForeignHello",
    "Found",
    "Goodbye",
    "Hello",
    "Lookup",
    "Message",
    "MessageError",
    "Ready",
    "Refused",
    "Release",
    "Result",
    "Target",
    "Welcome",
    "encode",
]

VERSION = 1
VERSIONS = (1, 1)
"""The lowest and the highest version that this code speaks."""

MAX_FRAME_BYTES = 512 << 10
"""Of one message. The longest, 256 names of 1,024 bytes in a Fetch, has 273 KiB."""
MAX_NUMBER = 2**63 - 1
MAX_NAMES = 256
MAX_ITEMS = 256
MAX_REGIONS = 64
MAX_AGENT_BYTES = 64 << 10
MAX_RECORD_BYTES = 1 << 40
MAX_WAIT_MS = 3_600_000
MAX_TEXT = 512
"""Characters of what a refusal says."""
NODE_BYTES = 16

FOUND, MISSING, WRONG_SIZE, BUSY, FAILED = range(5)
"""What became of one item of a Fetch."""

REFUSALS = ("version", "self", "namespace", "layout", "path", "full", "busy", "invalid", "unknown")
"""Codes of a Refused that this version sends. A reader takes others too, as reasons that it does not know."""

GOODBYES = ("idle", "full", "closing", "namespace", "path", "target", "failed", "invalid")
"""Codes of a Goodbye that this version sends. A reader takes others too, likewise."""

_UNPRINTABLE = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a session, from the asker.

    Attributes:
        versions: The lowest and the highest protocol version the asker speaks.
        node: Of the asker: random, new with every start, and another one for each address that it asks.
        namespace: 32 hex digits, or "" when the asker does not know it.
        layout: Of the payloads, at most 64 printable characters; "" when the asker does not know it.
        paths: Ways that data may take, the preferred one first.
    """

    KIND: ClassVar[int] = 1
    number: int
    versions: tuple[int, int]
    node: bytes
    namespace: str
    layout: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session stands.

    Attributes:
        version: Of every further message of the session.
        node: Of the owner: random, new with every start, and the same at each of its addresses.
        path: The one of the asker's paths that data takes.
        data_port: Where the owner listens for the data connection of this session; 0 when the path needs none.
        max_names: The most a Lookup or a Release may name.
        max_items: The most a Fetch may ask for.
    """

    KIND: ClassVar[int] = 2
    number: int
    version: int
    node: bytes
    path: str
    data_port: int
    max_names: int
    max_items: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The owner does not do what message `number` asks for; 0 when it could not read the number.

    It is read the same in every version, so that either side can say which versions the other one speaks.

    Attributes:
        code: One of `REFUSALS`, or one of a later version.
        text: One line for a log, of printable ASCII.
        versions: The lowest and the highest protocol version the owner speaks.
    """

    KIND: ClassVar[int] = 3
    number: int
    code: str
    text: str
    versions: tuple[int, int] = VERSIONS


@dataclass(frozen=True, slots=True)
class Target:
    """Where the owner may write: the asker's NIXL agent and its memory. It replaces what an earlier Target of the session said.

    Attributes:
        agent: The agent's metadata as NIXL gives it.
        regions: Base address and size in bytes of each region.
    """

    KIND: ClassVar[int] = 4
    number: int
    agent: bytes
    regions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The owner can write to the Target."""

    KIND: ClassVar[int] = 5
    number: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of these records does the owner have, whole and ready?

    Attributes:
        wait_ms: 0 for an answer at once; else the answer comes when all are there, or after this time.
    """

    KIND: ClassVar[int] = 6
    number: int
    wait_ms: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a Lookup: bytes of each record in the order of the names, 0 where it is not there."""

    KIND: ClassVar[int] = 7
    number: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Move these records.

    Attributes:
        target: Number of the Target that `items` point into; 0 where the path has none.
        deadline_ms: After this time the asker does not want them any more.
        items: Name, bytes expected, index of the region, offset in the region; the last two are 0 where the path has no Target.
    """

    KIND: ClassVar[int] = 8
    number: int
    target: int
    deadline_ms: int
    items: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a Fetch, sent when the owner will touch none of its targets any more, and for that reason sent late too.

    Attributes:
        statuses: For each item in order `FOUND`, `MISSING`, `WRONG_SIZE`, `BUSY` or `FAILED`, and the bytes the owner's record has.
    """

    KIND: ClassVar[int] = 9
    number: int
    statuses: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The asker will not fetch these records after all: their leases end. What it has no lease on, nothing becomes of."""

    KIND: ClassVar[int] = 10
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender ends the session.

    Attributes:
        code: One of `GOODBYES`, or one of a later version.
        text: One line for a log, of printable ASCII.
    """

    KIND: ClassVar[int] = 11
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The asker waits no longer: the Lookup with this number is answered now. Without effect where it has been."""

    KIND: ClassVar[int] = 12
    number: int


@dataclass(frozen=True, slots=True)
class ForeignHello:
    """A Hello of a version that this code does not speak: what can be read of it in any version. Never sent."""

    number: int
    version: int
    versions: tuple[int, int]


Sent = Hello | Welcome | Refused | Target | Ready | Lookup | Found | Fetch | Result | Release | Goodbye | Cancel
Message = Sent | ForeignHello


def encode(message: Sent) -> bytes:
    """The frame of a message of this version. Fields are not checked; a text for a log is cut, and what is not its form made `?`.

    Raises:
        MessageError: the frame would be longer than `MAX_FRAME_BYTES`.
    """
    if isinstance(message, Refused | Goodbye):
        message = replace(message, text=_UNPRINTABLE.sub("?", message.text[:MAX_TEXT]))
    values = [getattr(message, field.name) for field in fields(message)]
    if isinstance(message, Release | Goodbye):
        values.insert(0, 0)
    frame: bytes = msgpack.packb([VERSION, message.KIND, *values])
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"p2p: {type(message).__name__}: {len(frame)} bytes, a message has at most {MAX_FRAME_BYTES}")
    return frame
