"""Write the golden files of the format, and the worked example of docs/format.md.

A second implementation of docs/format.md, written from that page: it imports nothing of the SDK, and the tests compare the two. Besides
the standard library it needs `xxhash`, for XXH3-128.

    python tests/golden/regenerate.py           write the files of this version that are not there yet, and the page's example
    python tests/golden/regenerate.py --check   say whether they are up to date

A version is frozen: its number is part of its files' names, they are never written over, and tests/test_frozen.py has their checksums.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import xxhash

VERSION = 1
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "format.md"
NAME = "{}-v{}.{}"
EXAMPLE = ("<!-- example: written by tests/golden/regenerate.py -->\n", "<!-- end of the example -->\n")

FULL = {
    "kind": "full",
    "layers": ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"],
    "payload_bytes": 32768,
    "heads": 2,
    "head_size": 64,
    "window": 0,
    "state_shapes": [],
}
WINDOW = FULL | {"kind": "sliding_window", "window": 1024}
STATE = {
    "kind": "mamba",
    "layers": ["backbone.layers.3.mixer"],
    "payload_bytes": 263168,
    "heads": 0,
    "head_size": 0,
    "window": 0,
    "state_shapes": ["float32[4,128,128]", "bfloat16[3,256]"],
}
BASE: dict[str, Any] = {
    "model": "acme/tiny-llama",
    "weights": "commit 0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c",
    "model_config": hashlib.sha256(b"config").hexdigest(),
    "kv_dtype": "bfloat16",
    "layout": "lbhnc",
    "layout_version": 1,
    "block_tokens": 16,
    "hash_tokens": 16,
    "blocks_per_chunk": 2,
    "groups": [FULL],
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "",
    "quantization": "",
    "draft_model": "",
    "lora": [],
    "tenant": "",
    "epoch": "",
    "private": "",
    "writer": None,
}
WRITER = {"engine": "vllm 0.32.0", "attention_backend": "FLASH_ATTN", "variant": "NHD", "topology": "tp=2 pp=1 rank=0"}

IDENTITIES: list[tuple[str, dict[str, Any]]] = [
    ("one group, no adapter", BASE),
    ("one adapter", BASE | {"lora": [["sql", hashlib.sha256(b"adapter").hexdigest()]]}),
    ("two groups and a state", BASE | {"groups": [FULL, WINDOW, STATE], "blocks_per_chunk": 1, "draft_model": "acme/draft"}),
    ("an opaque layout", BASE | {"layout": "opaque", "layout_version": 0, "writer": WRITER}),
    (
        "a tenant, after a reset",
        BASE | {"tenant": hashlib.sha256(b"kvstore-sdk tenant salt\0pepper").hexdigest(), "epoch": "0123456789abcdef" * 2},
    ),
    ("every kind of character", BASE | {"model": 'a/"b"\\c\b\f\n\r\t\0\x1f\x7f \u00e9\u2028\U0001f600', "quantization": "fp8"}),
]


def text_json(text: str) -> str:
    """A string as canonical JSON."""
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    out = ""
    for character in text:
        number = ord(character)
        if character in short:
            out += short[character]
        elif 0x20 <= number < 0x7F:
            out += character
        elif number < 0x10000:
            out += "\\u" + format(number, "04x")
        else:
            high, low = divmod(number - 0x10000, 0x400)
            out += "\\u" + format(0xD800 + high, "04x") + "\\u" + format(0xDC00 + low, "04x")
    return '"' + out + '"'


def canonical(value: Any) -> str:
    """Canonical JSON."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return text_json(value)
    if isinstance(value, list):
        return "[" + ",".join(canonical(item) for item in value) + "]"
    assert isinstance(value, dict)
    return "{" + ",".join(text_json(key) + ":" + canonical(value[key]) for key in sorted(value)) + "}"


def namespace_of(identity: dict[str, Any]) -> str:
    text = canonical(identity | {"format_version": VERSION})
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def chain_hash(number: int, length: int = 32) -> bytes:
    return hashlib.sha512(b"chunk %d" % number).digest()[:length]


def name_of(namespace: str, digest: bytes, group: int) -> str:
    return "v1/" + namespace + "/" + digest.hex()[0:2] + "/" + digest.hex() + "-g" + str(group)


