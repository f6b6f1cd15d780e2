"""Engines that are peers. The functions that take an engine are also called in processes of their own, by name: `EngineProcess.call`."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from vllm_engines import OURS, PATIENT, Engine

from kvstore_sdk.format import HEADER_BYTES
from kvstore_sdk.keys import ChunkKey

WAYS = {"tiering": {}, "offloading": {"spec": OURS}}
"""Both ways into vLLM -> the further arguments of an engine's connector."""

LONGEST_STEP_S = 120.0


def serving_entry(way: str, **options: Any) -> dict[str, Any]:
    """Of a node that others read from: what vLLM's host memory has it keeps a copy of, the SDK's own is served where it is."""
    return peer_entry(**({"serve_bytes": 64 << 20} if way == "tiering" else {}), **options)


def peer_entry(**options: Any) -> dict[str, Any]:
    """Of a node that reads from whom a request names. There is nothing else: no file, no object, no list of peers."""
    return {"type": "kvstore", "backend": "p2p", "location": "127.0.0.1:0", "answer_timeout_s": 20.0, **PATIENT, **options}


def backend_of(engine: Engine) -> Any:
    """The `P2PBackend` of an engine's only tier."""
    return tier_of(engine)._backend


def tier_of(engine: Engine) -> Any:
    tiers = getattr(engine.manager, "secondary_tiers", None)
    return engine.tier if tiers else engine.manager._open.tiers[0].tier


def address(engine: Engine) -> str:
    """Where its node listens."""
    return str(backend_of(engine).address)


def paths_of(engine: Engine) -> list[str]:
    """Which way records take from each of the peers that it is connected to."""
    return [peer.link.welcome.path for peer in backend_of(engine)._peers.all() if peer.link is not None]


def counters(engine: Engine) -> dict[str, int]:
    """What its node counts."""
    return dict(backend_of(engine).counters())


def record_names(engine: Engine) -> list[str]:
    """What its node serves."""
    shelf = backend_of(engine)._node.shelf
    if shelf is not None:
        return list(shelf._records)
    namespace = engine.store.identity.namespace
    return [ChunkKey.from_engine(namespace, key).name for key in engine.store.host._slots]


def spoil(engine: Engine, name: str) -> None:
    """Replace the payload of a record where it lies, and leave its header: the checksum is that of what was there."""
    for source in backend_of(engine)._node._sources:
        (loan,) = source.lend([name])
        if loan is not None:
            assert loan.seal()
            payload = loan.buffer.view[HEADER_BYTES:]
            payload[:] = random.Random(name).randbytes(len(payload))
            source.give_back([loan])
            return
    raise AssertionError(f"{name} is not there")


def identity(engine: Engine) -> dict[str, str]:
    found = tier_of(engine).identity
    return {"namespace": found.namespace, "layout": found.layout}


def slow_step(engine: Engine, kind: str, folder: str) -> None:
    """Make the engine's next step a long one: it makes `inside` in the folder, computes until there is `stop`, and for 2 s at least."""
    work, here = {"torch": _multiply, "python": _count}[kind], Path(folder)

    def patch(worker: Any) -> None:
        runner = worker.model_runner
        execute = runner.execute_model

        def slowly(*arguments: Any, **options: Any) -> Any:
            runner.execute_model = execute
            began_s = time.monotonic()
            (here / "inside").touch()
            while (passed_s := time.monotonic() - began_s) < 2.0 or not (here / "stop").exists():
                if passed_s > LONGEST_STEP_S:
                    break
                work()
            (here / "outside").touch()
            return execute(*arguments, **options)

        runner.execute_model = slowly

    engine._llm.collective_rpc(patch)


def _multiply() -> None:
    import torch

    matrix = torch.ones(1024, 1024)
    for _ in range(4):
        matrix = matrix @ matrix * 1e-3


def _count() -> None:
    """Holds the interpreter, but for what it gives others by itself, for some 100 ms."""
    until_s = time.monotonic() + 0.1
    while time.monotonic() < until_s:
        sum(number * number for number in range(2000))
