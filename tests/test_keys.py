"""Names are safe, complete and reversible."""

from __future__ import annotations

import itertools
import posixpath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.backend import is_valid_name
from kvstore_sdk.identity import GroupIdentity, KVIdentity, WriterIdentity
from kvstore_sdk.keys import MAX_HASH_BYTES, ChunkKey, is_layout_id, is_namespace, manifest_name, parse_name

seeded = settings(derandomize=True, deadline=None, max_examples=200)

keys = st.builds(
    ChunkKey,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=1, max_size=MAX_HASH_BYTES),
    st.integers(0, 2**32 - 1),
)
NAMESPACE = "0123456789abcdef" * 2
NAME = f"v1/{NAMESPACE}/ab/abcd-g0"


@seeded
@given(keys)
def test_a_name_says_everything(key: ChunkKey) -> None:
    assert parse_name(key.name) == key


@seeded
@given(keys)
def test_an_engine_key_says_everything_but_the_namespace(key: ChunkKey) -> None:
    raw = key.to_engine()
    assert raw == key.chain_hash + key.group.to_bytes(4, "big")
    assert ChunkKey.from_engine(key.namespace, raw) == key


@seeded
@given(keys)
def test_a_name_cannot_leave_the_root(key: ChunkKey) -> None:
    assert is_valid_name(key.name, max_name_bytes=179)
    assert key.name.isascii()
    assert posixpath.normpath(key.name) == key.name
    assert posixpath.join("/srv/store", key.name).startswith("/srv/store/v1/")
    assert key.name.split("/")[1:3] == [key.namespace, key.chain_hash[:1].hex()]


@seeded
@given(keys, keys)
def test_equal_keys_have_equal_names_and_different_keys_different_ones(key: ChunkKey, other: ChunkKey) -> None:
    assert ChunkKey(*key).name == key.name
    assert (key.name == other.name) == (key == other)
    assert key.name != manifest_name(key.namespace)


def test_equal_tokens_have_one_name_whoever_asks() -> None:
    """KEY-08: a name hangs on the engine's key and on the namespace, and on nothing of who computes it."""
    raw = bytes(range(32)) + (7).to_bytes(4, "big")
    assert {ChunkKey.from_engine(NAMESPACE, raw).name for _ in range(4)} == {f"v1/{NAMESPACE}/00/{bytes(range(32)).hex()}-g7"}


def test_groups_and_hashes_that_run_together_are_told_apart() -> None:
    """`1` + `23` and `12` + `3` must not meet, nor hex digits of the hash and digits of the group."""
    made = [ChunkKey(NAMESPACE, digest, group).name for digest in (b"\x01", b"\x01\x02", b"\x01\x02\x03") for group in (1, 12, 123, 1023)]
    assert len(set(made)) == len(made)


def test_shards_of_an_opaque_layout_never_share_a_name() -> None:
    """KEY-09, TOP-01: every rank of every topology has a namespace of its own for bytes that only it can read."""
    digest = bytes(32)
    names, shards = set(), 0
    for sizes in itertools.product((1, 2), repeat=4):
        for ranks in itertools.product(*map(range, sizes)):
            topology = " ".join(f"{what}={size}:{rank}" for what, size, rank in zip(("tp", "pp", "dp", "cp"), sizes, ranks, strict=True))
            identity = KVIdentity(
                model="m",
                weights="w",
                model_config="c",
                kv_dtype="bfloat16",
                layout="opaque",
                layout_version=0,
                block_tokens=16,
                hash_tokens=16,
                blocks_per_chunk=1,
                groups=(GroupIdentity(kind="full", layers=("l",), payload_bytes=4096),),
                hash_algorithm="sha256",
                writer=WriterIdentity(engine="vllm 0.32.0", attention_backend="FLASH_ATTN", variant="", topology=topology),
            )
            shards += 1
            names.add(ChunkKey(identity.namespace, digest, 0).name)
    assert len(names) == shards == 81


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v1",
        NAME + "\n",
        "\n" + NAME,
        "/" + NAME,
        "../" + NAME,
        NAME + "/",
        NAME + ".tmp",
        NAME.replace("v1", "v2"),
        NAME.replace("ab/", "ac/"),
        NAME.replace("ab/", ""),
        NAME.replace("abcd-", "abc-"),
        NAME.replace("abcd-", "abCD-"),
        NAME.replace("abcd-", "ab" * 65 + "-"),
        NAME.replace("g0", "g00"),
        NAME.replace("g0", "g01"),
        NAME.replace("g0", "g-1"),
        NAME.replace("g0", "g"),
        NAME.replace("g0", f"g{2**32}"),
        NAME.replace("g0", "g\u0661"),
        NAME.replace("0123", "012"),
        NAME.replace("cdef", "CDEF"),
        manifest_name(NAMESPACE),
    ],
)
def test_what_is_no_name_of_a_chunk_has_no_key(name: str) -> None:
    assert parse_name(NAME) is not None
    assert parse_name(name) is None


@seeded
@given(st.one_of(st.text(max_size=80), st.from_regex(r"v1/[0-9a-f]{31,33}/[0-9a-f]{2}/[0-9a-f]{1,6}-g[0-9]{1,11}", fullmatch=True)))
def test_a_name_that_is_read_is_the_one_that_is_written(name: str) -> None:
    """So no chunk has two names."""
    key = parse_name(name)
    assert key is None or key.name == name


@pytest.mark.parametrize("raw", [b"", bytes(3), bytes(4), bytes(69)])
def test_an_engine_key_of_a_wrong_length_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="chain hash has 1 to 64 bytes"):
        ChunkKey.from_engine(NAMESPACE, raw)


@pytest.mark.parametrize("namespace", ["", "..", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", "../" + "0" * 29, "\u0660" * 32])
def test_a_wrong_namespace_is_refused(namespace: str) -> None:
    assert not is_namespace(namespace)
    with pytest.raises(ValueError, match="32 lower-case hex digits"):
        ChunkKey.from_engine(namespace, bytes(36))


@pytest.mark.parametrize(
    ("text", "good"),
    [("a", True), ("~" * 64, True), ("", False), ("a" * 65, False), ("a b", False), ("a\0", False), ("a\n", False), ("\u00e9", False)],
)
def test_layout_ids(text: str, good: bool) -> None:
    assert is_layout_id(text) is good
