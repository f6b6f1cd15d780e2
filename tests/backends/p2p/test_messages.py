"""What comes out of the decoder is a message of the protocol, whatever goes in."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2p_frames import KINDS, Frames

from kvstore_sdk.backend import InvalidError
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.messages import (
    GOODBYES,
    MAX_AGENT_BYTES,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_NAMES,
    MAX_NUMBER,
    MAX_RECORD_BYTES,
    MAX_REGIONS,
    MAX_TEXT,
    MAX_WAIT_MS,
    REFUSALS,
    VERSION,
    VERSIONS,
    Cancel,
    Fetch,
    ForeignHello,
    Found,
    Goodbye,
    Hello,
    Lookup,
    MessageError,
    Ready,
    Refused,
    Release,
    Result,
    Target,
    Welcome,
    encode,
)

SECRET = "hunter2-do-not-log"

u64 = st.integers(0, 2**64 - 1)
numbers = st.integers(1, MAX_NUMBER)
"""Of questions."""
waits = st.integers(0, MAX_WAIT_MS)
nodes = st.binary(min_size=16, max_size=16)
sizes = st.integers(0, MAX_RECORD_BYTES)
segments = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
names = st.lists(segments, min_size=1, max_size=4).map("/".join)
tokens = st.from_regex(r"[a-z0-9_]{1,32}", fullmatch=True)
versions = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)).map(lambda pair: (min(pair), max(pair)))
texts = st.from_regex(r"[ -~]{0,512}", fullmatch=True)


def many(of: st.SearchStrategy[Any], low: int, high: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=low, max_size=min(high, low + 8)).map(tuple)


regions = st.tuples(u64, u64).filter(lambda region: min(region) > 0 and sum(region) < 2**64)
good = st.one_of(
    st.builds(
        Hello,
        numbers,
        versions,
        nodes,
        st.from_regex(r"([0-9a-f]{32})?", fullmatch=True),
        st.from_regex(r"[!-~]{0,64}", fullmatch=True),
        many(tokens, 1, 8),
    ),
    st.builds(
        Welcome,
        numbers,
        st.integers(0, 2**16 - 1),
        nodes,
        tokens,
        st.integers(0, 65535),
        st.integers(1, MAX_NAMES),
        st.integers(1, MAX_ITEMS),
    ),
    st.builds(Refused, numbers | st.just(0), tokens, texts, versions),
    st.builds(Target, numbers, st.binary(min_size=1, max_size=900), many(regions, 1, MAX_REGIONS)),
    st.builds(Ready, numbers),
    st.builds(Lookup, numbers, waits, many(names, 1, MAX_NAMES)),
    st.builds(Found, numbers, many(sizes, 1, MAX_NAMES)),
    st.builds(
        Fetch,
        numbers,
        numbers | st.just(0),
        waits,
        many(st.tuples(names, st.integers(1, MAX_RECORD_BYTES), st.integers(0, MAX_REGIONS - 1), u64), 1, MAX_ITEMS),
    ),
    st.builds(Result, numbers, many(st.tuples(st.integers(0, 4), sizes), 1, MAX_ITEMS)),
    st.builds(Release, many(names, 1, MAX_NAMES)),
    st.builds(Goodbye, tokens, texts),
    st.builds(Cancel, numbers),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | names
)
nested = st.recursive(scalars, lambda inner: st.lists(inner, max_size=6), max_leaves=12)
plain = nested | st.dictionaries(st.text(max_size=3), nested, max_size=2)
foreign = st.integers(0, 2**16 - 1).filter(lambda version: version != VERSION)


@given(good)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    frame = encode(message)
    assert decode(frame) == message
    assert decode(memoryview(frame)) == message


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_a_message_or_refused(frame: bytes) -> None:
    try:
        message = decode(frame)
    except MessageError:
        return
    assert isinstance(message, (*KINDS, ForeignHello))


@given(st.integers(0, 2), st.integers(0, 13), st.one_of(st.just(0), numbers, plain), st.lists(plain, max_size=8))
def test_fields_of_any_kind_are_a_message_or_refused(version: int, kind: int, number: Any, fields: list[Any]) -> None:
    try:
        message = decode(msgpack.packb([version, kind, number, *fields]))
    except MessageError as refused:
        said = str(refused)
    else:
        said = ""
    assert "\n" not in said
    if not said and version == VERSION:
        assert not isinstance(message, ForeignHello)
        assert decode(encode(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_of_every_kind_is_made_and_read(kind: type) -> None:
    frames = Frames(seed=1)
    for _ in range(50):
        message = frames.message(kind)
        assert type(message) is kind
        assert decode(encode(message)) == message  # type: ignore[arg-type]


# --- The limits ----------------------------------------------------------------------------------------------------------------------

LONG = "n" * 1024
NODE = b"n" * 16
HELLO = [[0, 0], NODE, "0123456789abcdef" * 2, "lbhnc", ["zmq"]]
WELCOME = [0, NODE, "zmq", 65535, 256, 256]
REFUSED = ["busy", "come back later", [0, 0]]
TARGET = [b"agent", [[4096, 8192]]]
FETCH = [1, 5000, [["v1/a", 4096, 0, 0]]]

LIMITS: list[tuple[int, list[Any], int, list[Any], list[Any]]] = [
    (1, HELLO, 0, [[0, 0], [0, 65535], [3, 9]], [[], [0], [0, 0, 0], [1, 0], [0, 65536], [-1, 0], 0, "00", None]),
    (1, HELLO, 1, [NODE], [b"", NODE[1:], NODE + b"n", "n" * 16, 16]),
    (1, HELLO, 2, ["", "f" * 32], ["f", "f" * 31, "f" * 33, "F" * 32, "g" * 32, b"f" * 32, None, "f" * 32 + "\n"]),
    (1, HELLO, 3, ["", "~" * 64], ["~" * 65, "a b", "a\n", "é", b"lbhnc", None]),
    (1, HELLO, 4, [["zmq"], ["a"] * 8], [[], ["a"] * 9, [""], ["ZMQ"], [b"zmq"], "zmq", [None], ["a" * 33]]),
    (2, WELCOME, 0, [0, 65535], [-1, 65536, 0.0, False, None]),
    (2, WELCOME, 1, [NODE], [NODE + b"n"]),
    (2, WELCOME, 2, ["nixl", "quic"], ["", "n i", b"zmq", 0]),
    (2, WELCOME, 3, [0, 65535], [-1, 65536, True]),
    (2, WELCOME, 4, [1, 256], [0, 257]),
    (2, WELCOME, 5, [1, 256], [0, 257]),
    (3, REFUSED, 0, [*REFUSALS, "of_a_later_version"], ["", "Busy", "a" * 33, b"busy", 1]),
    (3, REFUSED, 1, ["", "~" * MAX_TEXT], ["a\nb", "\x1b[31m", "a" * (MAX_TEXT + 1), b"text", "\u202e", "é"]),
    (3, REFUSED, 2, [[2, 5]], [[5, 2], [], None]),
    (4, TARGET, 0, [b"a", bytes(MAX_AGENT_BYTES)], [b"", bytes(MAX_AGENT_BYTES + 1), "agent"]),
    (
        4,
        TARGET,
        1,
        [[[1, 1]], [[1, 1]] * MAX_REGIONS, [[2**64 - 2, 1]], [[1, 2**64 - 2]]],
        [
            [],
            [[1, 1]] * (MAX_REGIONS + 1),
            [[0, 1]],
            [[1, 0]],
            [[2**64 - 1, 1]],
            [[1, 2**64 - 1]],
            [[1]],
            [[1, 1, 2]],
            [1, 1],
            {},
            [["1", 1]],
        ],
    ),
    (6, [0, ["a"]], 0, [0, MAX_WAIT_MS], [-1, MAX_WAIT_MS + 1, "0", None, 0.5]),
    (
        6,
        [0, ["a"]],
        1,
        [["a"] * MAX_NAMES, [LONG], ["v1/0/a-g0"]],
        [[], ["a"] * (MAX_NAMES + 1), [LONG + "n"], ["../a"], ["/a"], ["a//b"], ["a/.b"], ["é"], ["a\n"], [""], [b"a"], [1], "a", [["a"]]],
    ),
    (7, [[1]], 0, [[0], [MAX_RECORD_BYTES] * MAX_NAMES], [[], [0] * (MAX_NAMES + 1), [-1], [MAX_RECORD_BYTES + 1], [None], [0.0], 0]),
    (8, FETCH, 0, [0, MAX_NUMBER], [-1, MAX_NUMBER + 1]),
    (8, FETCH, 1, [0, MAX_WAIT_MS], [-1, MAX_WAIT_MS + 1]),
    (
        8,
        FETCH,
        2,
        [[["a", 1, 63, 2**64 - 1]] * MAX_ITEMS, [["a", MAX_RECORD_BYTES, 0, 0]]],
        [
            [],
            [["a", 1, 0, 0]] * (MAX_ITEMS + 1),
            [["a", 0, 0, 0]],
            [["a", MAX_RECORD_BYTES + 1, 0, 0]],
            [["a", 1, 64, 0]],
            [["a", 1, 0, -1]],
            [["../a", 1, 0, 0]],
            [["a", 1, 0]],
            [["a", 1, 0, 0, 0]],
            ["a"],
        ],
    ),
    (9, [[[0, 1]]], 0, [[[4, 0]] * MAX_ITEMS], [[], [[0, 0]] * (MAX_ITEMS + 1), [[5, 0]], [[-1, 0]], [[0, -1]], [[0]], [0, 0]]),
    (10, [["a"]], 0, [["a"] * MAX_NAMES], [[], ["a"] * (MAX_NAMES + 1), ["."]]),
    (11, ["idle", ""], 0, [*GOODBYES, "of_a_later_version"], ["", "Idle", "a" * 33, b"idle", 1]),
    (11, ["idle", ""], 1, ["", "~" * MAX_TEXT], ["a\nb", "a" * (MAX_TEXT + 1), b"text", None]),
]


@pytest.mark.parametrize(
    ("kind", "fields", "at", "allowed", "refused"), LIMITS, ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_a_field_is_taken_up_to_its_limit_and_not_beyond(
    kind: int, fields: list[Any], at: int, allowed: list[Any], refused: list[Any]
) -> None:
    for value in allowed:
        decode(msgpack.packb([VERSION, kind, 1, *fields[:at], value, *fields[at + 1 :]]))
    for value in refused:
        with pytest.raises(MessageError):
            decode(msgpack.packb([VERSION, kind, 1, *fields[:at], value, *fields[at + 1 :]]))


def test_a_message_has_its_fields_and_no_others() -> None:
    for kind, fields in ((1, HELLO), (2, WELCOME), (3, REFUSED), (4, TARGET), (5, []), (8, FETCH), (11, ["closing", ""]), (12, [])):
        decode(msgpack.packb([VERSION, kind, 1, *fields]))
        for wrong in ([*fields, 0], fields[:-1]):
            if wrong != fields:
                with pytest.raises(MessageError, match="fields"):
                    decode(msgpack.packb([VERSION, kind, 1, *wrong]))


def test_questions_and_answers_are_numbered_from_1() -> None:
    with_number = {1: HELLO, 2: WELCOME, 4: TARGET, 5: [], 6: [0, ["a"]], 7: [[1]], 8: FETCH, 9: [[[0, 1]]], 12: []}
    for kind, fields in with_number.items():
        with pytest.raises(MessageError, match="number 0"):
            decode(msgpack.packb([VERSION, kind, 0, *fields]))
    for kind, fields in {3: REFUSED, 10: [["a"]], 11: ["idle", ""]}.items():
        decode(msgpack.packb([VERSION, kind, 0, *fields]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([VERSION, 5]),
        msgpack.packb({0: 0}),
        msgpack.packb("text"),
        msgpack.packb([VERSION, 5, 1]) + b"\x00",
        msgpack.packb([VERSION, 5, -1]),
        msgpack.packb([VERSION, 5, MAX_NUMBER + 1]),
        msgpack.packb([VERSION, 5, True]),
        msgpack.packb([VERSION, 5.0, 1]),
        msgpack.packb([VERSION, 0, 1]),
        msgpack.packb([VERSION, 13, 1]),
        msgpack.packb([VERSION, 256, 1]),
        msgpack.packb([65536, 1, 1, [0, 0]]),
        msgpack.packb([VERSION, 5, msgpack.ExtType(1, b"")]),
        msgpack.packb([VERSION, 5, msgpack.Timestamp(0)]),
        # A text that is not UTF-8.
        msgpack.packb([VERSION, 10, 0])[:-1].replace(b"\x93", b"\x94", 1) + b"\x00\x91\xa1\xff",
        # Arrays that say more than there is, and a hundred thousand of them in one another.
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
    ids=range(20),
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidError):
        decode(frame)


def test_a_frame_that_is_too_long_is_refused_unread() -> None:
    frame = encode(Ready(1)) + bytes(MAX_FRAME_BYTES)
    with pytest.raises(MessageError, match=f"{len(frame)} bytes"):
        decode(frame)


def test_the_longest_message_of_each_kind_fits_in_a_frame() -> None:
    most = 2**63 - 1
    longest = [
        Hello(most, (65535, 65535), NODE, "f" * 32, "~" * 64, ("p" * 32,) * 8),
        Refused(most, "a" * 32, "~" * MAX_TEXT),
        Target(most, bytes(MAX_AGENT_BYTES), ((2**62, 2**62),) * MAX_REGIONS),
        Lookup(most, MAX_WAIT_MS, (LONG,) * MAX_NAMES),
        Found(most, (MAX_RECORD_BYTES,) * MAX_NAMES),
        Fetch(most, most, MAX_WAIT_MS, ((LONG, MAX_RECORD_BYTES, MAX_REGIONS - 1, 2**64 - 1),) * MAX_ITEMS),
        Result(most, ((4, MAX_RECORD_BYTES),) * MAX_ITEMS),
        Release((LONG,) * MAX_NAMES),
        Goodbye("a" * 32, "~" * MAX_TEXT),
    ]
    for message in longest:
        assert decode(encode(message)) == message


def test_a_message_that_nobody_would_take_is_not_made() -> None:
    with pytest.raises(MessageError, match="Release"):
        encode(Release((LONG,) * 1024))


def test_a_frame_costs_little_memory_whatever_it_says() -> None:
    """SEC-06: a peer that is not who it says can make a node spend this much, and no more, before it is refused."""
    worst = [
        b"\xdc\x01\x00" + (b"\xdc\x01\x00" + b"\x91\xc0" * 256) * 256,
        b"\xdc\x01\x00" + (b"\xdc\x01\x00" + b"\xcd\x7f\xff" * 256) * 256,
        b"\xdd\x7f\xff\xff\xff",
        b"\xc6\x7f\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
    ]
    tracemalloc.start()
    try:
        for frame in worst:
            with pytest.raises(MessageError):
                decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# --- Versions, and what is said about a frame ----------------------------------------------------------------------------------------


@given(foreign, numbers, versions, st.lists(nested, max_size=4))
def test_of_another_versions_hello_the_versions_are_read(version: int, number: int, spoken: tuple[int, int], more: list[Any]) -> None:
    assert decode(msgpack.packb([version, 1, number, spoken, *more])) == ForeignHello(number, version, spoken)


@pytest.mark.parametrize(
    "behind",
    [
        [[None] * 256],
        ["~" * 4096],
        [bytes(65536)] * 7,
        [None] * 252,
        [[[[[[[[]]]]]]]],
        [True, -1, 1.5, 2**64 - 1, -(2**63)],
    ],
    ids=["array", "text", "binary", "fields", "depth", "values"],
)
def test_of_another_version_everything_is_read_that_any_version_may_hold(behind: list[Any]) -> None:
    """The bounds that the page has for all versions: no later one goes beyond them, so that this one can read whom to refuse."""
    frame = msgpack.packb([7, 1, 1, [7, 7], *behind])
    assert len(frame) <= MAX_FRAME_BYTES
    assert decode(frame) == ForeignHello(1, 7, (7, 7))
    assert decode(msgpack.packb([7, 3, 1, "busy", "", [7, 7], *behind[:250]])) == Refused(1, "busy", "", (7, 7))


@given(st.integers(0, 2**16 - 1), numbers, tokens, texts, versions)
def test_a_refusal_is_read_in_every_version(version: int, number: int, code: str, text: str, spoken: tuple[int, int]) -> None:
    assert decode(msgpack.packb([version, 3, number, code, text, spoken])) == Refused(number, code, text, spoken)


@pytest.mark.parametrize("kind", [2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
def test_any_other_message_of_another_version_is_refused_with_both_versions(kind: int) -> None:
    with pytest.raises(MessageError, match=f"version 7, this node speaks {VERSIONS[0]} to {VERSIONS[1]}"):
        decode(msgpack.packb([7, kind, 1, [0, 0]]))


def test_the_text_of_a_refusal_is_one_short_printable_line() -> None:
    sent = Refused(1, "busy", "first\nsecond\x1b[31m\u202e" + "x" * 1000)
    read = decode(encode(sent))
    assert isinstance(read, Refused)
    assert read.text.startswith("first?second?[31m?x")
    assert len(read.text) == MAX_TEXT


@pytest.mark.parametrize(
    "fields",
    [
        [1, SECRET],
        [6, 1, 0, ["../" + SECRET]],
        [3, 1, SECRET.upper(), "text", [0, 0]],
        [3, 1, "busy", SECRET + "\n", [0, 0]],
        [1, 1, [0, 0], SECRET.encode(), "", "", ["zmq"]],
        [1, 1, [0, 0], NODE, SECRET, "", ["zmq"]],
        [SECRET, 1],
    ],
    ids=range(7),
)
def test_an_error_shows_nothing_of_what_the_frame_says(fields: list[Any]) -> None:
    with pytest.raises(MessageError) as refused:
        decode(msgpack.packb([VERSION, *fields]))
    assert SECRET not in str(refused.value)
    assert SECRET.upper() not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
