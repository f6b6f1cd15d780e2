"""Whatever changes the meaning of stored bytes changes their namespace, and nothing else does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.identity import GroupIdentity, KVIdentity, WriterIdentity, canonical_json, fresh_epoch, salt_digest

seeded = settings(derandomize=True, deadline=None, max_examples=200)

GROUP = GroupIdentity(kind="full", layers=("l0", "l1"), payload_bytes=8192, heads=2, head_size=64)
WRITER = WriterIdentity(engine="vllm 0.32.0", attention_backend="FLASH_ATTN", variant="NHD", topology="tp=1")
PLAIN = KVIdentity(
    model="acme/tiny",
    weights="commit 0123",
    model_config="c0",
    kv_dtype="bfloat16",
    layout="lbhnc",
    layout_version=1,
    block_tokens=16,
    hash_tokens=16,
    blocks_per_chunk=2,
    groups=(GROUP,),
    hash_algorithm="sha256_cbor",
)
OPAQUE = dataclasses.replace(PLAIN, layout="opaque", writer=WRITER)

# Another value of every field, and for those that have several: each kind of difference.
OTHER: dict[type, dict[str, list[Any]]] = {
    KVIdentity: {
        "model": ["acme/tiny2", "acme/Tiny", "acme/tiny "],
        "weights": ["commit 0124", "other"],
        "model_config": ["c1", ""],
        "kv_dtype": ["float8_e4m3", "float16"],
        "layout": ["lbnhc"],
        "layout_version": [0, 2],
        "block_tokens": [32],
        "hash_tokens": [32],
        "blocks_per_chunk": [1],
        "groups": [(GROUP, GROUP)],
        "hash_algorithm": ["sha256"],
        "hash_seed": ["0"],
        "quantization": ["fp8"],
        "draft_model": ["acme/draft"],
        "lora": [(("a", "d1"),), (("a", "d2"),), (("b", "d1"),), (("a", "d1"), ("b", "d1"))],
        "tenant": [salt_digest("x"), salt_digest("y")],
        "epoch": ["0" * 32, "1" * 32],
        "private": ["p1", "p2"],
        "writer": [dataclasses.replace(WRITER, variant="HND")],
    },
    GroupIdentity: {
        "kind": ["mla"],
        "layers": [("l1", "l0"), ("l0",), ("l0", "l1", "l2"), ("l0l1",), ()],
        "payload_bytes": [4096],
        "heads": [4],
        "head_size": [32],
        "window": [1024],
        "state_shapes": [("float32[4]",), ("float32[4]", "bfloat16[3]"), ("bfloat16[3]", "float32[4]")],
    },
    WriterIdentity: {
        "engine": ["vllm 0.33.0"],
        "attention_backend": ["TRITON_ATTN"],
        "variant": ["HND", ""],
        "topology": ["tp=2"],
    },
}


def changed(cls: type, field: str, value: Any) -> tuple[KVIdentity, KVIdentity]:
    """Two identities that differ in one field of one class, and in nothing else."""
    if cls is GroupIdentity:
        return PLAIN, dataclasses.replace(PLAIN, groups=(dataclasses.replace(GROUP, **{field: value}),))
    if cls is WriterIdentity:
        return OPAQUE, dataclasses.replace(OPAQUE, writer=dataclasses.replace(WRITER, **{field: value}))
    base = OPAQUE if field == "writer" else PLAIN
    return base, dataclasses.replace(base, **{field: value})


@pytest.mark.parametrize("cls", OTHER, ids=lambda cls: cls.__name__)
def test_every_field_is_in_the_matrix(cls: type) -> None:
    """KEY-11: a field that is added without another value of it here fails."""
    assert set(OTHER[cls]) == {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    assert all(OTHER[cls].values())


@pytest.mark.parametrize(
    ("cls", "field"), [pytest.param(cls, field, id=f"{cls.__name__}.{field}") for cls, fields in OTHER.items() for field in fields]
)
def test_changing_one_field_changes_the_namespace(cls: type, field: str) -> None:
    """KEY-11; KEY-01 (weights), KEY-02 (model_config), KEY-03 (layout), KEY-05 (kv_dtype), SEC-01 (tenant), SEC-02 and SEC-03 (lora)."""
    pairs = [changed(cls, field, value) for value in OTHER[cls][field]]
    spaces = [pairs[0][0].namespace, *(other.namespace for _, other in pairs)]
    assert len(set(spaces)) == len(spaces)


def test_the_same_identity_is_the_same_namespace() -> None:
    again = KVIdentity(**{field.name: getattr(PLAIN, field.name) for field in reversed(dataclasses.fields(PLAIN))})
    assert again == PLAIN
    assert again.namespace == PLAIN.namespace


def test_the_order_of_groups_counts() -> None:
    """A group's number is its place."""
    window = dataclasses.replace(GROUP, kind="sliding_window", window=8)
    first, second = (dataclasses.replace(PLAIN, groups=groups).namespace for groups in ((GROUP, window), (window, GROUP)))
    assert first != second


