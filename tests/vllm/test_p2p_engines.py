"""One engine computes, another one answers from its host memory: no file, no object store, nothing but the two of them."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import PROMPT_TOKENS, Answer, Engine, EngineProcess, reusable
from vllm_models import ModelShop, TinyModel, prompts
from vllm_p2p import WAYS, paths_of, peer_entry, serving_entry, tier_of

from kvstore_sdk.backend import Deadline, open_backend
from kvstore_sdk_backends.p2p import security

LIMIT_S = 60.0
FOR_EVER_S = 3600.0
"""Longer than a test may take: no wait of this length may run out in one."""
LOOKUPS = 200


class Prefill:
    """The engine that computes, in a process of its own, and what it answered."""

    def __init__(self, process: EngineProcess, way: str, model: TinyModel) -> None:
        self.process, self.way, self.model = process, way, model
        self.asked = prompts(3, PROMPT_TOKENS)
        # Whole chunks. Where all layers are full attention vLLM loads all of them, and computes the last token again.
        self.late = prompts(1, PROMPT_TOKENS // process.block_tokens * process.block_tokens, seed=2)
        self.unasked = prompts(1, PROMPT_TOKENS, seed=3)
        self.address = str(process.call("vllm_p2p:address"))
        before = set(self.names())
        self.answers = process.ask(self.asked[:2])
        process.send(settle=True)
        known = set(self.names())
        self.answers += process.ask(self.asked[2:])
        process.send(settle=True)
        self.of_last = sorted(set(self.names()) - known)
        assert before == set()
        assert [answer.reused for answer in self.answers] == [0, 0, 0]
        assert self.answers[0].differs(self.answers[1]) == float("inf"), "a model that answers everything alike proves nothing"

    def names(self) -> list[str]:
        return list(self.process.call("vllm_p2p:record_names"))

    def reuse(self, tokens: int = PROMPT_TOKENS) -> int:
        """All that can be reused of a prompt."""
        return reusable(tokens, self.process.block_tokens)

    def hint(self, wait_s: float = 0.0) -> dict[str, Any]:
        return {"kvstore": {"peer": self.address, "wait_s": wait_s}}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    """At most one, which imports vLLM once; the engines in it come and go."""
    running: list[EngineProcess] = []
    yield running
    for process in running:
        process.stop()


@pytest.fixture(scope="module", params=[f"{model}-{way}" for way in WAYS for model in ("llama", "gemma")])
def prefill(request: pytest.FixtureRequest, processes: list[EngineProcess], models: ModelShop) -> Prefill:
    name, _, way = request.param.partition("-")
    if processes:
        processes[0].restart(models(name), serving_entry(way), extra=WAYS[way])
    else:
        processes.append(EngineProcess(models(name), serving_entry(way), extra=WAYS[way]))
    return Prefill(processes[0], way, models(name))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session of who asks, which is in this process, is lost because one of the processes had to wait for a core for seconds."""
    monkeypatch.setattr(security, "_SILENCE_MS", 60_000)


@pytest.fixture
def decode(start: Callable[..., Engine], prefill: Prefill) -> Callable[..., Engine]:
    """Starts the engine that reads, in this process."""

    def begin(**options: Any) -> Engine:
        return start(prefill.model, peer_entry(**options), extra=WAYS[prefill.way])

    return begin


def differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    return [mine.differs(theirs) for mine, theirs in zip(answers, expected, strict=True)]


@pytest.mark.parametrize("data", ["nixl", "zmq"])
def test_decode_answers_from_the_host_memory_of_prefill(data: str, decode: Callable[..., Engine], prefill: Prefill) -> None:
    """All is reused that can be, tokens and log-probabilities are those that prefill computed. Without a word of the peer nothing is, nor
    where nobody listens: then nobody waits either."""
    engine = decode(data=data, peer_wait_s=FOR_EVER_S)
    answers = engine.ask(prefill.asked[:2], prefill.hint(FOR_EVER_S))
    loaded = tier_of(engine).metrics.total("loads", "loaded")
    paths = paths_of(engine)
    others = engine.ask(prefill.asked[2:])
    with socket.socket() as silent:
        # Bound and not listening: nobody else gets the port.
        silent.bind(("127.0.0.1", 0))
        nobody = {"kvstore": {"peer": f"127.0.0.1:{silent.getsockname()[1]}", "wait_s": FOR_EVER_S}}
        others += engine.ask(prefill.unasked, nobody)
    engine.stop()
    assert paths == [data]
    assert [answer.reused for answer in answers] == [prefill.reuse()] * 2
    assert differences(answers, prefill.answers[:2]) == [0.0, 0.0]
    assert loaded >= 2 * prefill.reuse() // engine.block_tokens
    assert [answer.reused for answer in others] == [0, 0]
    assert others[0].differs(prefill.answers[2]) == 0.0