def payload_of(length: int) -> bytes:
    """Byte i is (131 i + 17 floor(i / 256) + 7) mod 256."""
    return bytes((131 * i + 17 * (i // 256) + 7) % 256 for i in range(length))


def record_of(namespace: str, digest: bytes, group: int, layout: str, payload: bytes) -> bytes:
    """A record, put together byte by byte."""
    body = payload + bytes(-len(payload) % 4096)
    head = bytes([0x4B, 0x56, 0x53, 0x54, 0x4F, 0x52, 0x45, 0x1A])
    head += VERSION.to_bytes(4, "little") + (4096).to_bytes(4, "little") + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")
    head += bytes.fromhex(namespace) + group.to_bytes(4, "little") + len(digest).to_bytes(2, "little") + bytes(2)
    head += digest + bytes(64 - len(digest)) + len(payload).to_bytes(8, "little")
    head += layout.encode("ascii") + bytes(64 - len(layout)) + xxhash.xxh3_128_intdigest(body).to_bytes(16, "big")
    head += bytes(32)
    head += bytes(4080 - len(head))
    return head + xxhash.xxh3_128_intdigest(head).to_bytes(16, "big") + body


def keys() -> list[dict[str, Any]]:
    namespace = namespace_of(BASE)
    cases = [
        (chain_hash(1), 0),
        (chain_hash(2), 1),
        (chain_hash(3, 16), 0),
        (chain_hash(4, 64), 2**32 - 1),
        (bytes(1), 10),
        (chain_hash(1), 10),
    ]
    return [
        {
            "namespace": namespace,
            "chain_hash": digest.hex(),
            "group": group,
            "engine_key": (digest + group.to_bytes(4, "big")).hex(),
            "name": name_of(namespace, digest, group),
        }
        for digest, group in cases
    ]


RECORDS = [
    (1, 32, 0, "lbhnc", 3000),
    (2, 32, 1, "opaque", 1),
    (3, 16, 7, "l" * 64, 4096),
    (4, 64, 2**32 - 1, "~", 4097),
    (5, 1, 0, "lbhnc", 70000),
]


def records() -> list[dict[str, Any]]:
    namespace = namespace_of(BASE)
    made = []
    for number, length, group, layout, payload_bytes in RECORDS:
        record = record_of(namespace, chain_hash(number, length), group, layout, payload_of(payload_bytes))
        made.append(
            {
                "namespace": namespace,
                "chain_hash": chain_hash(number, length).hex(),
                "group": group,
                "layout": layout,
                "payload_bytes": payload_bytes,
                "record_bytes": len(record),
                "fields": record[:232].hex(),
                "payload_checksum": record[184:200].hex(),
                "header_checksum": record[4080:4096].hex(),
                "record_sha256": hashlib.sha256(record).hexdigest(),
            }
        )
    return made


def dump(data: bytes, at: int = 0) -> str:
    return "".join(
        f"{at + i:4d}  {data[i : i + 8].hex(' ')}  {data[i + 8 : i + 16].hex(' ')}".rstrip() + "\n" for i in range(0, len(data), 16)
    )


def example() -> str:
    """The worked example, as Markdown."""
    digest, namespace = chain_hash(1), namespace_of(BASE)
    record = record_of(namespace, digest, 0, "lbhnc", payload_of(3000))
    text = canonical(BASE | {"format_version": VERSION})
    return f"""
The identity, as canonical JSON (one line, {len(text)} bytes):

```json
{text}
```

Its SHA-256 is `{hashlib.sha256(text.encode()).hexdigest()}`, so the namespace is `{namespace}`.

A chunk of group 0 whose hash is `{digest.hex()}`: its name is

```
{name_of(namespace, digest, 0)}
```

Its payload has 3,000 bytes; byte i is (131 i + 17 floor(i / 256) + 7) mod 256. The record has {len(record)} bytes. The header page
starts with these bytes (offset, then 16 bytes in hex):

```
{dump(record[:232])}```

The bytes from 232 to 4,079 are zeros. The header ends with its checksum:

```
{dump(record[4080:4096], 4080)}```

Bytes 4,096 to 7,095 are the payload, bytes 7,096 to 8,191 zeros. The SHA-256 of the whole record is
`{hashlib.sha256(record).hexdigest()}`; the record itself is `tests/golden/{NAME.format("record", VERSION, "bin")}`.

"""


def files() -> dict[Path, bytes]:
    """Every golden file with its content."""
    identities = [
        {
            "what": what,
            "identity": identity,
            "canonical_json": canonical(identity | {"format_version": VERSION}),
            "namespace": namespace_of(identity),
        }
        for what, identity in IDENTITIES
    ]
    tables = {"identities": identities, "keys": keys(), "records": records()}
    made = {
        HERE / NAME.format(name, VERSION, "json"): (json.dumps({"format_version": VERSION, name: table}, indent=2) + "\n").encode()
        for name, table in tables.items()
    }
    made[HERE / NAME.format("record", VERSION, "bin")] = record_of(namespace_of(BASE), chain_hash(1), 0, "lbhnc", payload_of(3000))
    before, rest = PAGE.read_text().split(EXAMPLE[0])
    after = rest.split(EXAMPLE[1])[1]
    made[PAGE] = (before + EXAMPLE[0] + example() + EXAMPLE[1] + after).encode()
    return made


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        sys.stdout.write(f"{__doc__}\n")
        return 2
    made = files()
    stale = [path for path, content in made.items() if not path.exists() or path.read_bytes() != content]
    frozen = [path for path in stale if path != PAGE and path.exists()]
    if arguments == ["--check"] or frozen:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(HERE.parent.parent)} differs from what docs/format.md prescribes for version {VERSION}\n")
        return 1 if stale else 0
    for path in stale:
        path.write_bytes(made[path])
        sys.stdout.write(f"wrote {path.relative_to(HERE.parent.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
