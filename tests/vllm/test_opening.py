"""LIV-18. A start ends in time, whatever a backend does before the engine runs, and says which step of which backend it was."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import vllm_faulty
from vllm_stand import Stand

from kvstore_sdk.backend import Backend, BackendError, Region, TimedOutError
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.vllm import opening
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.spec import KVStoreTieringSpec
from kvstore_sdk_backends.memory import open_memory

LIMIT_S = 20.0
SPECS: dict[str, tuple[type[Any], Mapping[str, Any]]] = {
    "vLLM's host memory": (KVStoreTieringSpec, {}),
    "our own": (KVStoreOffloadingSpec, {"cpu_bytes_to_use": 1 << 20}),
}


class Agent(BackendWrapper):
    """Waits for peers that do not come, or fails, in the steps that are named."""

    def __init__(self, inner: Backend, steps: Mapping[str, BaseException | None]) -> None:
        super().__init__(inner)
        self.steps = steps
        self.go_on = threading.Event()
        self.called: list[str] = []
        self.closed = threading.Event()

    def do(self, step: str) -> None:
        self.called.append(step)
        if step not in self.steps:
            return
        if (error := self.steps[step]) is not None:
            raise error
        assert self.go_on.wait(LIMIT_S)

    def register_region(self, region: Region) -> None:
        self.do("register_region")

    def unregister_region(self, region: Region) -> None:
        self.called.append("unregister_region")

    def close(self) -> None:
        self.do("close")
        self.closed.set()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Agent]]:
    """Makes the backend of the next start."""
    made: list[Agent] = []

    def make(**steps: BaseException | None) -> Agent:
        made.append(Agent(open_memory(""), steps))

        def open_agent(location: str) -> Backend:
            made[-1].do("open")
            return made[-1]

        monkeypatch.setattr(vllm_faulty, "open_faulty", open_agent)
        return made[-1]

    yield make
    for one in made:
        one.go_on.set()
    for thread in threading.enumerate():
        if "open_faulty" in thread.name:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def start(stand: Callable[..., Stand], spec: str, **options: Any) -> Stand:
    spec_class, extra = SPECS[spec]
    entry = {"type": "kvstore", "backend": "vllm_faulty:open_faulty", "location": "", "start_timeout_s": 0.2, "close_timeout_s": 0.2}
    return stand([entry | options], spec_class=spec_class, extra=extra)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", ["open", "register_region"])
def test_a_step_that_never_returns_ends_the_start_by_name(
    step: str, spec: str, agent: Callable[..., Agent], stand: Callable[..., Stand]
) -> None:
    backend = agent(**{step: None})
    began = time.monotonic()
    with pytest.raises(TimedOutError, match=rf"kvstore.*: backend vllm_faulty:open_faulty: {step} did not return within 0\.2 s") as caught:
        start(stand, spec)
    assert time.monotonic() - began < LIMIT_S / 2
    assert "start_timeout_s" in str(caught.value)
    assert not backend.closed.is_set()
    # It comes back after all: nobody wants it any more, and it is told of no memory.
    backend.go_on.set()
    assert backend.closed.wait(LIMIT_S)
    assert ("register_region" in backend.called) == (step == "register_region")


@pytest.mark.parametrize("spec", SPECS)
def test_a_close_that_never_returns_does_not_hide_why_the_start_failed(
    spec: str, agent: Callable[..., Agent], stand: Callable[..., Stand], caplog: pytest.LogCaptureFixture
) -> None:
    agent(register_region=RuntimeError("no RDMA"), close=None)
    with caplog.at_level(logging.ERROR, "kvstore_sdk"), pytest.raises(BackendError, match="register_region raised RuntimeError: no RDMA"):
        start(stand, spec, start_timeout_s=LIMIT_S)
    assert "close did not return within 0.2 s" in caplog.text


@pytest.mark.parametrize("step", ["open", "register_region"])
def test_an_exit_of_vendor_code_is_an_error_of_its_step(step: str, agent: Callable[..., Agent], stand: Callable[..., Stand]) -> None:
    agent(**{step: SystemExit("hunter2"), "close": SystemExit()})
    with pytest.raises(BackendError, match=f"{step} raised SystemExit$"):
        start(stand, "our own", start_timeout_s=LIMIT_S)


def test_a_slow_start_says_for_what_it_waits(
    agent: Callable[..., Agent], stand: Callable[..., Stand], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_SAY_AFTER_S", 0.05)
    backend = agent(register_region=None)
    said = "the start waits for register_region to return, for 20 s at most"

    def go_on() -> None:
        until_s = time.monotonic() + LIMIT_S / 2
        while said not in caplog.text and time.monotonic() < until_s:
            time.sleep(0.01)
        backend.go_on.set()

    late = threading.Thread(target=go_on)
    late.start()
    with caplog.at_level(logging.INFO, "kvstore_sdk"):
        start(stand, "our own", start_timeout_s=LIMIT_S)
    late.join()
    assert said in caplog.text


def test_memory_that_a_lost_call_was_told_of_stays_mapped(agent: Callable[..., Agent], stand: Callable[..., Stand]) -> None:
    agent(register_region=None)
    with pytest.raises(TimedOutError):
        start(stand, "our own")
    [*_, kept] = opening._kept_mapped
    assert bytes(kept[:8]) == bytes(8), "the scheduler's side closed the region"


@pytest.mark.parametrize(
    ("spec", "serve_bytes", "silent"), [("vLLM's host memory", 0, False), ("vLLM's host memory", 1 << 20, True), ("our own", 0, True)]
)
def test_a_node_that_serves_nothing_says_so_at_the_start(
    spec: str, serve_bytes: int, silent: bool, stand: Callable[..., Stand], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zmq")
    spec_class, extra = SPECS[spec]
    entry = {"type": "kvstore", "backend": "p2p", "location": "127.0.0.1:0", "data": "zmq", "serve_bytes": serve_bytes}
    with caplog.at_level(logging.INFO, "kvstore_sdk"):
        stand([entry], spec_class=spec_class, extra=extra)
    said = [text for text in caplog.messages if "serves nothing: it only asks" in text]
    assert len(said) == (0 if silent else 1)
    assert silent or "serve_bytes" in said[0]
