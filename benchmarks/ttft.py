"""Time to the first token of a prompt whose KV is in a tier, beside computing it: `python benchmarks/ttft.py --folder /mnt/disk`.

Each side is a vLLM engine on the CPU in a process of its own, with the same model of random weights, whose prompt of 900 tokens takes a
second and more to compute. In each round every engine computes the same new prompt and stores it, untimed. Then each side is timed twice,
in random order: it forgets the prompt in its own cache, and in host memory unless that is what is measured, and answers with one token.
A look-up is asked of the store each time, also where ours would know the answer. Every answer must reuse all that vLLM can, and be the one
that was computed. Shorter prompts say from which length on a tier pays.

It needs vLLM, for `s3` the extra of that name and moto's server, and some 2.5 GiB of memory an engine, of which the default sides have
seven; it takes some 5 minutes. Files go below the folder, with direct I/O.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from child import Child
from harness import add_outputs, filesystem_of, machine_facts
from targets import judge
from ttft_report import Times, break_even_section, plot, ratio, side_section

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path += [str(TESTS / "vllm"), str(TESTS / "backends" / "s3")]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 32, 1024, 16, 4, 64
BLOCK_TOKENS = 32
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_SIZE * 2 * 2
"""32 KiB, as of Llama 3.2 1B. A chunk of one block is 1 MiB."""
BLOCKS = 64
HOST_BYTES = 320 << 20
"""An eighth of it, which may be on its way from tiers at a time, is more than a prompt."""
TOKENS = 900
COMPUTED_S = 1.0
IDLE_CORES = 0.1
TOLERANCE = 1.0
"""Of a log-probability: a prompt that is computed at once is rounded at other places, to 8 bits in each layer, than one whose end is.
Another prompt's answer is off by more, or has other likely tokens."""
# A prompt that another engine stored is not known to this one: a look-up that is believed for no time asks the store.
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 60.0, "hit_ttl_s": 0.0}
OURS = {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": HOST_BYTES, "blocks_per_chunk": 1}
VLLMS = {"cpu_bytes_to_use": HOST_BYTES, "blocks_per_chunk": 1}


@dataclass(frozen=True)
class Side:
    """What is timed.

    Attributes:
        name: In tables.
        engine: Whose prompt it is.
        keep: What keeps the prompt: the "device", the "host", or nothing but the tier.
        computed_by: The engine that computes and stores the prompt, where it is another one.
    """

    name: str
    engine: str
    keep: str = ""
    computed_by: str | None = None


SIDES = {
    "recompute": Side("recomputing", "none"),
    "cached": Side("the engine's own cache", "none", keep="device"),
    "vllm-host": Side("vLLM's host memory", "vllm-fs", keep="host"),
    "vllm-fs": Side("vLLM's tiering, its `fs`", "vllm-fs"),
    "tiering-fs": Side("vLLM's tiering, our `fs`", "tiering-fs"),
    "host": Side("our host memory", "host", keep="host"),
    "fs": Side("our host memory, `fs`", "fs"),
    "fs-warm": Side("our host memory, `fs` in the page cache", "fs-warm"),
    "s3": Side("our host memory, `s3`", "s3"),
    "p2p": Side("our host memory, `p2p`", "p2p", computed_by="host"),
}
COMPUTE, CACHED, RIVAL = "recompute", "cached", "vllm-fs"
DEFAULT = [name for name in SIDES if name != "fs-warm"]
SWEPT = (COMPUTE, CACHED, RIVAL, "tiering-fs", "fs", "s3")
"""Sides that are timed with shorter prompts too."""
BESIDE_FS, BESIDE_COMPUTING = ("host", "tiering-fs", "fs", "fs-warm"), ("s3", "p2p")
"""What must keep up with vLLM's tier over the same disk, and what only with computing: a network is no disk."""


class Bench:
    """The engines, and what they answered."""

    def __init__(self, model: Mapping[str, Any], sides: Sequence[str], setups: Mapping[str, Mapping[str, Any]], seed: int) -> None:
        self._sides = {name: SIDES[name] for name in sides}
        self._rng = random.Random(seed)
        self._prompts = 0
        self.times = {name: Times() for name in sides}
        needed = dict.fromkeys(engine for side in self._sides.values() for engine in (side.computed_by, side.engine) if engine is not None)
        self._children = {name: Child(HERE / "ttft_child.py", json.dumps({"model": model, **setups[name]})) for name in needed}
        self._peer: str | None = None
        self._last: dict[str, float] = {}

    def start(self) -> None:
        """Start every engine, and answer a prompt: the first one takes seconds."""
        # As many at a time as there are cores, but not more: each takes several times its memory while it starts.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda child: child.ask({"op": "store", "prompt": self._prompt(TOKENS, 0)}), self._children.values()))
        if any(side.computed_by for side in self._sides.values()):
            self._peer = str(self._children["host"].ask({"op": "address"})["address"])

    def check_idle(self) -> None:
        """Raises RuntimeError: an engine that is asked nothing takes from those that are timed."""
        before = {name: child.ask({"op": "cpu_s"})["cpu_s"] for name, child in self._children.items()}
        time.sleep(1.0)
        used = {name: child.ask({"op": "cpu_s"})["cpu_s"] - before[name] for name, child in self._children.items()}
        if max(used.values()) > IDLE_CORES:
            raise RuntimeError(f"cores that idle engines take: {used}")

    def round(self, tokens: int, sides: Sequence[str], *, counts: bool) -> None:
        """Time a new prompt on each of the sides, twice.

        Raises:
            RuntimeError: an answer is not the one that was computed, or reused less than it could.
        """
        self._prompts += 1
        prompt = self._prompt(tokens, self._prompts)
        mine = {name: self._sides[name] for name in sides}
        computing = dict.fromkeys(side.computed_by or side.engine for side in mine.values())
        computed = {engine: self._children[engine].ask({"op": "store", "prompt": prompt}) for engine in computing}
        # The end of the prompt computed over the engine's own KV of the rest: KV that a tier kept has to give the same to the last bit.
        expected = self._first_token(CACHED, prompt)
        check(CACHED, expected, expected, reusable(tokens))
        if expected["logprobs"] == self._last:
            raise RuntimeError("two prompts have one answer: that they are answered rightly proves nothing")
        self._last = expected["logprobs"]
        for engine, answer in computed.items():
            check(f"computed by {engine}", answer, expected, 0)
        turns = [(name, column) for name in mine for column in ("first", "again")]
        self._rng.shuffle(turns)
        for name, column in turns:
            answer = self._first_token(name, prompt)
            check(name, answer, expected, 0 if name == COMPUTE else reusable(tokens))
            if counts:
                self.times[name].add(tokens, column, answer["seconds"])

    def _first_token(self, name: str, prompt: list[int]) -> dict[str, Any]:
        side = SIDES[name]
        question = {"op": "first_token", "prompt": prompt, "keep": side.keep, "peer": self._peer if side.computed_by else None}
        return self._children[side.engine].ask(question)

    def _prompt(self, tokens: int, number: int) -> list[int]:
        from vllm_models import prompts

        return prompts(1, tokens, seed=10_000 * tokens + number)[0]

    def close(self) -> None:
        for child in self._children.values():
            child.close()


def check(name: str, answer: Mapping[str, Any], expected: Mapping[str, Any], reused: int) -> None:
    """Raises RuntimeError: this is not the answer that was computed, or it was not come by as it should."""
    if answer["reused"] != reused:
        raise RuntimeError(f"{name}: {answer['reused']} tokens were reused, not {reused}")
    token = str(expected["token"])
    apart = abs(answer["logprobs"].get(token, float("inf")) - expected["logprobs"][token])
    if not apart <= (TOLERANCE if not reused else 0.0):
        raise RuntimeError(f"{name}: token {answer['token']} instead of {token}, log-probability off by {apart}")


def reusable(tokens: int) -> int:
    """vLLM computes the last token always, and loads whole chunks."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def setups(folder: Path, s3: Callable[[], dict[str, Any]], engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Tiers and connector of each engine."""

    def ours(**entry: Any) -> dict[str, Any]:
        return {"tiers": [{"type": "kvstore", **PATIENT, **entry}], "extra": OURS}

    def fs(name: str, **more: Any) -> dict[str, Any]:
        return {"backend": "fs", "location": str(folder / name), **more}

    peer = {"backend": "p2p", "location": "127.0.0.1:0", "answer_timeout_s": 20.0}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "none": lambda: {"tiers": None, "extra": {}},
        "vllm-fs": lambda: {"tiers": [{"type": "fs", "root_dir": str(folder / "vllm-fs")}], "extra": VLLMS},
        "tiering-fs": lambda: {"tiers": [{"type": "kvstore", **PATIENT, **fs("tiering-fs")}], "extra": VLLMS},
        "fs": lambda: ours(**fs("fs")),
        "fs-warm": lambda: ours(**fs("fs-warm", direct_io="never")),
        "s3": lambda: ours(**s3()),
        "host": lambda: ours(**peer),
        "p2p": lambda: ours(**peer),
    }
    return {name: made[name]() for name in engines}


