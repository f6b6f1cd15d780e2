"""An engine in a process of its own: reads one JSON command a line, answers each with one line that begins with `ANSWER `.

    {"start": {arguments of vllm_engines.Engine, with the model's fields}}    {"ask": prompts}    {"settle": true}    {"reset": true}
    {"reset_device": true}    {"pages": true}    {"call": "module:function", "arguments": {...}}    {"stop": true}

Started by tests that kill engines, or need ranks in processes.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm_kernels  # noqa: F401  before vLLM; ranks import this file again
from vllm_engines import Engine
from vllm_models import TinyModel


def main() -> None:
    engine: Engine | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer: Any = True
        if start := command.get("start"):
            model = TinyModel(**start["model"] | {"path": Path(start["model"]["path"])})
            engine = Engine(model, start["tier"], extra=start.get("extra"), **start.get("options", {}))
            answer = {"block_tokens": engine.block_tokens}
        elif engine is None:
            raise ValueError("no engine was started")
        elif prompts := command.get("ask"):
            answer = [asdict(found) for found in engine.ask(prompts)]
        elif command.get("settle"):
            engine.settle()
        elif command.get("reset"):
            engine.reset()
        elif command.get("reset_device"):
            engine.reset_device()
        elif command.get("pages"):
            answer = engine.pages()
        elif function := command.get("call"):
            module, _, name = function.partition(":")
            answer = getattr(importlib.import_module(module), name)(engine, **command["arguments"])
        elif command.get("stop"):
            engine.stop()
        sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
