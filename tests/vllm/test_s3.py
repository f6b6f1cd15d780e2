"""Engines share KV through an object store that is a process of its own: both ways into vLLM, both engines of the backend."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_batches import forget_host, settled
from vllm_engines import PROMPT_TOKENS, Answer, Engine, EngineProcess, reusable
from vllm_models import ModelShop, TinyModel, prompts

from kvstore_sdk.format import HEADER_BYTES, read_header, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey, parse_name

sys.path.insert(0, str(Path(__file__).parents[1] / "backends" / "s3"))

from fault_proxy import FaultProxy
from proxy_faults import Fault, Status
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

WAYS = {
    "tiering": {"blocks_per_chunk": 1},
    "offloading": {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": 1},
}
ENGINES = ["s3fs", "nixl"]
PROMPTS = {"llama": 6, "gemma": 3}
PREFIX = "kv"
# A store that is gone is found out, and found again, within some steps of an engine.
SHORT = {
    "lookup_timeout_s": 3.0,
    "load_timeout_s": 6.0,
    "store_timeout_s": 6.0,
    "close_timeout_s": 2.0,
    "breaker_failures": 2,
    "breaker_probe_s": 0.2,
}
BACK_S = 60.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.stop()


@dataclass
class Bucket:
    """A bucket of the server, as an entry of a tier and as what lies in it."""

    server: S3Server
    name: str

    def entry(self, engine: str, **options: Any) -> dict[str, Any]:
        return {
            "type": "kvstore",
            "backend": f"s3://{self.name}/{PREFIX}",
            "engine": engine,
            "endpoint": self.server.endpoint,
            "region": REGION,
            "addressing": "path",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
            **options,
        }

    def names(self) -> set[str]:
        """Keys of all objects, of which there are some hundred."""
        return {found["Key"] for found in self.server.client().list_objects_v2(Bucket=self.name).get("Contents", ())}

    def record_keys(self) -> set[ChunkKey]:
        """Of all records."""
        found = (parse_name(name.removeprefix(f"{PREFIX}/")) for name in self.names())
        return {key for key in found if key is not None}

    def get(self, key: ChunkKey) -> bytes:
        body: bytes = self.server.client().get_object(Bucket=self.name, Key=f"{PREFIX}/{key.name}")["Body"].read()
        return body

    def put(self, records: Mapping[ChunkKey, bytes]) -> None:
        for key, record in records.items():
            self.server.client().put_object(Bucket=self.name, Key=f"{PREFIX}/{key.name}", Body=record)

    def clear(self) -> None:
        """What nobody needs any more need not be carried over each restart."""
        doomed = [{"Key": name} for name in self.names()]
        if doomed:
            self.server.client().delete_objects(Bucket=self.name, Delete={"Objects": doomed})


@pytest.fixture
def bucket(server: S3Server) -> Iterator[Bucket]:
    made = Bucket(server, server.make_bucket(f"test-{next(_numbers)}"))
    yield made
    made.clear()


@dataclass(frozen=True)
class Stored:
    """What an engine stored, prompt by prompt, and what it answered."""

    model: TinyModel
    reuse: int
    prompts: list[list[int]]
    answers: list[Answer]
    records: list[dict[ChunkKey, bytes]]

    @property
    def all(self) -> dict[ChunkKey, bytes]:
        return {key: record for found in self.records for key, record in found.items()}

    def check(self, answers: Sequence[Answer], first: int = 0) -> None:
        """Assert that these are the right answers to the prompts from number `first` on."""
        expected = self.answers[first : first + len(answers)]
        assert [found.differs(answer) for found, answer in zip(answers, expected, strict=True)] == [0.0] * len(answers)


@pytest.fixture(scope="module")
def stored(models: ModelShop, server: S3Server) -> Callable[[str, str], Stored]:
    """What an engine with s3fs computed and stored, in either way into vLLM."""
    made: dict[tuple[str, str], Stored] = {}

    def of(way: str, name: str) -> Stored:
        if (way, name) not in made:
            model, bucket = models(name), Bucket(server, server.make_bucket(f"stored-{way}-{name}"))
            asked, answers, keys = prompts(PROMPTS[name], PROMPT_TOKENS), [], []
            engine = Engine(model, bucket.entry("s3fs"), extra=WAYS[way])
            try:
                for prompt in asked:
                    answers += engine.ask([prompt])
                    engine.settle()
                    keys.append(bucket.record_keys().difference(*keys))
                reuse = reusable(PROMPT_TOKENS, engine.block_tokens)
            finally:
                engine.stop()
            records = [{key: bucket.get(key) for key in found} for found in keys]
            bucket.clear()
            assert [answer.reused for answer in answers] == [0] * len(asked)
            assert answers[0].differs(answers[1]) == float("inf"), "a model that answers everything alike proves nothing"
            made[way, name] = Stored(model, reuse, asked, answers, records)
            assert all(is_good(key, record) for key, record in made[way, name].all.items())
        return made[way, name]

    return of


def is_good(key: ChunkKey, record: bytes) -> bool:
    header = read_header(record[:HEADER_BYTES])
    return header is not None and verify(memoryview(record), key, header.layout, header.payload_bytes) is None


def with_other_payload(key: ChunkKey, record: bytes) -> bytes:
    """A record with other bytes, sealed as if it had always been there: it passes verification."""
    header = read_header(record[:HEADER_BYTES])
    assert header is not None
    made = bytearray(record_bytes(header.payload_bytes))
    made[HEADER_BYTES : HEADER_BYTES + header.payload_bytes] = random.Random(3).randbytes(header.payload_bytes)
    seal(memoryview(made), key, header.layout, header.payload_bytes)
    return bytes(made)


def spoil(bucket: Bucket, records: Mapping[ChunkKey, bytes]) -> ChunkKey:
    """Change a byte of the payload of one of them; which one."""
    key = sorted(records)[len(records) // 2]
    record = records[key]
    bucket.put({key: record[:5000] + bytes([record[5000] ^ 1]) + record[5001:]})
    return key


def metrics_of(engine: Engine, way: str) -> Any:
    """What the tier counted."""
    return engine.store._tiers[0].tier.metrics if way == "offloading" else engine.metrics


def forget(engine: Engine, way: str) -> None:
    """Forget what device and host memory hold. The tier is not told."""
    if way == "offloading":
        # A put that outlived its job, since the server is gone, holds its slots for a while.
        assert settled(engine) == {}
        forget_host(engine)
    else:
        engine.reset_own_caches()


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("way", WAYS)
def test_engines_in_turn_reuse_everything_after_a_restart_of_the_server_and_answer_the_same(
    way: str, name: str, stored: Callable[[str, str], Stored], start: Callable[..., Engine], bucket: Bucket
) -> None:
    """HMA-01. From s3fs to nixl, and from nixl to s3fs: tokens and log-probabilities are equal, bit for bit; and they differ where a
    record holds something else."""
    known = stored(way, name)
    assert len({key.group for key in known.all}) == known.model.groups
    bucket.put(known.all)
    wrong = sorted(known.records[2])[0]
    bucket.put({wrong: with_other_payload(wrong, known.all[wrong])})
    bucket.server.restart()

    second = start(known.model, bucket.entry("nixl"), extra=WAYS[way])
    answers = second.ask(known.prompts[:3])
    loaded = metrics_of(second, way).total("loads", "loaded")
    (new,) = prompts(1, PROMPT_TOKENS, seed=2)
    computed = second.ask([new])
    second.settle()
    second.stop()
    assert loaded > 0
    assert [answer.reused / known.reuse for answer in answers] == [1.0] * 3
    known.check(answers[:2])
    assert answers[2].differs(known.answers[2]) > 0.0, "wrong KV must show, or equal answers would prove nothing"
    assert computed[0].reused == 0
    assert all(is_good(key, bucket.get(key)) for key in bucket.record_keys())

    third = start(known.model, bucket.entry("s3fs"), extra=WAYS[way])
    answers = third.ask([new, *known.prompts[:2]])
    third.stop()
    assert [answer.reused / known.reuse for answer in answers] == [1.0] * 3
    assert answers[0].differs(computed[0]) == 0.0
    known.check(answers[1:])


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_gone_costs_its_records_and_is_used_again_when_it_is_back(
    way: str, backend: str, stored: Callable[[str, str], Stored], start: Callable[..., Engine], bucket: Bucket
) -> None:
    """LIV-02, API-05: right answers all the time, and the breaker opens."""
    known, server = stored(way, "llama"), bucket.server
    bucket.put(known.all)
    engine = start(known.model, bucket.entry(backend, **SHORT), extra=WAYS[way])
    metrics = metrics_of(engine, way)
    answers = engine.ask(known.prompts[:1])
    known.check(answers)
    assert [answer.reused for answer in answers] == [known.reuse]
    engine.settle()

    server.stop()
    for number in range(1, 5):
        started_s = time.monotonic()
        answers = engine.ask([known.prompts[number]])
        known.check(answers, number)
        assert answers[0].reused == 0
        assert time.monotonic() - started_s < 30.0
    assert metrics.total("breaker_opened", "read") > 0
    engine.settle()

    server.start()
    server.make_bucket(bucket.name)
    bucket.put(known.all)
    reused, until_s = 0, time.monotonic() + BACK_S
    while reused < known.reuse:
        assert time.monotonic() < until_s, "nothing is found again"
        time.sleep(0.05)
        forget(engine, way)
        answers = engine.ask([known.prompts[5]])
        known.check(answers, 5)
        reused = answers[0].reused
        engine.settle()
    started_s = time.monotonic()
    engine.stop()
    assert time.monotonic() - started_s < SHORT["close_timeout_s"] + 30.0


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_a_corrupt_object_is_a_miss_and_repaired_by_the_next_store(
    way: str, backend: str, stored: Callable[[str, str], Stored], start: Callable[..., Engine], bucket: Bucket
) -> None:
    """INT-01, INT-02: one that can be removed is created again; one that cannot is replaced, which creation by itself would not do."""
    known = stored(way, "llama")
    bucket.put(known.all)
    kept, removed = (spoil(bucket, found) for found in known.records[:2])
    proxy = FaultProxy(bucket.server.endpoint)
    try:
        engine = start(known.model, bucket.entry(backend, endpoint=proxy.endpoint), extra=WAYS[way])
        metrics = metrics_of(engine, way)
        for number, key, removals in ((0, kept, 0), (1, removed, 1)):
            proxy.reset()
            if key == kept:
                proxy.script(Fault(Status(403, "AccessDenied"), "DELETE"), Fault(Status(403, "AccessDenied"), "POST"))
            answers = engine.ask([known.prompts[number]])
            known.check(answers, number)
            assert answers[0].reused < known.reuse
            engine.settle()
            assert (metrics.total("corrupt", "payload"), metrics.total("removals")) == (number + 1, removals)
            assert bucket.get(key) == known.all[key]
            conditions = [seen.headers.get("if-none-match") for seen in proxy.requests if seen.method == "PUT" and key.name in seen.path]
            # NIXL knows no condition: it replaces always.
            assert conditions == ["*" if backend == "s3fs" and key == removed else None]
        forget(engine, way)
        answers = engine.ask(known.prompts[:2])
        engine.stop()
    finally:
        proxy.stop()
    known.check(answers)
    assert [answer.reused for answer in answers] == [known.reuse] * 2


def test_an_engine_s_process_with_nixl_ends_by_itself(stored: Callable[[str, str], Stored], bucket: Bucket) -> None:
    """LIV-14: no thread and no library keeps it, and none crashes it on its way out."""
    known = stored("offloading", "llama")
    bucket.put(known.all)
    engine = EngineProcess(known.model, bucket.entry("nixl"), extra=WAYS["offloading"])
    try:
        answers = engine.ask(known.prompts[:1])
    finally:
        engine.stop()
    known.check(answers)
    assert answers[0].reused == known.reuse
    assert engine._process.returncode == 0
