"""Requests side by side in a real engine, step by step, and what they must leave behind: nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_engines import TOKENS, Answer, Engine

from kvstore_sdk.vllm.offloading import device
from kvstore_sdk.vllm.offloading.copies import Copies

_names = itertools.count()


class Batch:
    """Requests of one engine, any number at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vllm = engine._llm.llm_engine
        self._open: set[str] = set()
        self.answers: dict[str, Answer] = {}

    def add(self, prompt: Sequence[int], tokens: int = TOKENS) -> str:
        """Begin a request, which is answered with exactly so many tokens. Returns its name."""
        from vllm import SamplingParams

        name = f"asked-{next(_names)}"
        parameters = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, logprobs=3, ignore_eos=True)
        self._vllm.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        self._open.add(name)
        return name

    def abort(self, name: str) -> None:
        """End a request before it is answered."""
        self._vllm.abort_request([name])
        self._open.discard(name)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self._vllm.step():
                if output.finished:
                    self._open.discard(output.request_id)
                    self.answers[output.request_id] = _answer(output)

    def step_until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Step until something is so."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(f"it is not so after {timeout_s} s")
            self.step()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Step until every request is answered."""
        self.step_until(lambda: not self._open, timeout_s)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Answer]:
        """Answers to prompts that are asked all at once."""
        names = [self.add(prompt, tokens) for prompt in prompts]
        self.step_until(lambda: self._open.isdisjoint(names), 60.0)
        return [self.answers[name] for name in names]

    def ask_each(self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Answer]:
        """Answers to prompts that are asked one after another."""
        return [self.ask([prompt], tokens)[0] for prompt in prompts]


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    logprobs = tuple(tuple(sorted((token, found.logprob) for token, found in step.items())) for step in completion.logprobs)
    return Answer(output.num_cached_tokens or 0, tuple(completion.token_ids), logprobs)


def left_over(engine: Engine) -> dict[str, int]:
    """What requests that are over have left behind in an engine that has settled, by name; empty when that is nothing."""
    manager, store = engine.manager, engine.store
    host, stats = store.host, store.host.stats()
    groups = stats.groups.values()
    transfers, promotions, cascades = store._transfers, store._promotions, store._cascades
    found = {
        "pinned slots": sum(group.pinned for group in groups),
        "filling slots": sum(group.filling for group in groups),
        "quarantined slots": sum(group.quarantined for group in groups),
        "lost slots": sum(group.used - group.quarantined for group in groups) - len(host),
        "background bytes": stats.background_bytes,
        "double releases": stats.double_releases + store.metrics.total("double_releases"),
        "requests": len(store._requests),
        "holding requests": len(store._holds),
        "stores": len(transfers._stores),
        "loads": len(transfers._loads),
        "promotions": len(promotions._open) + len(promotions._queue) + sum(map(len, promotions._jobs)) + promotions.quarantined,
        "cascades": cascades.bytes + cascades.held + sum(map(len, cascades._jobs)) + sum(cascades._shares.used_bytes),
        "tables of the manager": len(manager._writing),
        "jobs of vLLM": len(engine.core.scheduler.connector.connector_scheduler._jobs),
        **{f"faults of {part}": store.metrics.total("faults", part) for part in ("tier", "host", "seal")},
    }
    return {name: int(value) for name, value in found.items() if value}


def settled(engine: Engine) -> dict[str, int]:
    """What is left over once the engine and its tiers have ended what they do."""
    engine.settle()
    until_s = time.monotonic() + 5.0
    while (found := left_over(engine)) and time.monotonic() < until_s:
        engine.core.step_fn()
        # vLLM lets an engine without requests rest. What comes back by then is heard of with its next step, which begins with this.
        engine.store.poll()
    return found


def forget_host(engine: Engine) -> None:
    """Drop every chunk from host memory, as eviction does. Tiers are not told."""
    host = engine.store.host
    for key in list(host._chunks.slots):
        assert host.remove(key)
    engine.reset_device()


class LateMover(device.HostMover):
    """Copies as late as may be: when asked for the fourth time whether it is done, or when waited for. So does a busy device."""

    POLLS = 4

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._started: dict[bool, list[_LateMotion]] = {True: [], False: []}

    def close(self) -> None:
        for motions in self._started.values():
            if motions:
                motions[-1].wait()
        super().close()

    def _copy(self, copies: Copies, *, store: bool) -> Any:
        return _LateMotion(lambda: super(LateMover, self)._copy(copies, store=store), self._started[store])


class _LateMotion:
    def __init__(self, copy: Callable[[], Any], started: list[_LateMotion]) -> None:
        self._copy, self._started, self._polls, self._over = copy, started, 0, False
        started.append(self)

    def done(self) -> bool:
        self._polls += 1
        if not self._over and self._polls >= LateMover.POLLS:
            self.wait()
        return self._over

    def wait(self) -> None:
        # What was started in one direction ends in that order.
        while not self._over:
            first = self._started.pop(0)
            first._copy()
            first._over = True

    def seconds(self) -> float:
        return 0.0
