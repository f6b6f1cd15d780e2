"""Records in a folder, as the tests look at them and spoil them."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore_sdk.format import HEADER_BYTES, Header, read_header, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey, parse_name


def record_paths(folder: Path) -> dict[ChunkKey, Path]:
    """Every record in the folder of an fs backend."""
    found = {}
    for path in sorted(folder.rglob("*")):
        key = parse_name(path.relative_to(folder).as_posix())
        if key is not None and path.is_file():
            found[key] = path
    return found


def header_of(path: Path) -> Header:
    header = read_header(path.read_bytes()[:HEADER_BYTES])
    assert header is not None, f"{path} has no intact header"
    return header


def is_good(key: ChunkKey, path: Path) -> bool:
    """Whether the record verifies as what its name says."""
    data = memoryview(path.read_bytes())
    header = read_header(data[:HEADER_BYTES])
    return header is not None and verify(data, key, header.layout, header.payload_bytes) is None


def payload_of(path: Path) -> bytes:
    return path.read_bytes()[HEADER_BYTES : HEADER_BYTES + header_of(path).payload_bytes]


def replace_payload(key: ChunkKey, path: Path, payload: bytes) -> None:
    """Put a record with another payload in the place of one, sealed as if it had always been there."""
    header = header_of(path)
    assert len(payload) == header.payload_bytes
    record = bytearray(record_bytes(len(payload)))
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(memoryview(record), key, header.layout, len(payload))
    put(path, bytes(record))


def put(path: Path, data: bytes) -> None:
    """Replace a file as a whole."""
    temporary = path.with_name("spoiled")
    temporary.write_bytes(data)
    os.replace(temporary, path)
