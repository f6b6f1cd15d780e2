"""A vLLM engine with one tier, told what to do line by line: `python isolation_engine_child.py SETUP`, SETUP a JSON object
{"model": fields of a TinyModel, "entry": of the tier, "way": one of `WAYS`}.

A question is {"op": "load"|"store", "bytes_per_token"}; the answer {"MB/s": payload loaded or stored until the last of it was, "tokens/s":
that the requests beside it got until all was done, "moved_bytes"}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "vllm"))

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)

from child import serve  # noqa: E402
from vllm_batches import Batch, forget_host  # noqa: E402
from vllm_engines import Engine  # noqa: E402
from vllm_models import TinyModel, prompts  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "vLLM's host memory": {"cpu_bytes_to_use": 256 << 20, "blocks_per_chunk": 1},
    "our host memory": {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 256 << 20, "blocks_per_chunk": 1},
}
PROMPT_TOKENS = 405
KNOWN, NEW = 8, 4
"""Prompts of a load, and of a store."""
BESIDE = 2
"""Requests that are decoding all the time, so that the engine steps whatever the tier does."""
BESIDE_TOKENS = 250
LIMIT_S = 120.0


class Driver:
    """Loads and stores beside requests that decode."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._offloading = "spec" in WAYS[setup["way"]]
        model = TinyModel(**setup["model"] | {"path": Path(setup["model"]["path"])})
        self._engine = Engine(model, setup["entry"], extra=WAYS[setup["way"]])
        self._seeds = itertools.count(1000)
        self._known = prompts(KNOWN, PROMPT_TOKENS)
        self._tokens_in_chunks = PROMPT_TOKENS // self._engine.block_tokens * self._engine.block_tokens
        Batch(self._engine).ask(self._known)
        self._engine.settle(LIMIT_S)

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        engine, batch = self._engine, Batch(self._engine)
        loads = question["op"] == "load"
        if loads and self._offloading:
            forget_host(engine)
        elif loads:
            engine.reset_own_caches()
        asked = self._known if loads else prompts(NEW, PROMPT_TOKENS, seed=next(self._seeds))
        before = self._moved(loads)
        started = time.perf_counter()
        for prompt in prompts(BESIDE, 30, seed=next(self._seeds)):
            batch.add(prompt, BESIDE_TOKENS)
        names = [batch.add(prompt, 1) for prompt in asked]
        wanted_bytes = len(asked) * self._tokens_in_chunks
        while not all(name in batch.answers for name in names) or not (loads or self._stored(before, question, wanted_bytes)):
            batch.step()
            if time.perf_counter() - started > LIMIT_S:
                raise TimeoutError("it does not end")
        seconds = time.perf_counter() - started
        moved_bytes = self._moved(loads) - before
        batch.finish(LIMIT_S)
        all_seconds = time.perf_counter() - started
        engine.settle(LIMIT_S)
        return {"MB/s": moved_bytes / 1e6 / seconds, "tokens/s": BESIDE * BESIDE_TOKENS / all_seconds, "moved_bytes": moved_bytes}

    def _stored(self, before: float, question: dict[str, Any], tokens: int) -> bool:
        return self._moved(False) - before >= question["bytes_per_token"] * tokens

    def _moved(self, loads: bool) -> float:
        metrics = self._engine.store._tiers[0].tier.metrics if self._offloading else self._engine.metrics
        return float(metrics.total("load_bytes" if loads else "store_bytes"))

    def stop(self) -> None:
        self._engine.stop()


def main() -> None:
    # vLLM may print.
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver(json.loads(sys.argv[1]))
    serve(driver.answer, to)
    driver.stop()


if __name__ == "__main__":
    main()
