"""From a frame to its message: types, lengths, ranges and names are checked before anything is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvstore_sdk_backends.p2p.messages import (
    FAILED,
    FOUND,
    MAX_AGENT_BYTES,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_NAMES,
    MAX_NUMBER,
    MAX_RECORD_BYTES,
    MAX_REGIONS,
    MAX_TEXT,
    MAX_WAIT_MS,
    NODE_BYTES,
    VERSION,
    VERSIONS,
    Cancel,
    Fetch,
    ForeignHello,
    Found,
    Goodbye,
    Hello,
    Lookup,
    Message,
    Ready,
    Refused,
    Release,
    Result,
    Target,
    Welcome,
)
from kvstore_sdk_backends.p2p.strict import MessageError, as_array, as_binary, as_integer, as_name, as_names, as_text, as_versions, unpack

__all__ = ["decode"]

_MAX_VERSION = 2**16 - 1
_MAX_U64 = 2**64 - 1
_NAMESPACE = re.compile(r"(?:[0-9a-f]{32})?")
_LAYOUT = re.compile(r"[!-~]{0,64}")
_TOKEN = re.compile(r"[a-z0-9_]{1,32}")
_LINE = re.compile(rf"[ -~]{{0,{MAX_TEXT}}}")
_MAX_PATHS = 8


def decode(frame: bytes | memoryview) -> Message:
    """The message of a frame.

    A frame of another version is a `ForeignHello` or a `Refused`, whose first fields no version changes; any other is an error.

    Raises:
        MessageError: it is not a message of this protocol.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"p2p: frame of {len(frame)} bytes, a message has at most {MAX_FRAME_BYTES}")
    values = unpack(frame, max_binary_bytes=MAX_AGENT_BYTES, max_entries=MAX_NAMES)
    if type(values) is not tuple or len(values) < 3:
        raise MessageError("p2p: frame is not an array of version, kind, number and fields")
    version = as_integer("version", values[0], 0, _MAX_VERSION)
    kind = as_integer("kind", values[1], 0, 255)
    number = as_integer("number", values[2], 0, MAX_NUMBER)
    content = values[3:]
    if version != VERSION:
        return _foreign(version, kind, number, content)
    if kind not in _READERS:
        raise MessageError(f"p2p: kind {kind} is none of version {VERSION}")
    if not number and kind not in _WITHOUT_QUESTION:
        raise MessageError(f"p2p: kind {kind} has the number 0, questions count from 1")
    count, read = _READERS[kind]
    if len(content) != count:
        raise MessageError(f"p2p: kind {kind} has {count} fields, this one {len(content)}")
    return read(number, *content)


def _foreign(version: int, kind: int, number: int, content: tuple[Any, ...]) -> Message:
    if kind == Refused.KIND and len(content) >= 3:
        return _refused(number, *content[:3])
    if kind == Hello.KIND and content:
        return ForeignHello(number, version, as_versions(content[0], _MAX_VERSION))
    raise MessageError(f"p2p: frame of version {version}, this node speaks {VERSIONS[0]} to {VERSIONS[1]}")


def _hello(number: int, versions: Any, node: Any, namespace: Any, layout: Any, paths: Any) -> Hello:
    return Hello(
        number,
        as_versions(versions, _MAX_VERSION),
        as_binary("node", node, NODE_BYTES, NODE_BYTES),
        as_text("namespace", namespace, _NAMESPACE),
        as_text("layout", layout, _LAYOUT),
        tuple(as_text("path", path, _TOKEN) for path in as_array("paths", paths, 1, _MAX_PATHS)),
    )


def _welcome(number: int, version: Any, node: Any, path: Any, data_port: Any, max_names: Any, max_items: Any) -> Welcome:
    return Welcome(
        number,
        as_integer("version of the session", version, 0, _MAX_VERSION),
        as_binary("node", node, NODE_BYTES, NODE_BYTES),
        as_text("path", path, _TOKEN),
        as_integer("data port", data_port, 0, 65535),
        as_integer("names a message", max_names, 1, MAX_NAMES),
        as_integer("items a message", max_items, 1, MAX_ITEMS),
    )


def _refused(number: int, code: Any, text: Any, versions: Any) -> Refused:
    return Refused(number, as_text("code", code, _TOKEN), as_text("text", text, _LINE), as_versions(versions, _MAX_VERSION))


def _target(number: int, agent: Any, regions: Any) -> Target:
    read = []
    for region in as_array("regions", regions, 1, MAX_REGIONS):
        base, size = as_array("region", region, 2, 2)
        base = as_integer("base of a region", base, 1, _MAX_U64)
        # Base and size together stay inside 64 bits, so that no sum of base and offset wraps round.
        read.append((base, as_integer("size of a region", size, 1, _MAX_U64 - base)))
    return Target(number, as_binary("agent", agent, 1, MAX_AGENT_BYTES), tuple(read))


def _lookup(number: int, wait_ms: Any, names: Any) -> Lookup:
    return Lookup(number, as_integer("wait_ms", wait_ms, 0, MAX_WAIT_MS), as_names(names, MAX_NAMES))


def _found(number: int, sizes: Any) -> Found:
    return Found(number, tuple(as_integer("size", size, 0, MAX_RECORD_BYTES) for size in as_array("sizes", sizes, 1, MAX_NAMES)))


def _fetch(number: int, target: Any, deadline_ms: Any, items: Any) -> Fetch:
    read = []
    for item in as_array("items", items, 1, MAX_ITEMS):
        name, size, region, offset = as_array("item", item, 4, 4)
        name, size = as_name(name), as_integer("size", size, 1, MAX_RECORD_BYTES)
        region, offset = as_integer("region", region, 0, MAX_REGIONS - 1), as_integer("offset", offset, 0, _MAX_U64)
        read.append((name, size, region, offset))
    target = as_integer("target", target, 0, MAX_NUMBER)
    return Fetch(number, target, as_integer("deadline", deadline_ms, 0, MAX_WAIT_MS), tuple(read))


def _result(number: int, statuses: Any) -> Result:
    read = []
    for status in as_array("statuses", statuses, 1, MAX_ITEMS):
        code, size = as_array("status", status, 2, 2)
        read.append((as_integer("code of a status", code, FOUND, FAILED), as_integer("size", size, 0, MAX_RECORD_BYTES)))
    return Result(number, tuple(read))


def _release(number: int, names: Any) -> Release:
    return Release(as_names(names, MAX_NAMES))


def _goodbye(number: int, code: Any, text: Any) -> Goodbye:
    return Goodbye(as_text("code", code, _TOKEN), as_text("text", text, _LINE))


_READERS: dict[int, tuple[int, Callable[..., Message]]] = {
    Hello.KIND: (5, _hello),
    Welcome.KIND: (6, _welcome),
    Refused.KIND: (3, _refused),
    Target.KIND: (2, _target),
    Ready.KIND: (0, Ready),
    Lookup.KIND: (2, _lookup),
    Found.KIND: (1, _found),
    Fetch.KIND: (3, _fetch),
    Result.KIND: (1, _result),
    Release.KIND: (1, _release),
    Goodbye.KIND: (2, _goodbye),
    Cancel.KIND: (0, Cancel),
}
_WITHOUT_QUESTION = frozenset({Refused.KIND, Release.KIND, Goodbye.KIND})