def build_model(path: Path) -> dict[str, Any]:
    """Write a Llama of 490 million random weights. Returns the fields of a `TinyModel`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm_models import VOCABULARY, TinyModel

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        # Above the usual: with less, a random model gives every prompt the same answer, and then equal answers prove nothing. With much
        # more, rounding alone changes the answer.
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(path)
    return dataclasses.asdict(TinyModel(path, block_tokens=BLOCK_TOKENS, blocks=BLOCKS, groups=1)) | {"path": str(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=8, help="with prompts of 900 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sides", default=",".join(DEFAULT), help=f"of {', '.join(SIDES)}; {COMPUTE} always is one")
    parser.add_argument("--lengths", default="68,132,260,516", help="of further prompts, in tokens, or nothing")
    parser.add_argument("--length-rounds", type=int, default=4, help="with each of them")
    add_outputs(parser)
    args = parser.parse_args()
    given = args.sides.split(",")
    if unknown := set(given) - set(SIDES):
        parser.error(f"no side is called {', '.join(sorted(unknown))}")
    sides = [name for name in SIDES if name in given or name == COMPUTE]
    lengths = [int(tokens) for tokens in args.lengths.split(",") if tokens]
    if any(not BLOCK_TOKENS < tokens < TOKENS for tokens in lengths):
        parser.error(f"a length is above {BLOCK_TOKENS} and below {TOKENS}")

    # Who ends this by a signal wants its files gone as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="kvstore-ttft-", dir=args.folder))
    server = None
    try:
        if "s3" in sides:
            from isolation_engine import _server

            server = _server()
        engines = dict.fromkeys(engine for name in sides for engine in (SIDES[name].computed_by, SIDES[name].engine) if engine)
        model = build_model(folder / "model")
        bench = Bench(model, sides, setups(folder, lambda: _s3_entry(server), list(engines)), args.seed)
        try:
            bench.start()
            bench.check_idle()
            # The first round does not count.
            for number in range(args.rounds + 1):
                bench.round(TOKENS, sides, counts=number > 0)
            for number in range(args.length_rounds + 1):
                for tokens in lengths:
                    bench.round(tokens, [name for name in sides if name in SWEPT], counts=number > 0)
        finally:
            bench.close()
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    _write(args, bench.times, facts)


def _s3_entry(server: Any) -> dict[str, Any]:
    from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

    entry = {"backend": "s3", "endpoint": server.endpoint, "region": REGION, "addressing": "path"}
    entry |= {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    return entry | {"location": f"{server.make_bucket('ttft')}/kv"}


def _write(args: argparse.Namespace, times: Mapping[str, Times], facts: Mapping[str, str]) -> None:
    names = {name: SIDES[name].name for name in times}
    rival = RIVAL if RIVAL in times else None
    computed_ms = times[COMPUTE].median_ms(TOKENS)
    text = [
        f"## Time to the first token of {TOKENS} tokens",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        *side_section(names, times, TOKENS, COMPUTE, rival),
        "",
    ]
    if len(times[COMPUTE].first) > 1:
        text += ["### From which length on a tier pays", "", *break_even_section(names, times, COMPUTE, CACHED, TOKEN_BYTES), ""]
    if computed_ms < COMPUTED_S * 1e3:
        text.append(f"- Missed: computing takes {computed_ms:,.0f} ms, wanted {COMPUTED_S * 1e3:,.0f}.")
    targets = [verdict(name, times) for name in times if name in BESIDE_FS + BESIDE_COMPUTING]
    text += [f"- Missed: {target['found']}." for target in targets if not target["met"]]
    print("\n".join(text))
    if args.markdown:
        args.markdown.write_text("\n".join(text) + "\n")
    if args.svg:
        args.svg.write_text(plot(names, times, TOKENS, COMPUTE))
    if args.json:
        body = {"facts": dict(facts), "token_bytes": TOKEN_BYTES, "targets": targets}
        args.json.write_text(
            json.dumps(body | {"times": {name: dataclasses.asdict(found) for name, found in times.items()}}, indent=1) + "\n"
        )


def verdict(name: str, times: Mapping[str, Times]) -> dict[str, Any]:
    """Whether a side is faster than computing, and not slower than vLLM's tier beyond noise."""
    faster = ratio(times[name], times[COMPUTE], TOKENS)
    said, met = f"{SIDES[name].name}: {faster} times as fast as recomputing", faster.low > 1
    if RIVAL in times and name in BESIDE_FS:
        beside = ratio(times[name], times[RIVAL], TOKENS)
        said, met = f"{said}, {beside} times as fast as vLLM's `fs`", met and beside.high >= 1
    return judge("ttft", met, said)


if __name__ == "__main__":
    main()
