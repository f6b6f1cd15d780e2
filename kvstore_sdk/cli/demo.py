"""`kvstore demo`: one engine stores its KV cache, another gets it back."""

from __future__ import annotations

import argparse
import json
import shutil
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
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, beside those of a URL; repeatable. No secrets: every user can read a command line",
    )
    parser.add_argument("--prompts", type=_positive, default=4, metavar="N", help="how many prompts (default: 4)")
    # The second engine: the first one starts it, tells it the store on standard input, and reads its answer from standard output.
    parser.add_argument("--as-reader", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. The records stay in the store."""
    if arguments.as_reader:
        return demo_synthetic.read(Store(**json.load(sys.stdin)), arguments.prompts)
    if arguments.store is None and (arguments.location is not None or arguments.option):
        raise ConfigError("demo", "location" if arguments.location is not None else "option", "goes with --store, which names the backend")
    options = dict(arguments.option)
    if len(options) < len(arguments.option):
        raise ConfigError("demo", "option", "names one option twice")
    store = Store(arguments.store, arguments.location, options) if arguments.store is not None else None
    if arguments.no_vllm:
        demo = demo_synthetic.run
    else:
        # Only here, because whoever has no vLLM should still see the rest of the command.
        from kvstore_sdk.cli import demo_vllm

        demo = demo_vllm.run
        if missing := demo_vllm.missing_packages():
            problem = (
                f"needs {', '.join(missing)}, which this environment lacks: kvstore demo --no-vllm needs nothing; "
                "or, in a checkout, make demo, which installs vLLM for CPUs; or install vLLM beside the SDK, as its own page says"
            )
            raise ConfigError("demo", "vllm", problem)
    if store is not None:
        return demo(store, arguments.prompts)
    folder = tempfile.mkdtemp(prefix="kvstore-demo-")
    try:
        return demo(Store(f"file://{folder}", temporary=folder), arguments.prompts)
    except BaseException:
        # The demo says where the folder is only when it comes to its end.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 1000")
    return int(text)


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        # Without the text: what is misplaced may be a secret.
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return name, value