def test_text_cannot_pretend_to_be_another_field() -> None:
    """Quotes and commas inside a value do not end it."""
    tricky = dataclasses.replace(PLAIN, model='m","weights":"w', weights="x")
    honest = dataclasses.replace(PLAIN, model="m", weights='w","weights":"x')
    assert tricky.namespace != honest.namespace
    assert json.loads(tricky.canonical_json())["model"] == 'm","weights":"w'


REFUSED: list[tuple[str, Any]] = [
    ("model", ""),
    ("kv_dtype", ""),
    ("kv_dtype", "auto"),
    ("kv_dtype", "Auto"),
    ("weights", ""),
    ("layout", ""),
    ("layout", "x" * 65),
    ("layout", "lb hnc"),
    ("layout", "lbhn\u00e9"),
    ("hash_algorithm", ""),
    ("groups", ()),
    ("groups", [GROUP]),
    ("groups", (dataclasses.asdict(GROUP),)),
    ("block_tokens", 0),
    ("block_tokens", 16.0),
    ("block_tokens", "16"),
    ("block_tokens", True),
    ("hash_tokens", 0),
    ("blocks_per_chunk", -1),
    ("layout_version", 2**53),
    ("layout_version", 1.5),
    ("model_config", None),
    ("model_config", b"c0"),
    ("quantization", None),
    ("draft_model", None),
    ("model", "lone \ud800"),
    ("lora", (("b", "d"), ("a", "d"))),
    ("lora", (("a", "d"), ("a", "e"))),
    ("lora", (("a", ""),)),
    ("lora", (("a", None),)),
    ("lora", (("a",),)),
    ("lora", ["a"]),
    ("tenant", "acme"),
    ("tenant", None),
    ("epoch", "1"),
    ("epoch", "2026-01-01"),
    ("writer", WRITER),
    ("writer", dataclasses.asdict(WRITER)),
]


