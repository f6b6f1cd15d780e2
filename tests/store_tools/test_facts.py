"""What a name and a manifest say, and that nothing else gets through."""

from __future__ import annotations

import hashlib
import json

import pytest
from damage import chunk_key, identity_of, record_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.format import Flaw
from kvstore_sdk.identity import canonical_json
from kvstore_sdk.keys import ChunkKey, manifest_name
from kvstore_sdk.tools.facts import Kind, Manifest, Named, flaw_of, named, parse_manifest, shown, size_flaw

IDENTITY = identity_of("acme/one")
NAMESPACE = IDENTITY.namespace
TEXT = IDENTITY.manifest()


def test_each_name_is_of_a_record_of_a_manifest_or_foreign() -> None:
    key = chunk_key(IDENTITY, 0)
    assert named(key.name) == Named(Kind.RECORD, NAMESPACE, key)
    assert named(manifest_name(NAMESPACE)) == Named(Kind.MANIFEST, NAMESPACE)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))
def test_every_key_has_a_name_that_says_it(chain_hash: bytes, group: int, namespace: bytes) -> None:
    key = ChunkKey(namespace.hex(), chain_hash, group)
    assert named(key.name).key == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        "manifest.json",
        "v1/manifest.json",
        f"v1/{NAMESPACE.upper()}/manifest.json",
        f"v1/{NAMESPACE[:-1]}/manifest.json",
        f"v1/{NAMESPACE}0/manifest.json",
        f"v1/{NAMESPACE}/manifest.json.bak",
        f"v1/{NAMESPACE}/x/manifest.json",
        f"v2/{NAMESPACE}/manifest.json",
        f"v1/{'g' * 32}/manifest.json",
        f"V1/{NAMESPACE}/manifest.json",
        f"v1/{NAMESPACE}/00/01-g0",
        f"v1/{NAMESPACE}/01/01-g4294967296",
        f"v1/{NAMESPACE}/01/01-g0\n",
    ],
)
def test_everything_else_is_foreign(name: str) -> None:
    assert named(name) == Named(Kind.FOREIGN)


def test_a_manifest_says_what_the_identity_says() -> None:
    found = parse_manifest(TEXT, NAMESPACE)
    assert isinstance(found, Manifest)
    assert (found.namespace, found.model, found.weights, found.kv_dtype, found.layout, found.payload_bytes) == (
        NAMESPACE,
        IDENTITY.model,
        IDENTITY.weights,
        "bfloat16",
        "lbhnc",
        (5000, 3000),
    )
    assert parse_manifest(memoryview(TEXT), NAMESPACE) == found
    # In any spelling of JSON.
    assert parse_manifest(json.dumps(json.loads(TEXT)).encode(), NAMESPACE) == found


def test_a_changed_byte_anywhere_in_the_text_is_found() -> None:
    """A manifest proves itself: its identity has the digest that names the namespace."""
    for at in range(len(TEXT.rstrip())):
        changed = bytearray(TEXT)
        changed[at] ^= 0x04
        found = parse_manifest(bytes(changed), NAMESPACE)
        # White space and the spelling of JSON may differ.
        assert isinstance(found, str) or found == parse_manifest(TEXT, NAMESPACE)


def test_a_manifest_that_was_cut_anywhere_is_none() -> None:
    for end in range(len(TEXT.rstrip()) - 1):
        assert isinstance(parse_manifest(TEXT[:end], NAMESPACE), str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_manifest_is_a_clause_and_never_an_exception(data: bytes) -> None:
    assert isinstance(parse_manifest(data, NAMESPACE), str)


@given(st.sampled_from(["model", "weights", "kv_dtype", "layout", "groups"]), JSON)
def test_an_identity_with_odd_fields_is_refused_even_under_its_own_digest(field: str, value: object) -> None:
    identity = json.loads(IDENTITY.canonical_json())
    identity[field] = value
    try:
        namespace = hashlib.sha256(canonical_json(identity)).hexdigest()[:32]
    except (TypeError, ValueError):
        namespace = NAMESPACE
    body = {"format": "kvstore-sdk", "namespace": namespace, "identity": identity}
    found = parse_manifest(json.dumps(body).encode(), namespace)
    if isinstance(found, Manifest):
        assert all(isinstance(text, str) for text in (found.model, found.weights, found.kv_dtype, found.layout))
        assert all(type(size) is int and size >= 1 for size in found.payload_bytes)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b" " * (1 << 21)], ids=["[", "{", "9", "long"])
def test_a_manifest_that_would_cost_much_costs_little(data: bytes) -> None:
    assert isinstance(parse_manifest(data, NAMESPACE), str)


def test_the_size_alone_tells_a_length_that_no_record_has() -> None:
    key, manifest = chunk_key(IDENTITY, 0), parse_manifest(TEXT, NAMESPACE)
    assert isinstance(manifest, Manifest)
    right = len(record_of(key, 5000))
    assert size_flaw(right, key, manifest) is None
    for size_bytes in (0, 1, 4096, right - 1, right + 1):
        assert size_flaw(size_bytes, key, None) is Flaw.LENGTH
    assert size_flaw(right + 4096, key, None) is None
    assert size_flaw(right + 4096, key, manifest) is Flaw.LENGTH
    # Whose length nobody knows.
    assert size_flaw(right + 4096, key._replace(group=7), manifest) is None


def test_the_manifest_decides_about_layout_and_length_where_there_is_one() -> None:
    key, manifest = chunk_key(IDENTITY, 0), parse_manifest(TEXT, NAMESPACE)
    assert isinstance(manifest, Manifest)
    for record, flaw in (
        (record_of(key, 5000), None),
        (record_of(key, 5000, "nhdlb"), Flaw.LAYOUT),
        (record_of(key, 5001), Flaw.LENGTH),
    ):
        assert flaw_of(memoryview(record), key, manifest) is flaw
        assert flaw_of(memoryview(record), key, None) is None
    assert flaw_of(memoryview(record_of(key._replace(group=2), 5000)), key._replace(group=2), manifest) is Flaw.KEY


@given(st.text() | st.binary() | st.integers())
def test_whatever_is_shown_is_one_short_line_of_printable_ascii(value: object) -> None:
    text = shown(value, 50)
    assert all(" " <= char <= "~" for char in text)
    assert len(text) <= 50 * 10 + 3


def test_plain_text_is_shown_as_it_is() -> None:
    assert shown("acme/tiny-llama") == "acme/tiny-llama"
    assert shown("x" * 200, 100) == "x" * 100 + "..."
