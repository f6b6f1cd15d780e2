"""The second way in at its edges: lengths, aborts, preemptions, a host tier that is too small, resets, and everything at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_batches import Batch, LateMover, forget_host, settled
from vllm_engines import PROMPT_TOKENS, Answer, Engine, fs_entry, reusable
from vllm_faulty import OPENED, faulty_entry
from vllm_models import VOCABULARY, ModelShop, TinyModel, prompts
from vllm_records import is_good, record_paths

from kvstore_sdk.format import record_bytes
from kvstore_sdk.testing import Fault, Hang
from kvstore_sdk.vllm.offloading import device
from kvstore_sdk.vllm.offloading.plan import PLAN_BYTES

SHORT = {"load_timeout_s": 0.3, "store_timeout_s": 0.3, "drain_timeout_s": 0.3, "breaker_failures": 1000}
LLAMA_PAYLOAD_BYTES = 2 * 2 * 2 * 32 * 32 * 2
"""Of a chunk of one block: 2 layers, K and V, 2 heads, 32 tokens, 32 numbers of 2 bytes."""

LENGTHS = {
    "llama": [31, 32, 33, 64, 65, 127, 128, 129, 159, 160, 161, 255, 256, 257],
    "gemma": [31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257],
    "deepseek": [15, 16, 17, 63, 64, 65, 127, 128, 129],
    "qwen": [127, 128, 129, 255, 256, 257, 383, 384, 385],
}
"""At, just below and just above whole blocks, chunks of 1 and 4 blocks, and the sliding window of 64 tokens."""


def offloading(blocks_per_chunk: int = 1, **more: Any) -> dict[str, Any]:
    return {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": blocks_per_chunk, **more}


def host_of(chunks: int) -> int:
    """Bytes of a region with room for so many chunks of Llama, and the plan and marks before them."""
    return PLAN_BYTES + 4096 + chunks * record_bytes(LLAMA_PAYLOAD_BYTES)


def differences(answers: list[Answer], expected: list[Answer]) -> list[float]:
    return [mine.differs(theirs) for mine, theirs in zip(answers, expected, strict=True)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between the device and host memory take several steps, as they do on a busy accelerator."""
    monkeypatch.setattr(device, "HostMover", LateMover)


@pytest.fixture(scope="module")
def computed(models: ModelShop) -> Callable[..., list[Answer]]:
    """What an engine without offloading answers, one prompt after another."""
    known: dict[str, Any] = {}

    def answer(name: str, asked: list[list[int]], tokens: int = 6, **options: Any) -> list[Answer]:
        key = repr((name, asked, tokens, options))
        if key not in known:
            engine = Engine(models(name), None, **options)
            try:
                known[key] = Batch(engine).ask_each(asked, tokens)
            finally:
                engine.stop()
        return list(known[key])

    return answer


