"""JSON out of a store, a child or shared memory: any of it is understood, or refused in the one way that its reader knows."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.backend import Capabilities, DeleteStatus, GetStatus, KVStoreError, PutStatus
from kvstore_sdk.identity import canonical_json
from kvstore_sdk.isolation.crossing import unpack_capabilities, unpack_error, unpack_results
from kvstore_sdk.isolation.logs import ChildLog
from kvstore_sdk.isolation.wire import MAX_FRAME_BYTES, Frames, WireError
from kvstore_sdk.tools.facts import Manifest, parse_manifest, shown
from kvstore_sdk.tools.versions import is_manifest_of_other, is_of_other
from kvstore_sdk_backends.fs.ledger import Reading, _parse

seeded = settings(derandomize=True, deadline=None, max_examples=100)

KINDS = ["UnavailableError", "ThrottledError", "ConfigError", "BackendError"]
FIELDS = ["model", "groups", "payload_bytes", "owner", "members"]
WORDS = st.sampled_from([*KINDS, *FIELDS, *(status.value for statuses in (PutStatus, GetStatus, DeleteStatus) for status in statuses)])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4))
ERRORS = st.tuples(WORDS, st.text(max_size=3), st.floats() | st.integers() | st.none()).map(list)
SIZES = st.none() | st.integers()
RESULTS = st.lists(st.tuples(WORDS, st.none() | ERRORS, SIZES, SIZES, SIZES).map(list) | WORDS, max_size=3)
DEEP = b"[" * 200_000


@seeded
@given(st.sampled_from(["put", "get", "exists", "delete", "settle", "list", "usage"]), PLAIN | RESULTS)
def test_the_answer_of_a_child_is_one_or_none(op: str, packed: Any) -> None:
    count = len(packed) if isinstance(packed, list) else 1
    with contextlib.suppress(WireError):
        results = unpack_results(op, count, packed)
        assert op in ("list", "usage") or len(results) == count


@seeded
@given(PLAIN)
def test_the_error_and_the_capabilities_of_a_child_are_one_or_none(packed: Any) -> None:
    with contextlib.suppress(WireError):
        error = unpack_error(packed)
        assert isinstance(error, KVStoreError)
        assert str(error).isprintable()
    with contextlib.suppress(WireError):
        assert isinstance(unpack_capabilities(packed), Capabilities)


@seeded
@given(st.lists(PLAIN, max_size=5))
def test_what_a_child_logs_is_logged_or_no_record(message: list[Any]) -> None:
    log = ChildLog("it")
    assert log.tell(["log", *message]) in (True, False)
    assert not log.tell(message) or message[0] == "log"


@seeded
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_bytes_of_a_child_are_messages_or_the_end_of_it(pieces: list[bytes]) -> None:
    frames = Frames()
    with contextlib.suppress(WireError):
        for piece in pieces:
            for _ in frames.feed(piece):
                pass


@seeded
@given(PLAIN)
def test_a_manifest_is_that_of_its_namespace_or_none(identity: Any) -> None:
    """Also one whose digest is right: whoever may write to a store can make one."""
    namespace = "0" * 32
    with contextlib.suppress(ValueError, TypeError):
        namespace = hashlib.sha256(canonical_json(identity)).hexdigest()[:32]
    body = json.dumps({"format": "kvstore-sdk", "namespace": namespace, "identity": identity}).encode()
    found = parse_manifest(body, namespace)
    assert isinstance(found, (Manifest, str))
    text = shown(identity)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 10 * 123


@seeded
@given(st.fixed_dictionaries({}, optional={"format_version": PLAIN, "model": WORDS}) | PLAIN)
def test_an_identity_is_of_another_version_or_not(identity: Any) -> None:
    assert is_of_other(identity) in (True, False)
    body = json.dumps({"format": "kvstore-sdk", "identity": identity}).encode()
    assert is_manifest_of_other(body) == is_of_other(json.loads(body)["identity"])


@seeded
@given(PLAIN)
def test_a_ledger_is_one_or_says_nothing(body: Any) -> None:
    for text in (body, {"owner": "a", "max_bytes": 1, "counting": True, "complete": True, "members": body}):
        found = _parse(json.dumps(text).encode())
        assert isinstance(found, Reading)
        assert all(isinstance(member.allowance, int) for member in found.members.values())


def test_what_would_end_a_parser_or_fill_the_memory_is_refused() -> None:
    assert isinstance(parse_manifest(DEEP, "0" * 32), str)
    assert _parse(DEEP) == Reading()
    for length, body in ((len(DEEP), DEEP), (MAX_FRAME_BYTES + 1, b""), (2**32 - 1, b"")):
        with pytest.raises(WireError):
            list(Frames().feed(length.to_bytes(4, "little") + body))