@pytest.mark.parametrize(("field", "value"), [pytest.param(field, value, id=f"{field}={value!a:.40}") for field, value in REFUSED])
def test_what_is_unclear_is_refused_by_name(field: str, value: Any) -> None:
    """KEY-05 and KEY-03 among them: an unresolved type, a layout that is not set."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(PLAIN, **{field: value})
    assert (caught.value.where, caught.value.field) == ("KVIdentity", field)


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (GroupIdentity, "kind", ""),
        (GroupIdentity, "payload_bytes", 0),
        (GroupIdentity, "payload_bytes", 8192.0),
        (GroupIdentity, "heads", -1),
        (GroupIdentity, "window", None),
        (GroupIdentity, "layers", "l0"),
        (GroupIdentity, "layers", (0,)),
        (GroupIdentity, "state_shapes", [1]),
        (WriterIdentity, "engine", ""),
        (WriterIdentity, "attention_backend", ""),
        (WriterIdentity, "topology", ""),
        (WriterIdentity, "variant", None),
    ],
)
def test_parts_that_are_unclear_are_refused_by_name(cls: Any, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(GROUP if cls is GroupIdentity else WRITER, **{field: value})
    assert (caught.value.where, caught.value.field) == (cls.__name__, field)


def test_an_opaque_layout_needs_its_writer() -> None:
    with pytest.raises(ConfigError, match="writer"):
        dataclasses.replace(OPAQUE, writer=None)


def test_weights_may_be_unknown_only_in_a_private_namespace() -> None:
    """KEY-01."""
    private = dataclasses.replace(PLAIN, weights="", private="x1")
    assert private.namespace != dataclasses.replace(PLAIN, weights="", private="x2").namespace


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "XXH3"])
def test_a_weak_hash_needs_a_seed_or_a_private_namespace(algorithm: str) -> None:
    """SEC-05: collisions can be computed beforehand for a hash that is fast and whose seed is public."""
    with pytest.raises(ConfigError, match="hash_seed"):
        dataclasses.replace(PLAIN, hash_algorithm=algorithm)
    dataclasses.replace(PLAIN, hash_algorithm=algorithm, hash_seed="8765")
    dataclasses.replace(PLAIN, hash_algorithm=algorithm, private="x1")


def test_an_adapter_loaded_anew_under_its_name_is_another_one() -> None:
    """SEC-03: two digests, two namespaces; no digest, no identity."""
    first, second = (dataclasses.replace(PLAIN, lora=(("sql", digest),)).namespace for digest in ("d1", "d2"))
    assert first != second
    with pytest.raises(ConfigError, match=r"lora: 'sql' has no digest"):
        dataclasses.replace(PLAIN, lora=(("sql", ""),))


def test_the_salt_appears_nowhere() -> None:
    """SEC-01: not in the name, the identity, the manifest or the repr; its digest stands for it."""
    salt = "correct horse battery staple"
    identity = dataclasses.replace(PLAIN, tenant=salt_digest(salt))
    shown = identity.canonical_json().decode() + identity.manifest().decode() + repr(identity) + identity.namespace
    assert salt not in shown
    assert salt_digest(salt) in shown
    assert salt_digest(salt) == hashlib.sha256(b"kvstore-sdk tenant salt\0" + salt.encode()).hexdigest()
    assert salt_digest("") == ""
    for wrong in (salt, salt.encode(), (salt,)):
        with pytest.raises(ConfigError, match="tenant") as caught:
            dataclasses.replace(PLAIN, tenant=wrong)
        assert salt not in str(caught.value), "not even when it is put into the wrong place"


def test_epochs_never_meet() -> None:
    """KEY-12: two engines that both reset share nothing; the epoch alone parts them."""
    epochs = [fresh_epoch() for _ in range(10_000)]
    assert len(set(epochs)) == len(epochs)
    spaces = {dataclasses.replace(PLAIN, epoch=epoch).namespace for epoch in ("", *epochs[:100])}
    assert len(spaces) == 101


def test_an_identity_can_be_a_key_and_cannot_be_changed() -> None:
    assert {PLAIN: 1}[dataclasses.replace(PLAIN)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.model = "other"  # type: ignore[misc]


def test_the_manifest_informs_people_and_is_whole_pages() -> None:
    manifest = OPAQUE.manifest()
    assert len(manifest) % 4096 == 0
    body = json.loads(manifest)
    assert body == {"format": "kvstore-sdk", "namespace": OPAQUE.namespace, "identity": json.loads(OPAQUE.canonical_json())}
    assert manifest == OPAQUE.manifest()
    many = dataclasses.replace(PLAIN, groups=(dataclasses.replace(GROUP, layers=tuple(f"layer.{n}" for n in range(2000))),))
    assert len(many.manifest()) % 4096 == 0
    assert json.loads(many.manifest())["namespace"] == many.namespace


# --- canonical JSON ----------------------------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(max_codepoint=127)), inner, max_size=4),
    max_leaves=20,
)


@seeded
@given(plain_values)
def test_canonical_json_is_json_of_one_form(value: Any) -> None:
    written = canonical_json(value)
    assert json.loads(written) == value
    assert written.isascii()
    assert b"\n" not in written


@seeded
@given(st.dictionaries(st.text(st.characters(max_codepoint=127)), st.integers(0, 9), min_size=2), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value: dict[str, int], draw: Any) -> None:
    """KEY-02."""
    shuffled = list(value.items())
    draw.shuffle(shuffled)
    assert canonical_json(dict(shuffled)) == canonical_json(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"b": 1, "a": [True, False, None], "A": {}}, b'{"A":{},"a":[true,false,null],"b":1}'),
        ((1, (2,)), b"[1,[2]]"),
        (-(2**53) + 1, b"-9007199254740991"),
        ('"\\/\b\f\n\r\t\0\x7f', b'"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u007f"'),
        ("\u00e9\u2028\U0001f600", b'"\\u00e9\\u2028\\ud83d\\ude00"'),
        ("e\u0301", b'"e\\u0301"'),
    ],
)
def test_canonical_json_is_written_so(value: Any, written: bytes) -> None:
    assert canonical_json(value) == written


@pytest.mark.parametrize("value", [1.0, 1.5, float("nan"), b"x", {1, 2}, object(), [1, [2.0]], {"a": {"b": 0.1}}])
def test_a_type_without_a_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="canonical_json"):
        canonical_json(value)


@pytest.mark.parametrize("value", [2**53, -(2**53), {1: 2}, {"\u00e9": 1}, "\ud800", ["\udfff"]])
def test_a_value_that_languages_write_differently_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"canonical_json|surrogates"):
        canonical_json(value)
