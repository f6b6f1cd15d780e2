"""What stands in `kv_connector_extra_config` itself: nothing that would be believed to do something is ignored in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_stand import Stand

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import top_keys
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.spec import KVStoreTieringSpec
from kvstore_sdk.vllm.top_keys import check_top_keys

ENTRY = {"type": "kvstore", "backend": "fs", "location": "/kv"}


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize(
    ("key", "with_table", "without"),
    [
        ("tenant_salt", "belongs in the table kvstore", "belongs in each entry of secondary_tiers"),
        ("private", "belongs in the table kvstore", "belongs in each entry of secondary_tiers"),
        ("lora_digests", "belongs in the table kvstore", "belongs in each entry of secondary_tiers"),
        ("may_store", "belongs in each entry of secondary_tiers", "belongs in each entry of secondary_tiers"),
        ("io_threads", "belongs in each entry of secondary_tiers", "belongs in each entry of secondary_tiers"),
        ("direct_io", "belongs in each entry of secondary_tiers", "belongs in each entry of secondary_tiers"),
        ("hold_timeout_s", "belongs in the table kvstore", "this spec has no such option"),
        (
            "lookup_timeout_s",
            "for the store, and in each entry of secondary_tiers for its tier",
            "belongs in each entry of secondary_tiers",
        ),
        ("policy", "the key is eviction_policy", "the key is eviction_policy"),
        ("eviction_polcy", "did you mean eviction_policy?", "did you mean eviction_policy?"),
        ("blok_size", "did you mean block_size?", "did you mean block_size?"),
        ("weight_version", "weights_version, in the table kvstore?", "weights_version, in each entry of secondary_tiers?"),
    ],
)
def test_what_would_do_nothing_is_refused_and_told_where_it_belongs(key: str, with_table: str, without: str, has_table: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        check_top_keys("a spec", {"secondary_tiers": [ENTRY], key: "hunter2"}, has_table=has_table)
    message = str(caught.value)
    assert message.startswith(f"a spec: {key}: ")
    assert message.endswith(with_table if has_table else without)
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"weights_version": "x"}, "put weights_version into each entry of secondary_tiers"),
        ({"weights_version": "x", "io_threads": 1, "hold_timeout_s": 1}, "weights_version, io_threads into .*; leave out hold_timeout_s"),
        ([1], "leave it out"),
    ],
)
def test_the_table_of_the_other_spec_is_refused(table: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"kvstore: is a table of KVStoreOffloadingSpec, .*{words}"):
        check_top_keys("KVStoreTieringSpec", {"secondary_tiers": [ENTRY], "kvstore": table}, has_table=False)


@pytest.mark.parametrize("has_table", [True, False])
def test_keys_of_vllm_are_none_of_ours(has_table: bool, caplog: pytest.LogCaptureFixture) -> None:
    check_top_keys("a spec", dict.fromkeys(top_keys._VLLMS, 1), has_table=has_table)
    assert caplog.records == []


def test_a_key_that_nobody_knows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It may be of a later vLLM, or for a program that reads the same file."""
    for _ in range(3):
        check_top_keys("a spec", {"routing_zone": "hunter2", "routing_zone_of_more": 1}, has_table=True)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert "the key routing_zone, which neither vLLM nor kvstore-sdk knows" in told[0]
    assert "hunter2" not in caplog.text


def test_the_tier_looks_where_the_spec_is_vllms_own(stand: Callable[..., Stand], tmp_path: Path) -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    plain = {"ranks": 1, "groups": 1, "blocks_per_chunk": 1, "workers": False, "spec_class": TieringOffloadingSpec}
    with pytest.raises(ConfigError, match=r"tier 'kvstore': tenant_salt: .* it belongs in each entry of secondary_tiers"):
        stand([ENTRY | {"location": str(tmp_path / "kv")}], extra={"tenant_salt": "x"}, **plain)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec_class", [KVStoreTieringSpec, KVStoreOffloadingSpec])
def test_both_specs_look_before_anything_opens(spec_class: type[Any], stand: Callable[..., Stand], tmp_path: Path) -> None:
    entry = ENTRY | {"location": str(tmp_path / "kv")}
    with pytest.raises(ConfigError, match=rf"{spec_class.__name__}: tenant_salt: .* it belongs in"):
        stand([entry], spec_class=spec_class, extra={"cpu_bytes_to_use": 1 << 20, "tenant_salt": "x"})
    assert list(tmp_path.iterdir()) == []
