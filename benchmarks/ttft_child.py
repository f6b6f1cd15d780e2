"""A vLLM engine that answers one prompt at a time, told what to do line by line: `python ttft_child.py SETUP`, SETUP a JSON object
{"model": fields of a TinyModel, "tiers": entries of tiers, or null for an engine that offloads nothing, "extra": for its connector}.

A question is one of
- {"op": "store", "prompt"}: compute it and wait until every tier has stored it;
- {"op": "first_token", "prompt", "keep", "peer"}: answer it, after it was forgotten in the engine's own cache and in host memory, but with
  `keep` "host" not in host memory, and with "device" nowhere; `peer` is where a request says its KV is, or null. The answer is {"seconds",
  "reused", "token", "logprobs", "steps"};
- {"op": "address"}: where its peer-to-peer node listens;
- {"op": "cpu_s"}: what its process and its threads have used.
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
    # As vLLM has it on two cores: it keeps one for whatever else an engine does.
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)

from child import serve  # noqa: E402
from vllm_batches import forget_host  # noqa: E402
from vllm_engines import Engine  # noqa: E402
from vllm_models import TinyModel  # noqa: E402
from vllm_p2p import address  # noqa: E402

LIMIT_S = 60.0
YIELD_S = 0.001
"""What vLLM's own engine process sleeps after a step in which nothing was computed: threads that move bytes go on meanwhile."""
AFTER = 3
"""Steps of an engine that has nothing to do, after each request."""
LIKELIEST = 20
"""Tokens whose log-probabilities an answer says: as many as vLLM tells by default."""


class Driver:
    """One engine, and the questions to it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._offloads = setup["tiers"] is not None
        self._own_host = "spec" in setup["extra"]
        model = TinyModel(**setup["model"] | {"path": Path(setup["model"]["path"])})
        self._engine = Engine(model, setup["tiers"], extra=setup["extra"])
        self._vllm = self._engine._llm.llm_engine
        self._names = itertools.count()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "store":
            found = self._ask(question["prompt"], None)
            if self._offloads:
                self._engine.settle(LIMIT_S)
            return found
        if question["op"] == "first_token":
            self._forget(question["keep"])
            return self._ask(question["prompt"], question["peer"])
        return {"address": address(self._engine)} if question["op"] == "address" else {"cpu_s": time.process_time()}

    def _forget(self, keep: str) -> None:
        if keep == "device":
            return
        if keep == "host" or not self._offloads:
            self._engine.reset_device()
        elif self._own_host:
            forget_host(self._engine)
        else:
            self._engine.reset_own_caches()

    def _ask(self, prompt: list[int], peer: str | None) -> dict[str, Any]:
        from vllm import SamplingParams

        more = {} if peer is None else {"extra_args": {"kv_transfer_params": {"kvstore": {"peer": peer, "wait_s": 0.0}}}}
        parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprobs=LIKELIEST, ignore_eos=True, **more)
        steps = 0
        started_s = time.perf_counter()
        self._vllm.add_request(f"asked-{next(self._names)}", {"prompt_token_ids": prompt}, parameters)
        while True:
            outputs = self._vllm.step()
            steps += 1
            if outputs:
                break
            if time.perf_counter() - started_s > LIMIT_S:
                raise TimeoutError(f"no token after {LIMIT_S} s")
            time.sleep(YIELD_S)
        seconds = time.perf_counter() - started_s
        # What a request leaves behind is put away in the steps after it, and would answer the next one's look-ups.
        for _ in range(AFTER):
            self._vllm.step()
        (output,) = outputs
        (completion,) = output.outputs
        likeliest = {str(token): found.logprob for token, found in completion.logprobs[0].items()}
        return {
            "seconds": seconds,
            "steps": steps,
            "reused": output.num_cached_tokens or 0,
            "token": completion.token_ids[0],
            "logprobs": likeliest,
        }

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
