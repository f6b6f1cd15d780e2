"""A backend that misbehaves in every way under a real engine: right answers each time, and an end to everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_engines import Engine, Stored, fs_entry
from vllm_faulty import OPENED, faulty_entry
from vllm_records import is_good, record_paths

from kvstore_sdk.backend import Failure, GetResult, GetStatus, PutResult, PutStatus, TimedOutError
from kvstore_sdk.testing import (
    Action,
    Fault,
    Hang,
    InDoubt,
    Raise,
    ReadLate,
    Return,
    ReturnLate,
    Say,
    SwapRecords,
    WriteLate,
    WrongBytes,
    WrongSize,
)

SHORT = {
    "lookup_timeout_s": 0.3,
    "load_timeout_s": 0.5,
    "store_timeout_s": 0.5,
    "close_timeout_s": 1.0,
    "breaker_probe_s": 0.05,
    "retry_base_s": 0.01,
}

GET_FAULTS = {
    "raises": Raise(),
    "raises something odd": Raise(KeyboardInterrupt),
    "hangs": Hang(),
    "is slow": Hang(0.05),
    "returns late": ReturnLate(0.2),
    "lies that it read": Say(GetResult(GetStatus.FOUND)),
    "lies that nothing is there": Say(GetResult(GetStatus.MISSING)),
    "answers another type": Say(42),
    "loses answers": Return(lambda results: results[:-1]),
    "answers nothing": Return(lambda _: None),
    "says another size": WrongSize(-1),
    "changes bytes": WrongBytes(),
    "gives another record": SwapRecords(),
    "writes late, and says so": WriteLate(),
    "writes late, and says it read": WriteLate(answer=None),
    "is in doubt": InDoubt(0.1),
}
PUT_FAULTS = {
    "raises": Raise(),
    "hangs": Hang(),
    "returns late": ReturnLate(0.2),
    "lies that it stored": Say(PutResult(PutStatus.STORED)),
    "lost the answer": Say(PutResult(PutStatus.UNKNOWN), after=True),
    "loses answers": Return(lambda results: results[:-1]),
    "stores changed bytes": WrongBytes(),
    "stores less": WrongSize(-4096),
    "reads late": ReadLate(),
    "is in doubt": InDoubt(0.1),
}
LOOKUP_FAULTS = {
    "raises": Raise(),
    "hangs": Hang(),
    "returns late": ReturnLate(0.2),
    "lies that all is there": Say(True),
    "lies that nothing is": Say(False),
    "answers another type": Say("yes"),
    "times out": Say(Failure(TimedOutError("injected"))),
    "loses answers": Return(lambda results: results[:-1]),
}


# A real engine takes seconds: the others are for the long run.
OFTEN = {
    "raises",
    "hangs",
    "returns late",
    "lies that it read",
    "lies that it stored",
    "lies that all is there",
    "says another size",
    "stores less",
    "changes bytes",
    "stores changed bytes",
    "writes late, and says so",
    "writes late, and says it read",
    "reads late",
}


def cases(faults: Mapping[str, Action]) -> list[Any]:
    return [pytest.param(fault, id=name, marks=() if name in OFTEN else pytest.mark.long) for name, fault in faults.items()]


def stop_in_time(engine: Engine) -> None:
    started = time.monotonic()
    engine.stop()
    assert time.monotonic() - started < SHORT["close_timeout_s"] + 30.0


@pytest.mark.parametrize("fault", cases(GET_FAULTS))
def test_a_get_that_misbehaves_gives_right_answers(fault: Action, stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """INT-03, LIV-07, LIV-14, RACE-03: and what is written late is written into nobody's rows."""
    rule = Fault("get", fault, probability=0.5)
    script = [rule, Fault("get", InDoubt(), times=0)] if isinstance(fault, InDoubt) else [rule]
    engine = start(stored.model, faulty_entry(folder, *script, **SHORT))
    backend = OPENED[str(folder)]
    stored.check(engine.ask(stored.prompts[:4]))
    assert backend.fired(rule) > 0
    engine.settle()
    rows = np.asarray(engine.manager.primary_tier.get_kv_memoryview())
    before = rows.copy()
    backend.release()
    assert backend.wait_late()
    assert (rows == before).all(), "what came late reached a row that is in use"
    del rows
    backend.heal()
    # Whatever was found bad meanwhile is stored again: the same prompts, and others, are answered right.
    stored.check(engine.ask(stored.prompts))
    engine.settle()
    stop_in_time(engine)
    assert all(is_good(key, path) for key, path in record_paths(folder).items())


@pytest.mark.parametrize("fault", cases(PUT_FAULTS))
def test_a_put_that_misbehaves_gives_right_answers(fault: Action, stored: Stored, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """INT-02, INT-04, RACE-03: what a bad put left behind is found out when it is loaded, and repaired."""
    folder = tmp_path / "kv"
    # Few enough that most of what is read later is right: a host that finds most of it wrong would suspect itself, and repair nothing.
    rule = Fault("put", fault, names=lambda name: name.split("/")[2].endswith(("0", "8")))
    script = [rule, Fault("put", InDoubt(), times=0)] if isinstance(fault, InDoubt) else [rule]
    engine = start(stored.model, faulty_entry(folder, *script, **SHORT))
    backend = OPENED[str(folder)]
    stored.check(engine.ask(stored.prompts[:4]))
    assert backend.fired(rule) > 0
    engine.settle()
    backend.release()
    assert backend.wait_late()
    stop_in_time(engine)
    again = start(stored.model, fs_entry(folder))
    stored.check(again.ask(stored.prompts))
    again.settle()
    stop_in_time(again)
    assert all(is_good(key, path) for key, path in record_paths(folder).items())


@pytest.mark.parametrize("fault", cases(LOOKUP_FAULTS))
def test_a_look_up_that_misbehaves_gives_right_answers(fault: Action, stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """LIV-02, RACE-11: a HIT that is none costs a load and no more."""
    rule = Fault("exists", fault, probability=0.5)
    engine = start(stored.model, faulty_entry(folder, rule, **SHORT))
    backend = OPENED[str(folder)]
    for path in [path for key, path in record_paths(folder).items() if key in stored.keys[0]]:
        path.unlink()
    stored.check(engine.ask(stored.prompts[:4]))
    assert backend.fired(rule) > 0
    backend.heal()
    stored.check(engine.ask(stored.prompts))
    engine.settle()
    stop_in_time(engine)


def test_a_store_that_is_gone_costs_next_to_nothing_and_comes_back(stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """LIV-11: the breaker opens; once the store is back, so are the hits."""
    engine = start(stored.model, faulty_entry(folder, Fault("*", Raise()), **SHORT | {"breaker_probe_s": 0.3, "breaker_failures": 3}))
    backend = OPENED[str(folder)]
    stored.check(engine.ask(stored.prompts[:4]))
    engine.settle()
    assert engine.metrics.total("breaker_opened", "read") >= 1
    calls = len(backend.log)
    started = time.monotonic()
    answers = engine.ask(stored.prompts[4:6])
    stored.check(answers, first=4)
    assert [answer.reused for answer in answers] == [0, 0]
    # Some for each trial.
    assert len(backend.log) - calls < 20 + 4 * (time.monotonic() - started) / 0.3
    backend.heal()
    time.sleep(0.4)
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        (answer,) = engine.ask(stored.prompts[6:7])
        if answer.reused == stored.reuse:
            break
        # The first look-up was the trial; the rest of its request did not wait for it.
        engine.settle()
        engine.reset_own_caches()
        time.sleep(0.1)
    assert answer.reused == stored.reuse
    stop_in_time(engine)