def reused_by_vllm(model: TinyModel, folder: Path, asked: list[list[int]], blocks_per_chunk: int) -> list[Answer]:
    """Answers of an engine that found the same in vLLM's own host memory: the reference for MLA, see `test_offloading_engines`."""
    engine = Engine(model, fs_entry(folder), extra={"blocks_per_chunk": blocks_per_chunk})
    try:
        batch = Batch(engine)
        batch.ask_each(asked)
        engine.settle()
        engine.reset_device()
        return batch.ask_each(asked)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("name", "blocks_per_chunk"),
    [("llama", 1), ("llama", 4), ("gemma", 1), ("gemma", 4), ("deepseek", 1), ("deepseek", 4), ("qwen", 1)],
)
def test_prompts_of_any_length_are_reused_as_far_as_can_be(
    name: str, blocks_per_chunk: int, models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """HMA-01: exactly so much, from host memory and from a tier, and what is answered is what is computed, bit for bit."""
    asked = [prompts(1, length, seed=length)[0] for length in LENGTHS[name]]
    engine = start(models(name), fs_entry(tmp_path / "kv"), extra=offloading(blocks_per_chunk))
    chunk = engine.block_tokens * blocks_per_chunk
    # vLLM takes a prompt that is known as a whole, and computes its last token again; with windows or states the last chunk is computed.
    whole = name in ("llama", "deepseek")
    reuse = [length // chunk * chunk if whole else reusable(length, chunk) for length in LENGTHS[name]]
    batch = Batch(engine)
    first = batch.ask_each(asked)
    assert settled(engine) == {}
    engine.reset_device()
    from_host = batch.ask_each(asked)
    assert settled(engine) == {}
    assert engine.store.metrics.total("hits", "1:kvstore") == 0
    forget_host(engine)
    from_store = batch.ask_each(asked)
    assert settled(engine) == {}
    engine.stop()
    assert [answer.reused for answer in first] == [0] * len(asked)
    assert [answer.reused for answer in from_host] == reuse
    assert [answer.reused for answer in from_store] == reuse
    expected = computed(name, asked)
    assert differences(first, expected) == [0.0] * len(asked)
    if name == "deepseek":
        expected = reused_by_vllm(models(name), tmp_path / "vllm", asked, blocks_per_chunk)
        assert [answer.reused for answer in expected] == reuse
    assert differences(from_host, expected) == [0.0] * len(asked)
    assert differences(from_store, expected) == [0.0] * len(asked)


def jobs_under_way(engine: Engine) -> set[str]:
    jobs = engine.core.scheduler.connector.connector_scheduler._jobs.values()
    return {"store" if job.is_store else "load" for job in jobs}


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_requests_that_are_aborted_at_any_step_leave_nothing(
    name: str, late: None, models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """While their chunks are stored, loaded, or promoted, also by a call that outlives its deadline."""
    asked = prompts(6, PROMPT_TOKENS)
    reuse = reusable(PROMPT_TOKENS, 32)
    engine = start(models(name), faulty_entry(tmp_path / "kv", **SHORT), extra=offloading())
    backend, batch, seen = OPENED[str(tmp_path / "kv")], Batch(engine), []
    for again in (False, True):
        for steps, prompt in enumerate(asked):
            asking = batch.add(prompt, 40)
            batch.step_until(lambda: bool(engine.core.scheduler.running or jobs_under_way(engine)))
            batch.step(steps)
            seen.append((again, jobs_under_way(engine)))
            batch.abort(asking)
            assert settled(engine) == {}
        engine.reset_device()
    assert sum("store" in jobs for again, jobs in seen if not again) > 2
    assert sum("load" in jobs for again, jobs in seen if again) > 2
    assert [answer.reused for answer in batch.ask_each(asked)] == [reuse] * len(asked)
    engine.settle()
    forget_host(engine)

    loads = engine.store.metrics
    for number, prompt in enumerate(asked):
        backend.arm(Fault("get", Hang()))
        asking = batch.add(prompt)
        batch.step_until(lambda: backend.hanging > 0)
        if number % 3 == 2:
            before = loads.total("promotions", "1:kvstore", "late")
            batch.step_until(lambda before=before: loads.total("promotions", "1:kvstore", "late") > before)  # type: ignore[misc]
            assert sum(group.quarantined for group in engine.store.host.stats().groups.values()) > 0
        batch.abort(asking)
        batch.step(2)
        backend.heal()
        assert settled(engine) == {}
    answers = batch.ask_each(asked)
    assert settled(engine) == {}
    engine.stop()
    assert [answer.reused for answer in answers] == [reuse] * len(asked)
    assert differences(answers, computed(name, asked)) == [0.0] * len(asked)


@pytest.mark.parametrize(("name", "blocks"), [("llama", 20), pytest.param("gemma", 48, marks=pytest.mark.long)])
def test_requests_that_are_preempted_while_their_chunks_move_are_answered_right(
    name: str,
    blocks: int,
    late: None,
    monkeypatch: pytest.MonkeyPatch,
    models: ModelShop,
    start: Callable[..., Engine],
    computed: Callable[..., list[Answer]],
    tmp_path: Path,
) -> None:
    """The engine's own memory is too small for all that run, so one makes room for another, whatever is under way."""
    monkeypatch.setattr(LateMover, "POLLS", 12)
    asked, tokens = prompts(6, 150), 80
    engine = start(models(name), fs_entry(tmp_path / "kv"), extra=offloading(), num_gpu_blocks_override=blocks, max_model_len=288)
    scheduler, batch = engine.core.scheduler, Batch(engine)
    preempted: list[bool] = []
    preempt = scheduler._preempt_request

    def watched(request: Any, *arguments: Any, **options: Any) -> None:
        status = scheduler.connector.connector_scheduler._req_status[request.request_id]
        preempted.append(bool(status.transfer_jobs))
        preempt(request, *arguments, **options)

    scheduler._preempt_request = watched
    first = batch.ask(asked, tokens)
    assert settled(engine) == {}
    assert any(preempted), f"{preempted}: no request was preempted with a transfer under way: this shows nothing"
    engine.reset_device()
    second = batch.ask(asked, tokens)
    assert settled(engine) == {}
    engine.reset_device()
    alone = batch.ask_each(asked)
    engine.stop()
    assert [answer.reused for answer in alone] == [128] * len(asked)
    expected = computed(name, asked, tokens)
    assert differences(first, expected) == [0.0] * len(asked)
    assert differences(second, expected) == [0.0] * len(asked)
    assert all(is_good(key, path) for key, path in record_paths(tmp_path / "kv").items())


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_many_prompts_longer_than_host_memory_end_and_their_heads_are_loaded(
    policy: str, late: None, models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """T11: nobody waits for ever for what cannot be there all at once, alone or among others."""
    asked = prompts(8, PROMPT_TOKENS)
    expected = computed("llama", asked)
    # 6 chunks of the 12 of each prompt.
    extra = offloading(cpu_bytes_to_use=host_of(6), eviction_policy=policy)
    engine = start(models("llama"), fs_entry(tmp_path / "kv"), extra=offloading())
    Batch(engine).ask_each(asked)
    engine.settle()
    engine.stop()
    small = start(models("llama"), fs_entry(tmp_path / "kv"), extra=extra)
    assert small.store.host.stats().capacity_bytes == 6 * record_bytes(LLAMA_PAYLOAD_BYTES)
    batch = Batch(small)
    for _ in range(2):
        assert differences(batch.ask(asked), expected) == [0.0] * len(asked)
        assert settled(small) == {}
    loaded = small.store.metrics.total("promotions", "1:kvstore", "loaded")
    assert loaded > 0
    small.reset_device()
    alone = batch.ask_each(asked)
    assert settled(small) == {}
    small.stop()
    assert differences(alone, expected) == [0.0] * len(asked)
    assert all(0 < answer.reused < reusable(PROMPT_TOKENS, 32) for answer in alone)


def other_weights(worker: Any) -> None:
    """In a rank: as an update does, in place."""
    weight = worker.model_runner.model.model.embed_tokens.weight
    weight.data.copy_(weight.data.roll(7, 0))


@pytest.mark.parametrize("running", [False, True], ids=["after aborts", "with running requests"])
def test_after_a_reset_nothing_of_before_is_served(
    running: bool, late: None, models: ModelShop, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """KEY-08: whatever is under way when the weights change, on the device, in host memory and in a backend that is slow."""
    small_steps = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    asked = prompts(8, PROMPT_TOKENS)
    plain = start(models("llama"), None, **small_steps)
    plain._llm.collective_rpc(other_weights)
    expected = Batch(plain).ask_each(asked)
    plain.stop()

    engine = start(models("llama"), faulty_entry(tmp_path / "kv", drain_timeout_s=0.3), extra=offloading(), **small_steps)
    backend, batch, store = OPENED[str(tmp_path / "kv")], Batch(engine), engine.store
    before = batch.ask_each(asked[:4])
    engine.settle()
    forget_host(engine)
    namespace = store.identity.namespace
    # A promotion, stores to the backend, and copies from the device, all under way.
    backend.arm(Fault("get", Hang()))
    waiting = batch.add(asked[0])
    batch.step_until(lambda: backend.hanging > 0)
    backend.arm(Fault("put", Hang()))
    batch.ask_each(asked[4:5])
    batch.step_until(lambda: backend.hanging > 1)
    storing = batch.add(asked[5])
    batch.step_until(lambda: "store" in jobs_under_way(engine))
    assert [request.num_output_tokens for request in engine.core.scheduler.running] == [0]
    assert len(store._promotions) > 0
    assert store._cascades.bytes > 0
    if not running:
        batch.abort(waiting)
        batch.abort(storing)
    engine._llm.collective_rpc(other_weights)
    engine._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
    assert store.identity.namespace != namespace
    assert len(store.host) == 0
    # Some is asked again while all that is still under way, some after it ended.
    names = [batch.add(asked[0]), batch.add(asked[1])]
    batch.step_until(lambda: names[1] in batch.answers)
    backend.heal()
    batch.finish()
    if running:
        assert differences([batch.answers[waiting], batch.answers[storing]], [expected[0], expected[5]]) == [0.0, 0.0]
        assert [batch.answers[waiting].reused, batch.answers[storing].reused] == [0, 0]
    fresh = [batch.answers[name] for name in names] + batch.ask_each(asked[2:])
    assert settled(engine) == {}
    engine.reset_device()
    again = batch.ask_each(asked)
    assert settled(engine) == {}
    assert store.host.stats().engine_only_slots == 0
    engine.stop()
    assert differences(before, expected[:4]) == [float("inf")] * 4, "the other weights must show, or nothing here proves anything"
    assert differences(fresh, expected) == [0.0] * len(asked)
    assert [answer.reused for answer in fresh[1:5] + fresh[6:]] == [0] * 6
    if not running:
        assert [fresh[0].reused, fresh[5].reused] == [0, 0]
    assert differences(again, expected) == [0.0] * len(asked)


def mixed(random_: random.Random, count: int) -> list[tuple[list[int], int]]:
    """Prompts of which most begin like others, each with a number of tokens to generate."""
    heads = [[random_.randrange(VOCABULARY) for _ in range(random_.choice([64, 130, 200, 320]))] for _ in range(5)]
    found = []
    for _ in range(count):
        head = random_.choice(heads)
        tail = [random_.randrange(VOCABULARY) for _ in range(random_.choice([1, 5, 40, 90]))]
        found.append((head[: random_.choice([len(head), len(head), 96])] + tail, random_.choice([1, 6, 20, 40])))
    return found


@pytest.mark.parametrize(
    ("name", "policy", "chunks"), [("llama", "lru", 10), ("llama", "arc", 10), pytest.param("gemma", "arc", 40, marks=pytest.mark.long)]
)
def test_a_random_mix_under_pressure_is_answered_right(
    name: str,
    policy: str,
    chunks: int,
    late: None,
    models: ModelShop,
    start: Callable[..., Engine],
    tmp_path: Path,
) -> None:
    """RACE-01: shared prefixes, little memory on the device and less on the host, requests that come and go at any time."""
    source = random.Random(f"{name} mix")
    mix = mixed(source, 60)
    plain = start(models(name), None)
    expected = [Batch(plain).ask([prompt], tokens)[0] for prompt, tokens in mix]
    plain.stop()
    extra = offloading(cpu_bytes_to_use=host_of(chunks), eviction_policy=policy)
    options = {"num_gpu_blocks_override": {"llama": 24, "gemma": 64}[name], "max_model_len": 460}
    engine = start(models(name), fs_entry(tmp_path / "kv"), extra=extra, **options)
    batch, asked, aborted = Batch(engine), {}, []
    for number, (prompt, tokens) in enumerate(mix):
        asked[batch.add(prompt, tokens)] = expected[number]
        batch.step(source.choice([0, 0, 1, 3, 10]))
        if source.random() < 0.15:
            aborted.append(batch.add(*source.choice(mix)))
            batch.step(source.randrange(6))
            batch.abort(aborted[-1])
        if source.random() < 0.1:
            engine.reset_device()
    batch.finish()
    assert settled(engine) == {}
    host, below = engine.store.metrics, engine.store._tiers[0].tier.metrics
    evictions = sum(group.evictions for group in engine.store.host.stats().groups.values())
    stores = {result: host.total("cascades", "1:kvstore", result) for result in ("stored", "failed", "skipped", "shed")}
    # A promotion that the engine overtook, by computing the chunk itself, is loaded and not wanted: how many is a matter of time.
    promoted = {result: host.total("promotions", "1:kvstore", result) for result in ("loaded", "unwanted")}
    assert promoted["loaded"] > 0
    assert sum(promoted.values()) == host.total("promotions") == below.total("loads", "loaded")
    assert stores["failed"] == stores["skipped"] == 0
    assert sum(stores.values()) - stores["shed"] == below.total("stores")
    assert host.total("hits", "host") > 0
    assert evictions > chunks
    engine.stop()
    assert {name: batch.answers[name].differs(answer) for name, answer in asked.items()} == dict.fromkeys(asked, 0.0)
    assert not set(aborted) & set(batch.answers)
    assert all(is_good(key, path) for key, path in record_paths(tmp_path / "kv").items())
