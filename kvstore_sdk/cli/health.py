"""`kvstore health`: whether a store answers, and how fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from kvstore_sdk.backend import Backend
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.target import Target, add_output, add_target, target_of
from kvstore_sdk.tools.health import Step, check, timed

__all__ = ["add_command"]

_CLOSE_S = 5.0
"""As the contract says."""


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Opens the store and asks for a name that is not there; with --write it also stores a small record, reads it back and removes it. "
        "One line a call with its milliseconds. Exit code 0: all of them worked; 1: one did not, or did not in time."
    )
    parser: argparse.ArgumentParser = commands.add_parser("health", help="ask a store whether it works", description=text)
    add_target(parser)
    parser.add_argument("--write", action="store_true", help="store, read and remove a scratch record of 4 KiB, too")
    add_output(parser, 5.0, tries=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print each call as it ends. Whatever hangs is left behind."""
    target = target_of(arguments, "health")
    healthy = True
    with Report("health", as_json=arguments.json) as report:
        for step in _steps(target, arguments.timeout, arguments.write):
            healthy = healthy and not step.problem
            ms = step.elapsed_s * 1e3
            line = f"{step.name:<16}  {ms:>9.1f} ms  {step.problem or 'works'}"
            report.item(line, call=step.name, ok=not step.problem, ms=round(ms, 3), problem=step.problem)
        report.end(f"{target} is {'healthy' if healthy else 'not healthy'}", target=str(target), healthy=healthy)
    return 0 if healthy else 1


def _steps(target: Target, timeout_s: float, write: bool) -> Iterator[Step]:
    opened: list[AbstractContextManager[Backend]] = []
    opening = timed("open", timeout_s, lambda: opened.append(target.open(writes=write)))
    yield opening
    if opening.problem:
        return
    context = opened[0]
    try:
        yield from check(context.__enter__(), timeout_s=timeout_s, write=write)
    finally:
        closing = timed("close", _CLOSE_S, lambda: context.__exit__(None, None, None))
    yield closing
