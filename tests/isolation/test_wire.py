"""Frames and values that cross: what goes over comes back equal, and nothing else is believed."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk import backend as sdk
from kvstore_sdk.backend import (
    BackendError,
    BreachError,
    Capabilities,
    ConfigError,
    DeleteStatus,
    Durability,
    Failure,
    GetResult,
    GetStatus,
    ListEntry,
    ListPage,
    PutResult,
    PutStatus,
    ThrottledError,
    UnavailableError,
    Usage,
)
from kvstore_sdk.isolation.crossing import (
    pack_capabilities,
    pack_error,
    pack_results,
    unpack_capabilities,
    unpack_error,
    unpack_results,
)
from kvstore_sdk.isolation.wire import MAX_FRAME_BYTES, Frames, WireError, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=6), st.data())
def test_messages_come_out_however_the_bytes_are_cut(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    frames, found, at = Frames(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += list(frames.feed(stream[at : at + size]))
        at += size
    assert found == messages


def test_a_message_that_is_too_large_or_no_json_is_not_written() -> None:
    with pytest.raises(WireError, match="at most"):
        encode("x" * (MAX_FRAME_BYTES + 1))
    for odd in (object(), float("nan"), b"bytes", {1, 2}):
        with pytest.raises(WireError, match="JSON"):
            encode(odd)


def test_a_length_out_of_bounds_is_refused_before_its_bytes_come() -> None:
    frames = Frames()
    assert list(frames.feed(encode([1]) + struct.pack("<I", MAX_FRAME_BYTES) + b"[")) == [[1]]
    with pytest.raises(WireError, match="announced"):
        list(Frames().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


@given(st.binary(max_size=60))
def test_any_bytes_are_messages_or_refused(data: bytes) -> None:
    try:
        list(Frames().feed(data))
    except WireError:
        return


@pytest.mark.parametrize("body", [b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b"", b"nope"])
def test_json_that_is_made_to_hurt_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        list(Frames().feed(struct.pack("<I", len(body)) + body))


@pytest.mark.parametrize("kind", [kind for kind in vars(sdk).values() if isinstance(kind, type) and issubclass(kind, BackendError)])
def test_every_class_of_errors_crosses(kind: type[BackendError]) -> None:
    found = unpack_error(_over(pack_error(kind("what happened"), "doing")))
    assert (type(found), str(found)) == (kind, "what happened")


def test_what_a_class_has_beside_its_text_crosses() -> None:
    throttled = unpack_error(_over(pack_error(ThrottledError("wait", 1.5), "doing")))
    assert isinstance(throttled, ThrottledError)
    assert throttled.retry_after_s == 1.5
    config = unpack_error(_over(pack_error(ConfigError("where", "field", "problem"), "doing")))
    assert isinstance(config, ConfigError)
    assert (config.where, config.field, config.problem) == ("where", "field", "problem")


def test_other_exceptions_cross_as_the_nearest_of_ours() -> None:
    class Special(UnavailableError):
        pass

    class Wishes(ThrottledError):
        def __init__(self) -> None:
            super().__init__("wishes")
            self.retry_after_s: Any = "soon"

    for error, kind in [(Special("x"), UnavailableError), (Wishes(), ThrottledError), (ValueError("x"), UnavailableError)]:
        assert type(unpack_error(_over(pack_error(error, "doing")))) is kind
    assert type(unpack_error(_over(pack_error(PermissionError(13, "no"), "doing")))) is sdk.DeniedError
    assert "doing: raised KeyError" in str(unpack_error(pack_error(KeyError("x"), "doing")))


@given(JSON)
def test_an_error_of_any_other_form_is_refused(packed: Any) -> None:
    try:
        error = unpack_error(packed)
    except WireError:
        return
    assert isinstance(error, sdk.KVStoreError)


RESULTS = [
    ("exists", [True, False, Failure(UnavailableError("no"))]),
    ("put", [PutResult(status) for status in PutStatus if status not in (PutStatus.FAILED, PutStatus.IN_DOUBT)]),
    ("put", [PutResult.failed(sdk.NoSpaceError("full")), PutResult(PutStatus.UNKNOWN, UnavailableError("lost"))]),
    ("get", [GetResult(GetStatus.FOUND), GetResult(GetStatus.MISSING), GetResult.wrong_size(3, 4), GetResult(GetStatus.CLOSED)]),
    ("get", [GetResult.failed(sdk.DeniedError("no")), GetResult(GetStatus.TIMED_OUT, sdk.TimedOutError("late"))]),
    ("delete", [DeleteStatus.DELETED, DeleteStatus.ABSENT, Failure(UnavailableError("no"))]),
    ("settle", [True, False]),
    ("list", ListPage([ListEntry("a", 1), ListEntry("b", 2, 3.5)], "more")),
    ("usage", Usage(3, 4, 5)),
    ("usage", Usage(3, 4)),
]


@pytest.mark.parametrize(("op", "results"), RESULTS)
def test_results_cross(op: str, results: Any) -> None:
    count = len(results) if isinstance(results, list) else 1
    found = unpack_results(op, count, _over(pack_results(op, count, results, "doing", None)))
    assert _plain(found) == _plain(results)


def test_tickets_cross_as_numbers() -> None:
    kept: list[object] = []

    def keep(ticket: object) -> int:
        kept.append(ticket)
        return len(kept)

    results = [GetResult(GetStatus.IN_DOUBT, None, ("a", 1)), GetResult(GetStatus.IN_DOUBT, UnavailableError("x"), "b")]
    found = unpack_results("get", 2, _over(pack_results("get", 2, results, "doing", keep)))
    assert [result.ticket for result in found] == [1, 2]
    assert kept == [("a", 1), "b"]


@pytest.mark.parametrize(
    ("op", "results"),
    [
        ("exists", [1]),
        ("exists", [True, True]),
        ("exists", None),
        ("put", [PutResult(PutStatus.FAILED)]),
        ("put", [PutResult(PutStatus.IN_DOUBT)]),
        ("put", [PutResult(PutStatus.IN_DOUBT, None, "a ticket, and no right to doubt")]),
        ("put", [GetResult(GetStatus.FOUND)]),
        ("get", [PutResult(PutStatus.STORED)]),
        ("get", [GetResult("found")]),  # type: ignore[arg-type]
        ("delete", [True]),
        ("list", []),
        ("usage", 3),
    ],
)
def test_an_answer_that_breaks_the_contract_is_none(op: str, results: Any) -> None:
    with pytest.raises(BreachError):
        pack_results(op, 1, results, "doing", None)


@given(st.sampled_from(["exists", "put", "get", "delete", "settle", "list", "usage", "register"]), JSON | st.lists(JSON, max_size=2))
def test_an_answer_of_any_other_form_is_refused(op: str, packed: Any) -> None:
    """What comes through has the types of the contract."""
    try:
        found = unpack_results(op, 1, packed)
    except WireError:
        return
    assert isinstance(found, {"list": ListPage, "usage": Usage}.get(op, list))
    if isinstance(found, list):
        [result] = found
        kinds = {"put": PutResult, "get": GetResult, "delete": (DeleteStatus, Failure), "exists": (bool, Failure)}
        assert isinstance(result, kinds.get(op, bool))


@pytest.mark.parametrize("modified_s", [-1, 10**400, float("nan"), float("inf"), True, "1"])
def test_a_time_out_of_bounds_is_refused(modified_s: Any) -> None:
    with pytest.raises(WireError):
        unpack_results("list", 1, [[["a", 1, modified_s]], None])


def test_texts_of_errors_are_one_line_in_bounds() -> None:
    text = str(unpack_error(["DeniedError", "a\nb\x1b[31m" + "c" * 10_000, 0.0]))
    assert text.startswith("a b [31m")
    assert len(text) <= 1000


def test_capabilities_cross_and_odd_ones_are_refused() -> None:
    found = Capabilities(max_record_bytes=5, max_batch=7, shared=True, durability=Durability.PROCESS_CRASH)
    packed = _over(pack_capabilities(found))
    assert unpack_capabilities(packed) == found
    for odd in (None, [], {}, packed | {"more": 1}, packed | {"max_batch": 0}, packed | {"fork": "maybe"}):
        with pytest.raises(WireError):
            unpack_capabilities(odd)


def _over(packed: Any) -> Any:
    return json.loads(json.dumps(packed))


def _plain(value: Any) -> str:
    """Errors are equal when their class and text are."""
    return repr(value)
