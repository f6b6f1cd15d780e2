"""What is shared, what is not, and what stays private."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm.v1.core.kv_cache_utils as hashing
from vllm_stand import LAYERS, FullAttentionSpec, Layer, Stand

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.spec import KVStoreTieringSpec

MakeStand = Callable[..., Stand]


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder / "kv"), **options}


def namespace(made: Stand) -> str:
    found: str = made.adapter._tier.identity.namespace
    made.close()
    return found


def test_equal_engines_share(stand: MakeStand, tmp_path: Path) -> None:
    assert namespace(stand([entry(tmp_path)])) == namespace(stand([entry(tmp_path)]))


class Windowed(Layer):
    def get_kv_cache_spec(self, config: object) -> object:
        return SlidingWindowSpec(sliding_window=64)


class SlidingWindowSpec(FullAttentionSpec):
    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        object.__setattr__(self, "sliding_window", sliding_window)


class OtherBackend(Layer):
    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "OTHER_ATTN")


def layers(layer: Layer) -> dict[str, Layer]:
    return {f"layers.{number}": layer for number in range(3)}


def test_the_start_says_who_shares(stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvstore_sdk"):
        stand([entry(tmp_path)])
        stand([entry(tmp_path, private=True)])
    shared, private = [line for record in caplog.records if "its chunks are" in (line := record.getMessage()) and "layout" in line]
    assert "layout opaque-vllm: its chunks are shared by engines of this vLLM version, kind of machine and topology; backend fs" in shared
    assert "layout opaque-vllm: its chunks are private to this process; backend fs, default settings" in private


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "another"},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"rope": 1}, _commit_hash="another commit")},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"rope": 2}, _commit_hash="c0ffee")},
        {"model_config__max_model_len": 2048},
        {"model_config__quantization": "awq"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256"},
        {"blocks_per_chunk": 1},
        {"ranks": 1},
        {"compilation_config__static_forward_context": layers(Windowed())},
        {"compilation_config__static_forward_context": layers(OtherBackend())},
        {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)},
        {"entry": {"weights_version": "v2"}},
        {"entry": {"tenant_salt": "a secret"}},
    ],
    ids=str,
)
def test_each_difference_in_meaning_splits_the_namespace(change: dict[str, Any], stand: MakeStand, tmp_path: Path) -> None:
    """KEY-01 to KEY-05, KEY-11, TOP-01, SEC-01."""
    options = change.pop("entry", {}) if "entry" in change else {}
    change = {name: value for name, value in change.items() if name != "entry"}
    mine = stand([entry(tmp_path)])
    other = stand([entry(tmp_path, **options)], **change)
    assert other.adapter._tier.identity.private == ""
    assert namespace(mine) != namespace(other)


@pytest.mark.parametrize("what", ["engine", "machine", "layout"])
def test_an_opaque_layout_is_read_by_its_own_kind_of_writer_only(
    what: str, stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEY-04: another engine version, CPU or cache layout may mean another order of the same number of bytes."""
    mine = stand([entry(tmp_path)])
    if what == "engine":
        monkeypatch.setattr(vllm, "__version__", "0.31.0")
    elif what == "machine":
        monkeypatch.setattr(compat, "platform_variant", lambda: "x86_64/another")
    else:
        monkeypatch.setattr(compat, "cache_layout", lambda facts: "NHD")
    assert namespace(mine) != namespace(stand([entry(tmp_path)]))


