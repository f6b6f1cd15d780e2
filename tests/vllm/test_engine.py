"""What else a real engine does with the tier: metrics, events, resets, replicas, other weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from vllm_engines import Engine, Stored, fs_entry
from vllm_models import ModelShop
from vllm_records import record_paths
from vllm_stand import Stand


def test_our_counters_are_in_vllms_metrics(stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """OBS-01, OBS-02: on the page that the server shows, with the label that vLLM gives the tier."""
    before = prometheus_client.generate_latest().decode()
    assert "vllm:kvstore_" not in before
    engine = start(stored.model, fs_entry(folder), disable_log_stats=False)
    engine.ask(stored.prompts[:2])
    engine.settle()
    engine.ask(stored.prompts[:1])
    lines = prometheus_client.generate_latest().decode().splitlines()
    chunks = len(stored.keys[0]) * 2

    def value(name: str, **labels: str) -> float:
        wanted = [f'{label}="{text}"' for label, text in {"tier": "1:kvstore", "engine": "0", **labels}.items()]
        (line,) = [line for line in lines if line.startswith(f"vllm:kvstore_{name}{{") and all(text in line for text in wanted)]
        return float(line.rsplit(" ", 1)[1])

    assert value("loads_total", result="loaded") == chunks
    assert value("lookups_total", result="hit") == chunks
    assert value("load_bytes_total") > 0
    assert value("load_seconds_count") == 2
    assert value("breaker_open", side="read") == 0


def test_vllm_publishes_what_the_tier_stores(stored: Stored, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """OBS-04: events where vLLM has them; a chunk that is found to be gone is one too."""
    folder = tmp_path / "kv"
    engine = start(stored.model, fs_entry(folder), kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    published: list[Any] = []
    engine.core.scheduler.kv_event_publisher.publish = published.append
    engine.ask(stored.prompts[:2])
    engine.settle()
    engine.ask(stored.prompts[2:3])
    kinds = Counter((type(event).__name__, getattr(event, "medium", None)) for batch in published for event in batch.events)
    assert kinds["BlockStored", "STORAGE"] > 0
    assert kinds["BlockRemoved", "STORAGE"] == 0
    for path in record_paths(folder).values():
        path.write_bytes(b"")
    engine.settle()
    engine.reset_own_caches()
    published.clear()
    engine.ask(stored.prompts[:1])
    engine.settle()
    engine.ask(stored.prompts[3:4])
    kinds = Counter((type(event).__name__, getattr(event, "medium", None)) for batch in published for event in batch.events)
    assert kinds["BlockRemoved", "STORAGE"] > 0


def test_after_a_reset_nothing_from_before_is_served(stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """KEY-12: what a reset is for: the weights may have changed. What is stored afterwards only this engine finds."""
    engine = start(stored.model, fs_entry(folder))
    (answer,) = engine.ask(stored.prompts[:1])
    assert answer.reused == stored.reuse
    engine.settle()
    engine.reset()
    (answer,) = engine.ask(stored.prompts[:1])
    assert answer.reused == 0
    engine.settle()
    engine.reset_own_caches()
    (answer,) = engine.ask(stored.prompts[:1])
    assert answer.reused == stored.reuse, "it finds what it stored since"
    stored.check([answer])
    engine.stop()
    namespaces = {key.namespace for key in record_paths(folder)}
    assert len(namespaces) == 2
    other = start(stored.model, fs_entry(folder))
    assert other.tier.identity.namespace == stored.keys[0][0].namespace


@pytest.mark.parametrize("change", ["weights", "length", "type"])
def test_an_engine_with_another_model_or_setting_shares_nothing(
    change: str, stored: Stored, folder: Path, models: ModelShop, start: Callable[..., Engine]
) -> None:
    """KEY-01, KEY-02, KEY-05: weights of the same shape, another maximum length, another type."""
    model = models("llama-other-weights") if change == "weights" else stored.model
    options: dict[str, Any] = {"weights": {}, "length": {"max_model_len": 768}, "type": {"dtype": "float32"}}[change]
    engine = start(model, fs_entry(folder), **options)
    assert not engine.tier.identity.private
    assert [answer.reused for answer in engine.ask(stored.prompts[:2])] == [0, 0]
    assert engine.metrics.total("lookups", "hit") == 0


def test_replicas_have_regions_of_their_own_and_share_what_they_store(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """KEY-09: data parallel engines compute the same KV."""
    entry = fs_entry(tmp_path / "kv")
    replicas = [stand([entry], parallel_config__data_parallel_size=2, parallel_config__data_parallel_index=index) for index in range(2)]
    one, other = replicas
    assert one.engine_id != other.engine_id
    assert one.adapter._tier.identity == other.adapter._tier.identity
    blocks = [[0, 1, 2, 3], [4, 5, 6, 7]]
    written = one.fill(1, blocks)
    keys = one.keys("a", 2)
    request = one.request("store", keys)
    one.store(request, keys, blocks)
    one.finish(request)
    one.settle()
    reader = other.request("load", keys)
    assert other.lookup(reader, keys) == [True] * 4
    other.load(reader, keys, blocks)
    assert other.content(blocks) == written