def test_decode_that_is_asked_first_waits_and_computes_nothing(decode: Callable[..., Engine], prefill: Prefill) -> None:
    """The peer is asked for the prompt a second after decode was, and computes it then. Half of the engines are told of it as vLLM does."""
    host, _, port = prefill.address.rpartition(":")
    as_vllm = {"remote_prefiller": {"kv_request_id": "1", "remote_host": host, "remote_port": int(port)}}
    named = prefill.hint(FOR_EVER_S) if prefill.way == "tiering" else as_vllm
    engine = decode(data="zmq", peer_wait_s=FOR_EVER_S, lookup_timeout_s=0.5)
    waiting: list[bool] = []

    def ask_prefill() -> None:
        try:
            _until(engine.core.scheduler.has_requests)
            time.sleep(1.0)
            waiting.append(engine.core.scheduler.has_requests())
        finally:
            prefill.process.post(ask=prefill.late)

    asking = threading.Thread(target=ask_prefill)
    asking.start()
    try:
        (answer,) = engine.ask(prefill.late, named)
    finally:
        asking.join()
        (expected,) = prefill.process.answers()
    engine.stop()
    assert waiting == [True]
    assert expected.reused == 0
    tokens = len(prefill.late[0])
    assert answer.reused == (tokens if prefill.model.groups == 1 else prefill.reuse(tokens))
    assert answer.differs(expected) == 0.0


def test_wrong_bytes_of_a_peer_show_only_where_nobody_verifies(decode: Callable[..., Engine], prefill: Prefill) -> None:
    """Of one prompt the payload of one record is replaced. Verified, it is computed again; unverified, the answer is another one, or equal
    answers would prove nothing."""
    prefill.process.call("vllm_p2p:spoil", name=prefill.of_last[len(prefill.of_last) // 2])
    careful = decode(data="zmq")
    verified = careful.ask(prefill.asked[2:], prefill.hint())
    careful.stop()
    careless = decode(data="zmq", verify=False)
    unverified = careless.ask(prefill.asked[2:], prefill.hint())
    careless.stop()
    assert verified[0].reused < prefill.reuse()
    assert differences(verified, prefill.answers[2:]) == [0.0]
    assert unverified[0].reused == prefill.reuse()
    assert unverified[0].differs(prefill.answers[2]) > 0.0


@pytest.mark.parametrize("prefill", ["llama-tiering", "llama-offloading"], indirect=True)
@pytest.mark.parametrize("kind", ["torch", "python"])
def test_lookups_are_answered_inside_a_step_of_the_engine(
    kind: str, prefill: Prefill, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The step goes on until all of them have been answered, so none of them waited for its end."""
    known = prefill.process.call("vllm_p2p:identity")
    asker: Any = open_backend("p2p", {"peers": prefill.address, "data": "zmq", "answer_timeout_s": LIMIT_S}, location="127.0.0.1:0")
    try:
        asker.use_identity(known["namespace"], known["layout"])
        name = prefill.of_last[0]
        assert asker.exists([name], Deadline.after(LIMIT_S)) == [True]
        before = prefill.process.call("vllm_p2p:counters")["served_lookups"]
        prefill.process.call("vllm_p2p:slow_step", kind=kind, folder=str(tmp_path))
        prefill.process.post(ask=prompts(1, 40, seed=9))
        _until(lambda: (tmp_path / "inside").exists())
        took_s = []
        for number in range(LOOKUPS):
            # A name that nobody has asked for yet: what is known of a peer is not asked again.
            asked = [f"{name[:-8]}{number:08x}"]
            began_s = time.perf_counter()
            assert asker.exists(asked, Deadline.after(LIMIT_S)) == [False]
            took_s.append(time.perf_counter() - began_s)
            time.sleep(0.005)
        inside = not (tmp_path / "outside").exists()
    finally:
        (tmp_path / "stop").touch()
        asker.close()
    prefill.process.answers()
    served = prefill.process.call("vllm_p2p:counters")["served_lookups"] - before
    took_ms = sorted(1000 * seconds for seconds in took_s)
    record_property("lookup_ms_median", round(statistics.median(took_ms), 2))
    record_property("lookup_ms_p99", round(took_ms[int(0.99 * LOOKUPS)], 2))
    assert inside
    assert served >= LOOKUPS


@pytest.mark.parametrize("prefill", ["gemma-offloading"], indirect=True)
def test_decode_computes_when_prefill_dies_while_it_waits(
    decode: Callable[..., Engine], prefill: Prefill, processes: list[EngineProcess]
) -> None:
    """What it computed it has from then on, in memory of its own."""
    engine = decode(data="zmq", peer_wait_s=FOR_EVER_S)
    processes.remove(prefill.process)
    timer = threading.Timer(1.0, prefill.process.kill)
    timer.start()
    try:
        answers = engine.ask(prefill.unasked, prefill.hint(FOR_EVER_S))
    finally:
        timer.join()
        prefill.process.stop()
    engine.settle()
    engine.reset_device()
    again = engine.ask(prefill.unasked)
    engine.stop()
    assert [answer.reused for answer in answers + again] == [0, prefill.reuse()]
    assert differences(again, answers) == [0.0]


def _until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
