"""What every command shares: the parser, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvstore_sdk.cli import backends, bench, conformance, copy, demo, health, keygen, ls, prune, repair, stat, verify
from kvstore_sdk.errors import ConfigError, KVStoreError

__all__ = ["main", "make_parser"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Storage backends for tiered LLM KV caches.")
    parser.add_argument("--version", action="version", version=f"kvstore-sdk {version('kvstore-sdk')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (health, ls, stat, verify, repair, prune, copy, bench, keygen, backends, conformance, demo):
        module.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when it did what it says; 1 when a store failed or a check of the command did not hold; 2 when the command line or a
        setting is wrong, in which case no record was written. Errors are one line on standard error. `conformance` does not return
        unless it cannot start: the process turns into the suite, which ends with the exit codes of pytest.
    """
    parsed = make_parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        # Here and not at exit, where nobody would see it fail.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (KVStoreError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output went away, `head` for example. What is still buffered has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
        print(f"kvstore: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
