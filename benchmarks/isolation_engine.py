"""A backend in the engine's process against the same in a child: `python benchmarks/isolation_engine.py --folder /mnt/disk`.

Each side is a vLLM engine of its own on the CPU, with a tiny model whose chunks have the size of a cell. Some requests decode all the time,
so that the engine steps; beside them prompts are answered whose KV the tier has (load), or nobody (store). Rates are payload MB/s until
the last of it was moved, and tokens of the requests beside it per second until all is done. A round runs both sides, the child twice, in
random order. It needs vLLM, and for s3fs and nixl the extras of that name and moto's server.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from child import Child
from harness import CellResult, geometric_mean, machine_facts, report, save

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path += [str(TESTS / "vllm"), str(TESTS / "backends" / "s3")]

WAYS = {"our host memory": "ours", "vLLM's host memory": "vllm"}
BACKENDS = ("fs", "memory", "s3fs", "nixl")
# Layers, KV heads and head size; a token takes 4 bytes times their product.
SIZES = {"64 KiB": (2, 2, 128), "1 MiB": (8, 8, 128)}
BLOCK_TOKENS = 32
RATES = ("MB/s", "tokens/s")
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 60.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backends", default="fs,memory,s3fs", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--ways", default="ours", help=f"of {', '.join(WAYS.values())}")
    parser.add_argument("--json", type=Path, help="a folder: one file for each backend and rate")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    server = _server() if {"s3fs", "nixl"} & set(args.backends.split(",")) else None
    sections, means = [], []
    facts = machine_facts() | {"rounds": str(args.rounds)}
    try:
        models = {size: _model(folder / f"model-{number}", *SIZES[size]) for number, size in enumerate(args.sizes.split(","))}
        for backend in args.backends.split(","):
            results: dict[str, list[CellResult]] = defaultdict(list)
            for (size, model), (way, short) in itertools.product(models.items(), WAYS.items()):
                if short in args.ways.split(","):
                    place = folder / f"{backend}-{short}-{size.replace(' ', '')}"
                    _compare(f"{size}, {way}", model, _entry(backend, place, server), way, args, results)
                    for left in folder.glob(f"{place.name}-*"):
                        shutil.rmtree(left, ignore_errors=True)
            for rate, cells in results.items():
                title = f"{backend} in a child (ours) against in the engine's process (theirs), {rate}"
                sections.append(report(title, rate, cells, facts))
                means.append(f"{backend}, {rate}: {geometric_mean([cell.ratio for cell in cells]):.2f}")
                if args.json:
                    save(args.json / f"isolation-{backend}-{rate.replace('/', '-per-')}.json", title, rate, cells, facts)
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join([*sections, *(f"- {mean}" for mean in means)]) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


def _compare(
    name: str, model: Mapping[str, Any], entry: Mapping[str, Any], way: str, args: argparse.Namespace, results: dict[str, list[CellResult]]
) -> None:
    children = {}
    for side in ("process", "none"):
        mine = {**entry, **PATIENT, "isolation": side, "location": f"{entry['location']}-{side}"}
        setup = {"model": model, "entry": mine, "way": way}
        children[side] = Child(HERE / "isolation_engine_child.py", json.dumps(setup))
    layers, heads, size = SIZES[name.partition(",")[0]]
    rng = random.Random(args.seed)
    try:
        for op in ("load", "store"):
            rates: dict[str, dict[str, list[float]]] = {rate: defaultdict(list) for rate in RATES}
            for number in range(args.rounds + 1):
                order = ["process", "none", "again"]
                rng.shuffle(order)
                moved = set()
                for column in order:
                    side = "process" if column == "again" else column
                    answer = children[side].ask({"op": op, "bytes_per_token": 4 * layers * heads * size})
                    moved.add(answer["moved_bytes"])
                    # The first round does not count.
                    if number:
                        for rate in RATES:
                            rates[rate][column].append(answer[rate])
                if len(moved) > 1:
                    raise RuntimeError(f"{name} {op}: the sides moved {sorted(moved)} bytes")
            for rate, by in rates.items():
                results[rate].append(CellResult(f"{op} {name}", True, by["process"], by["none"], by["again"]))
    finally:
        for child in children.values():
            child.close()


def _entry(backend: str, place: Path, server: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "kvstore", "backend": "s3" if server is not None and backend in ("s3fs", "nixl") else backend}
    if backend in ("s3fs", "nixl"):
        from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

        entry |= {"engine": backend, "endpoint": server.endpoint, "region": REGION, "addressing": "path"}
        entry |= {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        return entry | {"location": f"{server.make_bucket(place.name.lower())}/kv"}
    return entry | {"location": str(place)}


def _server() -> Any:
    # The server keeps every object in memory: its disk would be what is measured.
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 30)
    from s3_server import S3Server

    return S3Server()


def _model(path: Path, layers: int, kv_heads: int, head_size: int) -> dict[str, Any]:
    """A Llama of random weights that computes little for the KV that it makes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm_models import VOCABULARY, TinyModel

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return dataclasses.asdict(TinyModel(path, block_tokens=BLOCK_TOKENS, blocks=200, groups=1)) | {"path": str(path)}


if __name__ == "__main__":
    main()