def test_a_salt_may_come_from_the_environment(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-01: vLLM logs its configuration, and so a salt that stands in it."""
    monkeypatch.setenv("TENANT", "hunter2")
    given = stand([entry(tmp_path, tenant_salt="hunter2")])
    assert namespace(given) == namespace(stand([entry(tmp_path, tenant_salt_env="TENANT")]))
    with pytest.raises(ConfigError, match="tenant_salt_env: cannot be given beside tenant_salt"):
        stand([entry(tmp_path, tenant_salt_env="TENANT", tenant_salt="other")])
    monkeypatch.setenv("TENANT", "")
    with pytest.raises(ConfigError, match="tenant_salt_env: the environment variable TENANT is empty"):
        stand([entry(tmp_path, tenant_salt_env="TENANT")])


def test_a_secret_salt_appears_nowhere(stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-01."""
    caplog.set_level("DEBUG")
    made = stand([entry(tmp_path, tenant_salt="hunter2")])
    keys = made.keys("a", 2)
    request = made.request("store", keys)
    made.store(request, keys, [[0, 1, 2, 3], [4, 5, 6, 7]])
    made.settle()
    made.close()
    assert "hunter2" not in caplog.text
    assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert "hunter2" not in repr(made.adapter._known.groups)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_config__load_format": "dummy"}, "set weights_version"),
        ({"model_config__hf_config": SimpleNamespace(to_dict=dict, _commit_hash=None)}, "set weights_version"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "xxhash hashes from a random value of this process: use sha256_cbor"),
        ({"cache_config__cache_dtype": "fp8", "cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"compilation_config__static_forward_context": {}}, "layers of this model"),
        (
            {
                "speculative_config": SimpleNamespace(
                    method="eagle",
                    draft_model_config=SimpleNamespace(model="draft", hf_config=SimpleNamespace(to_dict=dict, _commit_hash=None)),
                )
            },
            "draft model",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_told_makes_the_namespace_private_with_one_warning(
    change: dict[str, Any], reason: str, stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """KEY-01, KEY-06, SEC-05: fail closed."""
    one, other = stand([entry(tmp_path)], **change), stand([entry(tmp_path)], **change)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and "private" in record.getMessage()]
    assert len(warnings) == 2
    assert all(reason in warning for warning in warnings)
    assert one.adapter._tier.identity.private
    assert namespace(one) != namespace(other)


def test_a_weights_version_stands_for_a_fingerprint(stand: MakeStand, tmp_path: Path) -> None:
    change = {"load_config__load_format": "dummy"}
    one = stand([entry(tmp_path, weights_version="v1")], **change)
    assert one.adapter._tier.identity.private == ""
    assert namespace(one) == namespace(stand([entry(tmp_path, weights_version="v1")], **change))


def test_private_is_private(stand: MakeStand, tmp_path: Path) -> None:
    assert namespace(stand([entry(tmp_path, private=True)])) != namespace(stand([entry(tmp_path, private=True)]))


def test_a_seeded_fast_hash_is_shared_only_on_the_operators_word(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-05: whoever knows the seed of xxHash can make keys collide."""
    monkeypatch.setenv("PYTHONHASHSEED", "1234")
    change = {"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}
    assert stand([entry(tmp_path)], **change).adapter._tier.identity.private
    trusted = stand([entry(tmp_path, trusted_hash_seed=True)], **change)
    assert not trusted.adapter._tier.identity.private
    assert "1234" not in trusted.adapter._tier.identity.canonical_json().decode()
    monkeypatch.setenv("PYTHONHASHSEED", "5678")
    assert namespace(trusted) != namespace(stand([entry(tmp_path, trusted_hash_seed=True)], **change))


def test_a_random_seed_of_an_older_vllm_makes_the_namespace_private(
    stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEY-06: up to 0.28 every process draws its own without PYTHONHASHSEED."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with monkeypatch.context() as patch:
        patch.delattr(hashing, "resolve_none_hash_seed")
        assert compat.hash_seed("sha256") is None
    monkeypatch.setattr(compat, "hash_seed", lambda algorithm: None)
    made = stand([entry(tmp_path)])
    assert made.adapter._tier.identity.private


def test_an_engine_that_hashes_otherwise_than_expected_is_found_out_before_it_stores(
    stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed is drawn after the tiers are built."""
    made = stand([entry(tmp_path)])
    shared = made.adapter._tier.identity.namespace
    monkeypatch.setattr(hashing, "NONE_HASH", os.urandom(32))
    made.request("first")
    assert made.adapter._tier.identity.namespace != shared
    renamed = made.adapter._tier.identity.namespace
    made.request("second")
    assert made.adapter._tier.identity.namespace == renamed


def test_lora_without_digests_stores_nothing_and_says_so_once(stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-02, SEC-03: a tier cannot tell requests with an adapter from others, and an adapter's name outlives its weights."""
    made = stand([entry(tmp_path)], lora_config=SimpleNamespace())
    keys = made.keys("a", 2)
    request = made.request("store", keys)
    assert made.lookup(request, keys) == [False] * 4
    made.store(request, keys, [[0, 1, 2, 3], [4, 5, 6, 7]])
    made.finish(request)
    made.settle()
    assert made.adapter.get_stats() is None
    made.manager.reset_cache()
    made.close()
    assert not (tmp_path / "kv").exists()
    assert len([record for record in caplog.records if "lora_digests" in record.getMessage()]) == 1


def test_lora_digests_are_part_of_the_identity(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-02, SEC-03: another digest under the same name is another namespace."""
    change = {"lora_config": SimpleNamespace()}
    seen = [
        namespace(stand([entry(tmp_path, lora_digests=digests, only_listed_adapters=True)], **change))
        for digests in ({"a": "1"}, {"a": "2"}, {"a": "1", "b": "1"}, {"b": "1"})
    ]
    seen.append(namespace(stand([entry(tmp_path)])))
    assert len(set(seen)) == 5
    assert namespace(stand([entry(tmp_path, lora_digests={"a": "1"}, only_listed_adapters=True)])) == seen[-1], (
        "without LoRA the table says nothing"
    )
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with pytest.raises(ConfigError, match=r"lora_digests: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        stand([entry(tmp_path, lora_digests={"a": "1"}, only_listed_adapters=True)], **change)
    # Under vLLM's own spec adapters cannot be seen at all, but that they may change can.
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    plain = stand([entry(tmp_path)], ranks=1, groups=1, blocks_per_chunk=1, workers=False, spec_class=TieringOffloadingSpec)
    assert plain.adapter._tier is None


def test_digests_of_some_adapters_are_not_enough(stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-02, SEC-03: a tier cannot see which requests use an adapter, so one that is not listed would be stored under its name alone."""
    made = stand([entry(tmp_path, lora_digests={"a": "1"})], lora_config=SimpleNamespace())
    assert made.adapter._tier is None
    (said,) = [record.getMessage() for record in caplog.records if "lora_digests" in record.getMessage()]
    assert "only_listed_adapters" in said


@pytest.mark.parametrize(
    ("options", "said"), [({}, True), ({"may_store": False}, False), ({"backend": "memory", "location": ""}, False)], ids=str
)
def test_chunks_that_nobody_will_read_again_are_named_where_the_store_keeps_them(
    options: dict[str, Any], said: bool, stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each restart and each reset leaves some, and the backend `fs` removes nothing by itself."""
    made = stand([entry(tmp_path, **options, private=True)])
    warnings = [record.getMessage() for record in caplog.records if "private to this process" in record.getMessage()]
    assert len(warnings) == 1
    assert (f"remove v1/{made.adapter._tier.identity.namespace} then" in warnings[0]) == said
    caplog.clear()
    made.manager.reset_cache()
    made.manager.reset_cache()
    assert len([record for record in caplog.records if "after a reset" in record.getMessage()]) == int(said)


class NovelSpec:
    """A kind of cache of a later vLLM."""


def test_a_kind_of_cache_that_nobody_knows_is_refused(stand: MakeStand, tmp_path: Path) -> None:
    """HMA-07: which of its bytes a reader needs is not known, so a record may lack some."""
    layer = SimpleNamespace(get_kv_cache_spec=lambda config: NovelSpec(), get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "X"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore_sdk.vllm.facts._plain", lambda spec: [])
        with pytest.raises(ConfigError, match=r"model: KV cache group 1 is a NovelSpec, which this version cannot store"):
            stand([entry(tmp_path)], compilation_config__static_forward_context={**known_layers(), "layers.2": layer})
    assert not (tmp_path / "kv").exists()


def known_layers() -> dict[str, Any]:
    return {name: Layer() for names in LAYERS for name in names}


def test_groups_that_the_two_sides_number_otherwise_are_refused(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renumbered(self: KVStoreTieringSpec) -> list[RankGeometry]:
        return [
            dataclasses.replace(record, extents={group + 1: extents for group, extents in record.extents.items()}) for record in read(self)
        ]

    read = KVStoreTieringSpec.kvstore_geometry
    monkeypatch.setattr(KVStoreTieringSpec, "kvstore_geometry", renumbered)
    with pytest.raises(ConfigError, match=r"geometry: the workers have KV cache groups \[1, 2\], the scheduler \[0, 1\]"):
        stand([entry(tmp_path)])
    assert not (tmp_path / "kv").exists()


def test_ranks_that_disagree_are_refused(stand: MakeStand, tmp_path: Path) -> None:
    versions = iter(["0.32.0", "0.32.1"])

    def build(self: Stand, spec: Any, rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm, "__version__", next(versions))
            return worker(self, spec, rank)

    worker = Stand._worker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stand, "_worker", build)
        with pytest.raises(ConfigError, match=r"engine: rank 1 says 'vllm 0.32.1' and rank 0 'vllm 0.32.0'"):
            stand([entry(tmp_path)])


def test_a_reset_gives_a_namespace_that_only_this_engine_knows(stand: MakeStand, tmp_path: Path) -> None:
    """KEY-12."""
    made = stand([entry(tmp_path)])
    seen = [made.adapter._tier.identity.namespace]
    for _ in range(2):
        made.manager.reset_cache()
        seen.append(made.adapter._tier.identity.namespace)
    assert len(set(seen)) == 3


def test_two_tiers_of_one_engine_have_the_same_namespace_and_their_own_label(stand: MakeStand, tmp_path: Path) -> None:
    """OBS-02, CFG-07."""
    made = stand([entry(tmp_path), {**entry(tmp_path), "location": str(tmp_path / "other")}])
    one, other = made.manager.secondary_tiers
    assert one._tier.identity == other._tier.identity
    assert (one._label, other._label) == ("1:kvstore", "2:kvstore")
