"""A backend that misbehaves below our own host memory, under a real engine: right answers each time, and an end to everything."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_batches import Batch, forget_host, settled
from vllm_engines import PROMPT_TOKENS, Answer, Engine, fs_entry, reusable
from vllm_faulty import OPENED, faulty_entry
from vllm_models import ModelShop, TinyModel, prompts
from vllm_records import is_good, record_paths

from kvstore_sdk.backend import GetResult, GetStatus, PutResult, PutStatus
from kvstore_sdk.host import SlotState
from kvstore_sdk.testing import Action, Fault, Hang, InDoubt, Raise, ReadLate, Return, ReturnLate, Say, SwapRecords, WrongBytes, WrongSize

EXTRA = {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": 1}
SHORT = {
    "lookup_timeout_s": 0.3,
    "load_timeout_s": 0.5,
    "store_timeout_s": 0.5,
    "close_timeout_s": 1.0,
    "breaker_probe_s": 0.05,
    "retry_base_s": 0.01,
}
PROMPTS = 6

# What breaks the contract by writing into buffers after a call has returned is left to vLLM's own host memory, where records are checked in
# memory that no backend knows: see the architecture's chapter on memory.
GET_FAULTS = {
    "raises": Raise(),
    "raises something odd": Raise(KeyboardInterrupt),
    "hangs": Hang(),
    "returns late": ReturnLate(0.2),
    "lies that it read": Say(GetResult(GetStatus.FOUND)),
    "lies that nothing is there": Say(GetResult(GetStatus.MISSING)),
    "answers another type": Say(42),
    "loses answers": Return(lambda results: results[:-1]),
    "says another size": WrongSize(-1),
    "changes bytes": WrongBytes(),
    "gives another record": SwapRecords(),
    "is in doubt": InDoubt(0.1),
}
PUT_FAULTS = {
    "raises": Raise(),
    "hangs": Hang(),
    "returns late": ReturnLate(0.2),
    "lies that it stored": Say(PutResult(PutStatus.STORED)),
    "lost the answer": Say(PutResult(PutStatus.UNKNOWN), after=True),
    "stores changed bytes": WrongBytes(),
    "stores less": WrongSize(-4096),
    "reads late": ReadLate(),
    "is in doubt": InDoubt(0.1),
}
LOOKUP_FAULTS = {
    "raises": Raise(),
    "hangs": Hang(),
    "lies that all is there": Say(True),
    "lies that nothing is": Say(False),
    "loses answers": Return(lambda results: results[:-1]),
}
# A real engine takes seconds: the others are for the long run.
OFTEN = {
    "hangs",
    "lies that it read",
    "lies that it stored",
    "lies that all is there",
    "changes bytes",
    "gives another record",
    "stores changed bytes",
    "is in doubt",
}


def cases(faults: Mapping[str, Action]) -> list[Any]:
    return [pytest.param(fault, id=name, marks=() if name in OFTEN else pytest.mark.long) for name, fault in faults.items()]


@dataclass(frozen=True)
class Known:
    """What an engine of ours stored in a folder, and what it answered."""

    model: TinyModel
    folder: Path
    prompts: list[list[int]]
    answers: list[Answer]

    def check(self, answers: list[Answer]) -> None:
        """Assert that these are the right answers to the first prompts."""
        expected = self.answers[: len(answers)]
        assert [found.differs(answer) for found, answer in zip(answers, expected, strict=True)] == [0.0] * len(answers)


@pytest.fixture(scope="module")
def known(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder, asked = tmp_path_factory.mktemp("known") / "kv", prompts(PROMPTS, PROMPT_TOKENS)
    engine = Engine(models("llama"), fs_entry(folder), extra=EXTRA)
    try:
        answers = Batch(engine).ask_each(asked)
        engine.settle()
    finally:
        engine.stop()
    return Known(models("llama"), folder, asked, answers)


def script_of(rule: Fault) -> list[Fault]:
    # Capabilities do not change while a backend is open.
    return [rule, Fault(rule.op, InDoubt(), times=0)] if isinstance(rule.action, InDoubt) else [rule]


def stop_in_time(engine: Engine) -> None:
    started = time.monotonic()
    engine.stop()
    assert time.monotonic() - started < SHORT["close_timeout_s"] + 30.0


def chunks_of(engine: Engine) -> dict[bytes, bytes]:
    """Every chunk that host memory holds, byte for byte."""
    host = engine.store.host
    slots = [slot for slot in host._chunks.slots.values() if slot.state is SlotState.READY]
    return {slot.key: bytes(host.record(slot.number).view) for slot in slots}


@pytest.mark.parametrize("fault", cases(GET_FAULTS))
def test_a_get_that_misbehaves_gives_right_answers(fault: Action, known: Known, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """INT-03, LIV-07, LIV-14, RACE-03: and what is late reaches no chunk that is in use."""
    folder = Path(shutil.copytree(known.folder, tmp_path / "kv"))
    rule = Fault("get", fault, probability=0.5)
    engine = start(known.model, faulty_entry(folder, *script_of(rule), **SHORT), extra=EXTRA)
    backend, batch = OPENED[str(folder)], Batch(engine)
    known.check(batch.ask_each(known.prompts[:2]))
    known.check(batch.ask(known.prompts[:4]))
    assert backend.fired(rule) > 0
    engine.settle()
    before = chunks_of(engine)
    backend.heal()
    assert backend.wait_late()
    assert settled(engine) == {}
    assert chunks_of(engine) == before, "what came late reached a chunk that is in use"
    # Whatever was found bad meanwhile is stored again: the same prompts, and others, are answered right.
    engine.reset_device()
    known.check(batch.ask(known.prompts))
    assert settled(engine) == {}
    stop_in_time(engine)
    assert all(is_good(key, path) for key, path in record_paths(folder).items())


@pytest.mark.parametrize("fault", cases(PUT_FAULTS))
def test_a_put_that_misbehaves_gives_right_answers(fault: Action, known: Known, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """INT-02, INT-04, RACE-03: what a bad put left behind is found out when it is loaded, and repaired."""
    folder = tmp_path / "kv"
    # Few enough that most of what is read later is right: a host that finds most of it wrong would suspect itself, and repair nothing.
    rule = Fault("put", fault, names=lambda name: name.split("/")[2].endswith(("0", "8")))
    engine = start(known.model, faulty_entry(folder, *script_of(rule), **SHORT), extra=EXTRA)
    backend, batch = OPENED[str(folder)], Batch(engine)
    known.check(batch.ask(known.prompts))
    assert backend.fired(rule) > 0
    engine.settle()
    backend.release()
    assert backend.wait_late()
    assert settled(engine) == {}
    forget_host(engine)
    known.check(batch.ask_each(known.prompts[:3]))
    stop_in_time(engine)
    again = start(known.model, fs_entry(folder), extra=EXTRA)
    batch = Batch(again)
    known.check(batch.ask_each(known.prompts))
    assert settled(again) == {}
    forget_host(again)
    answers = batch.ask_each(known.prompts)
    stop_in_time(again)
    known.check(answers)
    assert [answer.reused for answer in answers] == [reusable(PROMPT_TOKENS, known.model.block_tokens)] * PROMPTS
    assert all(is_good(key, path) for key, path in record_paths(folder).items())


@pytest.mark.parametrize("fault", cases(LOOKUP_FAULTS))
def test_a_look_up_that_misbehaves_gives_right_answers(fault: Action, known: Known, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """LIV-02, RACE-11: a HIT that is none costs a load and no more."""
    folder = Path(shutil.copytree(known.folder, tmp_path / "kv"))
    for path in list(record_paths(folder).values())[::5]:
        path.unlink()
    rule = Fault("exists", fault, probability=0.5)
    engine = start(known.model, faulty_entry(folder, rule, **SHORT), extra=EXTRA)
    backend, batch = OPENED[str(folder)], Batch(engine)
    known.check(batch.ask(known.prompts[:4]))
    assert backend.fired(rule) > 0
    backend.heal()
    assert settled(engine) == {}
    forget_host(engine)
    known.check(batch.ask(known.prompts))
    assert settled(engine) == {}
    stop_in_time(engine)
