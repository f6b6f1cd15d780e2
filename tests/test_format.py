"""A record is bound to its key, namespace, layout and length, and every change of it is found."""

from __future__ import annotations

import importlib.util
import itertools
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.format import HEADER_BYTES, LAYOUT_BYTES, Flaw, Header, is_header, padded_bytes, read_header, record_bytes, seal, verify
from kvstore_sdk.keys import MAX_HASH_BYTES, ChunkKey

PAYLOAD_BYTES = 3000
LAYOUT = "lbhnc"
KEY = ChunkKey("0123456789abcdef" * 2, bytes(range(32)), 3)

# The same examples in every run; no time limit for each, the machine may be busy.
seeded = settings(derandomize=True, deadline=None, max_examples=150)

namespaces = st.binary(min_size=16, max_size=16).map(bytes.hex)
chain_hashes = st.binary(min_size=1, max_size=MAX_HASH_BYTES)
groups = st.integers(0, 2**32 - 1)
keys = st.builds(ChunkKey, namespaces, chain_hashes, groups)
layouts = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=LAYOUT_BYTES)
payloads = st.builds(lambda seed, size: random.Random(seed).randbytes(size), st.integers(0, 99), st.integers(1, 9000))


def oracle() -> types.ModuleType:
    """The second implementation, which shares nothing with the SDK."""
    spec = importlib.util.spec_from_file_location("golden_regenerate", Path(__file__).parent / "golden" / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sealed(payload: bytes, key: ChunkKey = KEY, layout: str = LAYOUT) -> bytearray:
    """A record made in a buffer that held something else before."""
    record = bytearray(b"\xee" * record_bytes(len(payload)))
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(memoryview(record), key, layout, len(payload))
    return record


def with_checksum(record: bytearray) -> bytearray:
    """The record with the header checksum that fits its header, whatever that says."""
    record[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(record[: HEADER_BYTES - 16]))
    return record


def flaw_of(record: bytes | bytearray, key: ChunkKey = KEY, layout: str = LAYOUT, payload_bytes: int = PAYLOAD_BYTES) -> Flaw | None:
    return verify(memoryview(record), key, layout, payload_bytes)


@pytest.fixture(scope="module")
def payload() -> bytes:
    return random.Random(1).randbytes(PAYLOAD_BYTES)


@pytest.fixture
def record(payload: bytes) -> bytearray:
    return sealed(payload)


@pytest.mark.parametrize(
    ("payload_bytes", "padded", "whole"),
    [(1, 4096, 8192), (4095, 4096, 8192), (4096, 4096, 8192), (4097, 8192, 12288), (2**40, 2**40, 2**40 + 4096)],
)
def test_a_record_is_whole_pages(payload_bytes: int, padded: int, whole: int) -> None:
    assert (padded_bytes(payload_bytes), record_bytes(payload_bytes)) == (padded, whole)


@seeded
@given(keys, layouts, payloads)
def test_what_was_sealed_verifies_and_is_what_the_second_implementation_writes(key: ChunkKey, layout: str, payload: bytes) -> None:
    record = sealed(payload, key, layout)
    assert flaw_of(record, key, layout, len(payload)) is None
    assert bytes(record) == oracle().record_of(key.namespace, key.chain_hash, key.group, layout, payload)
    header = read_header(memoryview(record))
    assert header == Header(key, len(payload), layout, bytes(record[184:200]))


def test_equal_chunks_are_equal_bytes(payload: bytes) -> None:
    """Nothing of the writer, of the time, or of what was in memory before, gets into a record."""
    assert sealed(payload) == sealed(payload)
    clean = bytearray(HEADER_BYTES) + payload + bytes(4096 - PAYLOAD_BYTES)
    seal(memoryview(clean), KEY, LAYOUT, PAYLOAD_BYTES)
    assert clean == sealed(payload)


def test_sealing_leaves_the_payload_alone_and_zeroes_the_padding(record: bytearray, payload: bytes) -> None:
    assert bytes(record[HEADER_BYTES:]) == payload + bytes(4096 - PAYLOAD_BYTES)


def test_every_single_flipped_bit_is_found(record: bytearray) -> None:
    """INT-01: in the header, its unused bytes and its checksum, in the payload, and in the padding."""
    view = memoryview(record)
    for at in range(len(record)):
        expected = Flaw.HEADER if at < HEADER_BYTES else Flaw.PAYLOAD
        for bit in range(8):
            record[at] ^= 1 << bit
            assert verify(view, KEY, LAYOUT, PAYLOAD_BYTES) is expected, (at, bit)
            record[at] ^= 1 << bit
    assert flaw_of(record) is None


@seeded
@given(st.integers(0, 8191), st.binary(min_size=1, max_size=600))
def test_any_overwritten_range_is_found(at: int, junk: bytes) -> None:
    """INT-01: partial rewrites."""
    record = sealed(random.Random(1).randbytes(PAYLOAD_BYTES))
    changed = bytearray(record)
    changed[at : at + len(junk)] = junk[: len(record) - at]
    assert (flaw_of(changed) is None) == (changed == record)


def test_a_mix_of_two_records_of_one_chunk_is_found() -> None:
    """A torn replace: some pages of the old record, the others of the new one."""
    old, new = (sealed(random.Random(seed).randbytes(9000)) for seed in (1, 2))
    pages = len(old) // 4096
    for choice in itertools.product((old, new), repeat=pages):
        mixed = b"".join(source[page * 4096 : (page + 1) * 4096] for page, source in enumerate(choice))
        whole = mixed in (bytes(old), bytes(new))
        assert flaw_of(mixed, payload_bytes=9000) is (None if whole else Flaw.PAYLOAD)


@pytest.mark.parametrize(
    ("bend", "expected"),
    [
        pytest.param(lambda r: r[:-4096], Flaw.LENGTH, id="truncated by a page"),
        pytest.param(lambda r: r[:-1], Flaw.LENGTH, id="truncated by a byte"),
        pytest.param(lambda r: r[:0], Flaw.LENGTH, id="empty"),
        pytest.param(lambda r: r + bytes(1), Flaw.LENGTH, id="appended a byte"),
        pytest.param(lambda r: r + bytes(4096), Flaw.LENGTH, id="appended a page of zeros"),
        pytest.param(lambda r: bytes(len(r)), Flaw.HEADER, id="zeros"),
        pytest.param(lambda r: b"\xff" * len(r), Flaw.HEADER, id="ones"),
        pytest.param(lambda r: r[4096:] + r[:4096], Flaw.HEADER, id="shifted by a page"),
        pytest.param(lambda r: r[:4096] + bytes(len(r) - 4096), Flaw.PAYLOAD, id="a payload of zeros"),
        pytest.param(lambda r: r[:6000] + bytes(len(r) - 6000), Flaw.PAYLOAD, id="a tail of zeros"),
        pytest.param(lambda r: bytes(4096) + r[4096:], Flaw.HEADER, id="a header of zeros"),
    ],
)
def test_a_record_that_was_cut_grown_or_blanked_is_found(record: bytearray, bend: Callable[[bytes], bytes], expected: Flaw) -> None:
    assert flaw_of(bend(bytes(record))) is expected


@pytest.mark.parametrize(
    ("key", "layout", "payload_bytes", "expected"),
    [
        pytest.param(KEY._replace(chain_hash=bytes(32)), LAYOUT, PAYLOAD_BYTES, Flaw.KEY, id="swapped with another chunk"),
        pytest.param(KEY._replace(group=4), LAYOUT, PAYLOAD_BYTES, Flaw.KEY, id="of another group"),
        pytest.param(KEY._replace(chain_hash=KEY.chain_hash[:-1]), LAYOUT, PAYLOAD_BYTES, Flaw.KEY, id="of a shorter hash"),
        pytest.param(KEY._replace(namespace="f" * 32), LAYOUT, PAYLOAD_BYTES, Flaw.NAMESPACE, id="of another namespace"),
        pytest.param(KEY, "lbnhc", PAYLOAD_BYTES, Flaw.LAYOUT, id="KEY-04: laid out in another way, equally long"),
        pytest.param(KEY, LAYOUT + "2", PAYLOAD_BYTES, Flaw.LAYOUT, id="of a layout with a longer name"),
        pytest.param(KEY, LAYOUT, PAYLOAD_BYTES + 1, Flaw.LENGTH, id="of another length that pads to the same"),
    ],
)
def test_a_whole_record_of_something_else_is_found(payload: bytes, key: ChunkKey, layout: str, payload_bytes: int, expected: Flaw) -> None:
    other = sealed(payload + bytes(payload_bytes - PAYLOAD_BYTES), key, layout)
    assert flaw_of(other, key, layout, payload_bytes) is None
    assert flaw_of(other) is expected
    assert flaw_of(sealed(payload), key, layout, payload_bytes) is expected, "and the other way round"


@seeded
@given(keys, keys, layouts, layouts)
def test_a_record_answers_to_no_other_key_or_layout(key: ChunkKey, other: ChunkKey, layout: str, other_layout: str) -> None:
    record = sealed(b"payload", key, layout)
    assert (flaw_of(record, other, other_layout, 7) is None) == ((key, layout) == (other, other_layout))


@pytest.mark.parametrize(
    ("key", "layout", "expected"),
    [
        pytest.param(KEY._replace(namespace=KEY.namespace.upper()), LAYOUT, Flaw.NAMESPACE, id="the same hex digits in capitals"),
        pytest.param(KEY._replace(namespace=KEY.namespace[:-2] + "  "), LAYOUT, Flaw.NAMESPACE, id="a namespace with spaces"),
        pytest.param(KEY._replace(namespace="none"), LAYOUT, Flaw.NAMESPACE, id="no namespace"),
        pytest.param(KEY._replace(group=-1), LAYOUT, Flaw.KEY, id="no group"),
        pytest.param(KEY._replace(group=KEY.group + 2**32), LAYOUT, Flaw.KEY, id="a group that the field cannot hold"),
        pytest.param(KEY._replace(chain_hash=KEY.chain_hash + bytes(64)), LAYOUT, Flaw.KEY, id="a hash that the field cannot hold"),
        pytest.param(KEY, LAYOUT + "\0", Flaw.LAYOUT, id="a layout that ends in a zero"),
        pytest.param(KEY, LAYOUT + "\u00e9", Flaw.LAYOUT, id="a layout that is not ASCII"),
    ],
)
def test_what_nobody_can_seal_is_answered_by_no_record(record: bytearray, key: ChunkKey, layout: str, expected: Flaw) -> None:
    """A field of fixed length must not make one name look like another, and asking for such a name must not raise."""
    assert flaw_of(record, key, layout) is expected


def test_a_layout_id_that_is_too_long_is_not_the_one_it_begins_with() -> None:
    longest = "l" * LAYOUT_BYTES
    assert flaw_of(sealed(b"x", KEY, longest), KEY, longest, 1) is None
    assert flaw_of(sealed(b"x", KEY, longest), KEY, longest + "l", 1) is Flaw.LAYOUT


def test_hashes_that_differ_in_zeros_at_the_end_are_different_keys() -> None:
    """The field is padded with zeros; its length says which of them are the hash."""
    short, long = (KEY._replace(chain_hash=digest) for digest in (b"\x01", b"\x01\x00"))
    assert flaw_of(sealed(b"x", short), long, payload_bytes=1) is Flaw.KEY
    assert flaw_of(sealed(b"x", long), short, payload_bytes=1) is Flaw.KEY
    assert short.name != long.name


def test_a_header_of_another_version_is_none(record: bytearray) -> None:
    """Even with the right checksum: magic, version, header length, flags and algorithm are those of this version, or it is not ours."""
    for at in range(24):
        for value in {0, 1, 2, 0xFF, record[at] ^ 0x80} - {record[at]}:
            bent = bytearray(record)
            bent[at] = value
            assert flaw_of(with_checksum(bent)) is Flaw.HEADER, at


def test_unused_bytes_are_zeros_or_it_is_no_header(record: bytearray) -> None:
    """One header for one meaning: what a later version writes there, this one does not take for its own."""
    unused = [46, 47, *range(48 + len(KEY.chain_hash), 112), *range(120 + len(LAYOUT), 184), *range(200, 4080)]
    for at in unused:
        bent = bytearray(record)
        bent[at] = 1
        assert flaw_of(with_checksum(bent)) is Flaw.HEADER, at


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0lbhnc", id="starts with a zero"),
        pytest.param(b"lb\0hnc", id="a zero inside"),
        pytest.param(b"lbhnc\0x", id="a letter behind the end"),
        pytest.param(b"lbhnc ", id="a space"),
        pytest.param(b"lbhn\xe9", id="not ASCII"),
        pytest.param(b"lbhnc\n", id="a newline"),
    ],
)
def test_a_layout_id_that_nobody_can_write_is_not_read(record: bytearray, raw: bytes) -> None:
    record[120:184] = raw.ljust(64, b"\0")
    assert read_header(with_checksum(record)) is None


