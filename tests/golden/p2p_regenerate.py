"""Write the golden frames of the protocol between peers, and the frames that docs/p2p-protocol.md shows.

A second implementation of the messages, written from that page: it imports nothing of the SDK and no msgpack. The tests compare the two.

    python tests/golden/p2p_regenerate.py           write the file of this version, if it has none yet, and the page's example
    python tests/golden/p2p_regenerate.py --check   say whether they are up to date

A version is frozen: its number is part of its file's name, that is never written over, and tests/test_frozen.py has its checksum.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

VERSION = 1
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "p2p-protocol.md"
NAME = "p2p-v{}.json"
EXAMPLE = ("<!-- frames: written by tests/golden/p2p_regenerate.py -->\n", "<!-- end of the frames -->\n")

KINDS = {
    "Hello": (1, ["versions", "node", "namespace", "layout", "paths"]),
    "Welcome": (2, ["version", "node", "path", "data_port", "max_names", "max_items"]),
    "Refused": (3, ["code", "text", "versions"]),
    "Target": (4, ["agent", "regions"]),
    "Ready": (5, []),
    "Lookup": (6, ["wait_ms", "names"]),
    "Found": (7, ["sizes"]),
    "Fetch": (8, ["target", "deadline_ms", "items"]),
    "Result": (9, ["statuses"]),
    "Release": (10, ["names"]),
    "Goodbye": (11, ["code", "text"]),
    "Cancel": (12, []),
}
BINARY = {"node", "agent"}


def integer(value: int) -> bytes:
    """The shortest form."""
    if value < 0x80:
        return bytes([value])
    for code, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if value < 1 << 8 * width:
            return bytes([code]) + value.to_bytes(width, "big")
    raise ValueError(value)


def text(value: str) -> bytes:
    data = value.encode()
    if len(data) < 32:
        return bytes([0xA0 + len(data)]) + data
    if len(data) < 256:
        return bytes([0xD9, len(data)]) + data
    return b"\xda" + len(data).to_bytes(2, "big") + data


def binary(value: bytes) -> bytes:
    if len(value) < 256:
        return bytes([0xC4, len(value)]) + value
    if len(value) < 65536:
        return b"\xc5" + len(value).to_bytes(2, "big") + value
    return b"\xc6" + len(value).to_bytes(4, "big") + value


def array(parts: list[bytes]) -> bytes:
    head = bytes([0x90 + len(parts)]) if len(parts) < 16 else b"\xdc" + len(parts).to_bytes(2, "big")
    return head + b"".join(parts)


def pack(value: Any) -> bytes:
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return binary(value)
    return array([pack(part) for part in value])


def frame(message: str, number: int, fields: dict[str, Any]) -> bytes:
    kind, names = KINDS[message]
    assert list(fields) == names
    values = [bytes.fromhex(fields[name]) if name in BINARY else fields[name] for name in names]
    return pack([VERSION, kind, number, *values])


def foreign(what: str, version: int, message: str, number: int, fields: dict[str, Any], behind: list[bytes]) -> dict[str, Any]:
    """A message of another version, and what has to be answered, but for its text."""
    kind, names = KINDS[message]
    assert list(fields) == names[: len(fields)]
    parts = [pack(value) for value in (version, kind, number, *fields.values())]
    made: dict[str, Any] = {"what": what, "message": message, "version": version, "number": number, "fields": fields}
    made["frame"] = array(parts + behind).hex()
    if message == "Hello":
        made["answer"] = {"message": "Refused", "number": number, "code": "version", "versions": [VERSION, VERSION]}
    return made


def header(number: int, index: int, size: int) -> bytes:
    return number.to_bytes(8, "big") + index.to_bytes(4, "big") + size.to_bytes(8, "big")


def chunk(number: int) -> str:
    digest = hashlib.sha256(b"chunk %d" % number).hexdigest()
    return f"v1/{'0123456789abcdef' * 2}/{digest[:2]}/{digest}-g0"


ASKER, OWNER = hashlib.sha256(b"asker").hexdigest()[:32], hashlib.sha256(b"owner").hexdigest()[:32]
HELLO = {"versions": [VERSION, VERSION], "node": ASKER, "namespace": "0123456789abcdef" * 2, "layout": "lbhnc", "paths": ["nixl", "zmq"]}
WELCOME = {
    "version": VERSION,
    "node": OWNER,
    "path": "zmq",
    "data_port": 40123,
    "max_names": 256,
    "max_items": 256,
}

SHOWN: list[tuple[str, str, int, dict[str, Any]]] = [
    ("asker", "Hello", 1, HELLO),
    ("owner", "Welcome", 1, WELCOME),
    ("asker", "Lookup", 2, {"wait_ms": 0, "names": [chunk(1), chunk(2)]}),
    ("owner", "Found", 2, {"sizes": [8192, 0]}),
    ("asker", "Fetch", 3, {"target": 0, "deadline_ms": 5000, "items": [[chunk(1), 8192, 0, 0]]}),
    ("owner", "Result", 3, {"statuses": [[0, 8192]]}),
    ("asker", "Goodbye", 0, {"code": "closing", "text": "this node closes"}),
]
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("a Hello that does not know its records", "Hello", 2**63 - 1, HELLO | {"namespace": "", "layout": "", "paths": ["zmq"]}),
    ("a Hello of several versions", "Hello", 1, HELLO | {"versions": [VERSION, 65535]}),
    ("a Welcome over NIXL", "Welcome", 1, WELCOME | {"path": "nixl", "data_port": 0, "max_names": 1, "max_items": 1}),
    (
        "a refusal",
        "Refused",
        1,
        {"code": "layout", "text": "its layout is opaque, that of the records here lbhnc", "versions": [VERSION, VERSION]},
    ),
    ("a refusal of what had no number", "Refused", 0, {"code": "invalid", "text": "~ 0 to 1!", "versions": [VERSION, 7]}),
    ("a Target", "Target", 4, {"agent": "6e69786c" * 120, "regions": [[0x7F0000000000, 1 << 30], [4096, 4096]]}),
    ("a Target of the least and the most", "Target", 2**40, {"agent": "00", "regions": [[1, 1], [1, 2**64 - 2], [2**64 - 2, 1]]}),
    ("a Ready", "Ready", 4, {}),
    ("a Lookup that waits", "Lookup", 128, {"wait_ms": 5000, "names": [chunk(3)]}),
    ("a Lookup of as many as may be", "Lookup", 2**32, {"wait_ms": 3600000, "names": [f"n/{i}" for i in range(256)]}),
    ("a Found of as many as may be", "Found", 2**32, {"sizes": [(1 << i % 41) - (i % 2) for i in range(256)]}),
    (
        "a Fetch into a Target",
        "Fetch",
        65536,
        {"target": 4, "deadline_ms": 1, "items": [[chunk(1), 8192, 0, 0], [chunk(2), 1 << 40, 63, 2**64 - 1]]},
    ),
    ("a Result of every kind", "Result", 65536, {"statuses": [[0, 1 << 40], [1, 0], [2, 4096], [3, 0], [4, 8192]]}),
    ("a Release", "Release", 0, {"names": [chunk(1), "a", "A-Z_0.9/-"]}),
    ("a Goodbye to make room", "Goodbye", 0, {"code": "idle", "text": ""}),
    ("a Goodbye for a reason of a later version", "Goodbye", 0, {"code": "of_a_later_version", "text": "~ 0 to 1!"}),
    ("a Cancel", "Cancel", 128, {}),
]
# What a later version may put behind the fields that no version changes: nil, true, a float, a number below 0, a text, bytes, arrays.
BEHIND = [b"\xc0", b"\xc3", b"\xcb\x3f\xf8" + bytes(6), b"\xff", text("~" * 40), binary(bytes(20)), array([array([b"\xc0"])] * 17)]
FOREIGN: list[tuple[str, int, str, int, dict[str, Any], list[bytes]]] = [
    (
        "a Hello of the version before the first that is frozen",
        0,
        "Hello",
        1,
        {"versions": [0, 0]},
        [pack(HELLO[name]) for name in KINDS["Hello"][1][1:]],
    ),
    ("a Hello of a later version", VERSION + 1, "Hello", 9, {"versions": [VERSION + 1, VERSION + 3]}, BEHIND),
    ("a Hello of the last version, with nothing but what is fixed", 65535, "Hello", 2**63 - 1, {"versions": [65535, 65535]}, []),
    (
        "a refusal of a later version",
        VERSION + 1,
        "Refused",
        1,
        {"code": "version", "text": "this node speaks another one", "versions": [VERSION + 1, 65535]},
        BEHIND,
    ),
    (
        "a refusal of the last version, with nothing but what is fixed",
        65535,
        "Refused",
        0,
        {"code": "of_a_later_version", "text": "", "versions": [0, 65535]},
        [],
    ),
]
REFUSED: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no array", pack("Hello")),
    ("an array without a number", pack([VERSION, 5])),
    ("a byte after the message", frame("Ready", 1, {}) + b"\0"),
    ("a message that is cut off", frame("Found", 1, {"sizes": [1, 2]})[:-1]),
    ("a field too many", pack([VERSION, 5, 1, 0])),
    ("a field too few", pack([VERSION, 6, 1, 0])),
    ("an unknown kind", pack([VERSION, 13, 1])),
    ("a question with the number 0", pack([VERSION, 6, 0, 0, ["a"]])),
    ("an answer with the number 0", pack([VERSION, 5, 0])),
    ("a number beyond 2^63 - 1", pack([VERSION, 5, 2**63])),
    ("a number below 0", array([pack(VERSION), pack(5), b"\xff"])),
    ("true for an integer", array([pack(VERSION), pack(6), pack(1), b"\xc3", pack(["a"])])),
    ("nil for an integer", array([pack(VERSION), pack(6), pack(1), b"\xc0", pack(["a"])])),
    ("a float for an integer", array([pack(VERSION), pack(6), pack(1), b"\xca\0\0\0\0", pack(["a"])])),
    ("a map for an array", array([pack(VERSION), pack(7), pack(1), b"\x80"])),
    ("an extension", array([pack(VERSION), pack(7), pack(1), b"\xd4\x01\x00"])),
    ("a text that is not UTF-8", array([pack(VERSION), pack(10), pack(0), array([b"\xa1\xff"])])),
    ("a name in binary", array([pack(VERSION), pack(10), pack(0), array([binary(b"a")])])),
    ("a name that leaves the store", pack([VERSION, 10, 0, ["../a"]])),
    ("a name with an empty segment", pack([VERSION, 10, 0, ["a//b"]])),
    ("no names", pack([VERSION, 10, 0, []])),
    ("257 names", pack([VERSION, 10, 0, ["a"] * 257])),
    ("a wait of more than an hour", pack([VERSION, 6, 1, 3600001, ["a"]])),
    ("a record of no bytes", pack([VERSION, 8, 1, 0, 0, [["a", 0, 0, 0]]])),
    ("a record beyond 2^40 bytes", pack([VERSION, 8, 1, 0, 0, [["a", 2**40 + 1, 0, 0]]])),
    ("an item in a 65th region", pack([VERSION, 8, 1, 0, 0, [["a", 1, 64, 0]]])),
    ("a Target without a region", pack([VERSION, 4, 1, b"a", []])),
    ("a Target of 65 regions", pack([VERSION, 4, 1, b"a", [[4096, 4096]] * 65])),
    ("a region at the address 0", pack([VERSION, 4, 1, b"a", [[0, 4096]]])),
    ("a region of no bytes", pack([VERSION, 4, 1, b"a", [[4096, 0]]])),
    ("a region that ends beyond 2^64 - 1", pack([VERSION, 4, 1, b"a", [[2**64 - 4096, 4096]]])),
    ("a status that there is not", pack([VERSION, 9, 1, [[5, 0]]])),
    ("a node of 15 bytes", pack([VERSION, 1, 1, [VERSION, VERSION], bytes(15), "", "", ["zmq"]])),
    ("versions the wrong way round", pack([VERSION, 1, 1, [1, 0], bytes(16), "", "", ["zmq"]])),
    ("a refusal of two lines", pack([VERSION, 3, 1, "busy", "a\nb", [0, 0]])),
    ("a refusal that is not ASCII", pack([VERSION, 3, 1, "busy", "sp\u00e4ter", [0, 0]])),
    ("a Goodbye of two lines", pack([VERSION, 11, 0, "idle", "a\nb"])),
    ("a Goodbye that says nothing", pack([VERSION, 11, 0])),
    ("a Ready of another version", pack([VERSION + 1, 5, 1])),
    ("a Hello of another version without its versions", pack([VERSION + 1, 1, 1])),
    ("a refusal of another version that is cut short", pack([VERSION + 1, 3, 1, "version", "no"])),
]
HEADERS = [(3, 0, 8192), (2**63 - 1, 255, 1 << 40)]


def dump(data: bytes) -> str:
    return "".join(f"    {data[i : i + 24].hex(' ')}\n" for i in range(0, len(data), 24))


def example() -> str:
    """The session that the page shows, as Markdown."""
    made = "\n"
    for side, message, number, fields in SHOWN:
        what = ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.items())
        made += (
            f"{side}: {message}, number {number}"
            + (f", {what}" if what else "")
            + f"\n\n```\n{dump(frame(message, number, fields))}```\n\n"
        )
        if message == "Fetch":
            number, index, size = HEADERS[0]
            made += (
                f"owner, on the data connection: header of number {number}, index {index}, size {size}, then a frame with the record\n\n"
            )
            made += f"```\n{dump(header(number, index, size))}```\n\n"
    return made


def files() -> dict[Path, bytes]:
    """Every golden file with its content."""
    cases = [(f"{side}'s {message} in the page", message, number, fields) for side, message, number, fields in SHOWN] + CASES
    content = {
        "protocol_version": VERSION,
        "frames": [
            {"what": what, "message": message, "number": number, "fields": fields, "frame": frame(message, number, fields).hex()}
            for what, message, number, fields in cases
        ],
        "foreign": [foreign(*case) for case in FOREIGN],
        "refused": [{"what": what, "frame": data.hex()} for what, data in REFUSED],
        "headers": [
            {"number": number, "index": index, "size": size, "header": header(number, index, size).hex()} for number, index, size in HEADERS
        ],
    }
    before, rest = PAGE.read_text().split(EXAMPLE[0])
    after = rest.split(EXAMPLE[1])[1]
    return {
        HERE / NAME.format(VERSION): (json.dumps(content, indent=2) + "\n").encode(),
        PAGE: (before + EXAMPLE[0] + example() + EXAMPLE[1] + after).encode(),
    }


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        sys.stdout.write(f"{__doc__}\n")
        return 2
    made = files()
    stale = [path for path, content in made.items() if not path.exists() or path.read_bytes() != content]
    frozen = [path for path in stale if path != PAGE and path.exists()]
    if arguments == ["--check"] or frozen:
        for path in stale:
            sys.stdout.write(
                f"{path.relative_to(HERE.parent.parent)} differs from what docs/p2p-protocol.md prescribes for version {VERSION}\n"
            )
        return 1 if stale else 0
    for path in stale:
        path.write_bytes(made[path])
        sys.stdout.write(f"wrote {path.relative_to(HERE.parent.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
