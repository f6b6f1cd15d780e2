"""Profile vllm: real engines on the CPU, with a small model of random weights, one after another in a process of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_sdk.cli.demo_engine import BLOCK_TOKENS, CHUNK_BYTES, TOLERANCE, VOCABULARY, Answer, Answers, difference, reusable_tokens
from kvstore_sdk.format import record_bytes
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.children import Child
from kvstore_sdk_conformance.failure import NotApplicable, require
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

PROMPTS, PROMPT_TOKENS = 3, 400
"""No whole number of blocks: at the end of the last one a known prompt leaves something to compute."""
ENGINE_S = 240.0
"""An engine takes some seconds, and its libraries as many to be imported; a busy machine may need many times that."""
SPOIL_EVERY = 3


class Engines:
    """Engines over the location of a store, in one process: also a store that no other process sees can be tested."""

    def __init__(self, store: Store, view: View, child: Child, model: str) -> None:
        self.child = child
        self.prompts = [[store.random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        self.chunks = sum(len(prompt) // BLOCK_TOKENS for prompt in self.prompts)
        self.possible = sum(map(reusable_tokens, self.prompts))
        self._store = store
        self._view = view
        self._model = model

    def run(self, what: str, wait_for_stores: int = 0) -> Answers:
        """Start an engine, let it answer the prompts, end it."""
        self._store.calls.append(f"# {what}")
        found = self.child.ask("run_engine", ENGINE_S, model=self._model, prompts=self.prompts, wait_for_stores=wait_for_stores)
        # For whoever removes what was stored here.
        self._view.names.update(self.child.ask("engine_names"))
        return Answers([Answer(**one) for one in found["answers"]], found["counted"])


@proves("KV-VLLM-01")
def test_an_engine_answers_from_what_another_stored(store: Store, view: View) -> None:
    with _engines(store, view) as engines:
        computed = engines.run("an engine computes and stores", engines.chunks).answers
        reuse = engines.run("another engine answers from the store")
        reused = sum(answer.reused_tokens for answer in reuse.answers)
        expected = f"all {engines.possible} tokens that can be reused to be loaded"
        require(reused == engines.possible, expected, f"{reused} that were", note=_counted(reuse))
        off = difference(computed, reuse.answers)
        require(off <= TOLERANCE, f"the same tokens, and log-probabilities within {TOLERANCE:g}", _shown(off), note=_counted(reuse))
        # Without this the answers might agree because this model gives one answer to everything.
        engines.child.ask("rotate_payloads")
        control = engines.run("control: another engine answers from wrong KV")
        if difference(computed, control.answers) <= TOLERANCE:
            raise RuntimeError(f"the answers do not depend on what is loaded, so the check proves nothing; {_counted(control)}")


@proves("KV-VLLM-02")
def test_an_engine_answers_right_when_records_went_bad(store: Store, view: View) -> None:
    with _engines(store, view) as engines:
        computed = engines.run("an engine computes and stores", engines.chunks).answers
        spoilt = engines.child.ask("flip_payload_bits", every=SPOIL_EVERY)
        found = engines.run(f"another engine answers, with {spoilt} records that went bad")
        off = difference(computed, found.answers)
        expected = f"the tokens, and within {TOLERANCE:g} the log-probabilities, of an engine that computes everything"
        require(off <= TOLERANCE, expected, _shown(off), note=_counted(found))
        corrupt = sum(value for name, _, value in found.counted if name == "corrupt")
        require(corrupt > 0, "records that went bad to be counted as corrupt", "none that was", note=_counted(found))


@contextmanager
def _engines(store: Store, view: View) -> Iterator[Engines]:
    needed = record_bytes(CHUNK_BYTES)
    if view.capabilities.max_record_bytes < needed:
        raise NotApplicable(f"the model of this check needs records of {needed} bytes")
    with tempfile.TemporaryDirectory(prefix="kvstore-conformance-model-") as folder:
        yield Engines(store, view, store.child(), f"{folder}/model")


def _counted(answers: Answers) -> str:
    return "the engine's tier counted: " + (", ".join(" ".join(map(str, row)) for row in answers.counted) or "nothing")


def _shown(off: float) -> str:
    return "other tokens" if off == float("inf") else f"a log-probability that is off by {off:.4f}"