@pytest.mark.parametrize("length", [0, 65, 0xFFFF])
def test_a_hash_length_out_of_range_is_not_read(record: bytearray, length: int) -> None:
    record[44:46] = length.to_bytes(2, "little")
    assert read_header(with_checksum(record)) is None


def test_a_payload_length_of_zero_is_not_read(record: bytearray) -> None:
    record[112:120] = bytes(8)
    assert read_header(with_checksum(record)) is None


@seeded
@given(st.binary(max_size=300), st.integers(0, 8192))
def test_reading_and_verifying_arbitrary_bytes_never_raises(junk: bytes, size: int) -> None:
    data = (junk * (size // max(1, len(junk)) + 1))[:size]
    assert read_header(data) is None
    assert read_header(memoryview(data)) is None
    assert flaw_of(data) in {Flaw.LENGTH, Flaw.HEADER}


@seeded
@given(st.dictionaries(st.integers(0, 231), st.integers(0, 255), max_size=40))
def test_a_header_with_a_right_checksum_is_read_as_written_or_not_at_all(changes: dict[int, int]) -> None:
    """Arbitrary fields under a valid checksum: what is read makes the same page again."""
    record = sealed(b"x" * PAYLOAD_BYTES)
    for at, value in changes.items():
        record[at] = value
    header = read_header(with_checksum(record))
    if header is not None:
        again = bytearray(record_bytes(1))
        seal(memoryview(again), header.key, header.layout, 1)
        again[112:120] = header.payload_bytes.to_bytes(8, "little")
        again[184:200] = header.payload_checksum
        assert with_checksum(again)[:HEADER_BYTES] == record[:HEADER_BYTES]


def test_read_only_memory_and_bytes_can_be_verified(record: bytearray) -> None:
    assert flaw_of(bytes(record)) is None
    assert read_header(bytes(record)) == read_header(memoryview(record).toreadonly())


def test_a_header_is_that_of_one_record_alone(record: bytearray) -> None:
    header = read_header(record)
    assert header is not None
    key, layout, payload_bytes = header.key, header.layout, header.payload_bytes
    assert is_header(memoryview(record), key, layout, payload_bytes)
    others = (
        (key._replace(group=key.group + 1), layout, payload_bytes),
        (key, layout + "x", payload_bytes),
        (key, layout, payload_bytes + 1),
    )
    assert not any(is_header(record, *other) for other in others)
    assert not is_header(record, key, "", payload_bytes)
    assert not is_header(record[: HEADER_BYTES - 1], key, layout, payload_bytes)
    for at in range(HEADER_BYTES):
        record[at] ^= 1
        assert not is_header(record, key, layout, payload_bytes)
        record[at] ^= 1


REFUSED: dict[str, dict[str, Any]] = {
    "no layout": {"layout": ""},
    "a layout that is too long": {"layout": "x" * 65},
    "a layout with a zero at its end": {"layout": "lbhnc\0"},
    "a layout with a zero inside": {"layout": "lb\0hnc"},
    "a layout with a space": {"layout": "lb hnc"},
    "a layout that is not ASCII": {"layout": "lbhn\u00e9"},
    "no payload": {"payload_bytes": 0},
    "a negative payload": {"payload_bytes": -1},
    "a payload that needs more pages": {"payload_bytes": 4097},
    "no hash": {"key": KEY._replace(chain_hash=b"")},
    "a hash that is too long": {"key": KEY._replace(chain_hash=bytes(65))},
    "a namespace that is too short": {"key": KEY._replace(namespace="00")},
    "a namespace in upper case": {"key": KEY._replace(namespace="AB" * 16)},
    "a namespace with spaces": {"key": KEY._replace(namespace="00 " * 16)},
    "a negative group": {"key": KEY._replace(group=-1)},
    "a group that is too large": {"key": KEY._replace(group=2**32)},
}


@pytest.mark.parametrize("refused", REFUSED)
def test_seal_refuses_and_does_not_touch_the_record(refused: str) -> None:
    record = bytearray(b"\xee" * 8192)
    arguments: dict[str, Any] = {"key": KEY, "layout": LAYOUT, "payload_bytes": PAYLOAD_BYTES} | REFUSED[refused]
    with pytest.raises(ValueError, match=r"^seal: "):
        seal(memoryview(record), **arguments)
    assert record == b"\xee" * 8192


def test_the_full_digest_is_in_the_header_and_ids_do_not_collide() -> None:
    """SEC-04: 100,000 random ids, nothing of which is shortened on the way to name and header."""
    draw = random.Random(4)
    ids = [draw.randbytes(32) for _ in range(100_000)]
    assert len({ChunkKey.from_engine(KEY.namespace, digest + bytes(4)).name for digest in ids}) == len(ids)
    for digest in ids[:200]:
        record = sealed(b"x", KEY._replace(chain_hash=digest))
        assert bytes(record[48:80]) == digest
        assert bytes(record[24:40]).hex() == KEY.namespace
