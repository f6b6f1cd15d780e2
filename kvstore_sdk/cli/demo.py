"""`kvstore demo`: one engine stores its KV cache, another gets it back."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

from kvstore_sdk.cli import demo_synthetic
from kvstore_sdk.cli.store import Store
from kvstore_sdk.errors import ConfigError

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Two engines, one after the other and each a process of its own: the first computes prompts and stores their KV cache, the "
        "second gets it back. Prints a table, and fails unless everything that was stored comes back as it was."
    )
    parser: argparse.ArgumentParser = commands.add_parser("demo", help="store a KV cache and get it back", description=text)
    parser.add_argument("--no-vllm", action="store_true", help="made-up KV instead of a real engine's: takes seconds, needs no vLLM")
    parser.add_argument("--store", metavar="URL", help="a URL, a backend's name, or module:factory (default: a new temporary folder)")
    parser.add_argument("--location", help="where the store is, when --store is no URL")
    parser.add_argument("--prompts", type=_positive, default=4, metavar="N", help="how many prompts (default: 4)")
    # The second engine: the first one starts it, tells it the store on standard input, and reads its answer from standard output.
    parser.add_argument("--as-reader", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. The records stay in the store."""
    if arguments.as_reader:
        return demo_synthetic.read(Store(**json.load(sys.stdin)), arguments.prompts)
    if arguments.location is not None and arguments.store is None:
        raise ConfigError("demo", "location", "goes with --store, which names the backend")
    if arguments.no_vllm:
        demo = demo_synthetic.run
    else:
        # Only here, because whoever has no vLLM should still see the rest of the command.
        from kvstore_sdk.cli import demo_vllm

        demo = demo_vllm.run
        if missing := demo_vllm.missing_packages():
            raise ConfigError("demo", "vllm", f"needs {', '.join(missing)}: pip install 'kvstore-sdk[vllm]', or kvstore demo --no-vllm")
    store = Store(arguments.store or "file://" + tempfile.mkdtemp(prefix="kvstore-demo-"), arguments.location)
    return demo(store, arguments.prompts)


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError("must be from 1 to 1000")
    return number
