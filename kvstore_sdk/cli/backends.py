"""`kvstore backends`: what is installed, and the options it takes."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from kvstore_sdk.backend import OptionInfo, backend_options, registered_backends
from kvstore_sdk.backend.options import options_of
from kvstore_sdk.cli.table import columns
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.tier import TierSettings

__all__ = ["add_command", "describe"]


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = "List installed backends with their options, or the options of one."
    parser: argparse.ArgumentParser = commands.add_parser("backends", help="list backends and their options", description=text)
    parser.add_argument("backend", nargs="?", help="a name, a URL, or module:factory")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print to standard output. A backend that cannot be imported is listed with the reason."""
    if arguments.backend is not None:
        _print(arguments.backend, backend_options(arguments.backend))
        return 0
    names: dict[str, list[str]] = {}
    for name, point in sorted(registered_backends().items()):
        names.setdefault(point.value, []).append(name)
    for factory, same in names.items():
        try:
            _print(f"{', '.join(same)}  ({factory})", backend_options(same[0]))
        except ConfigError as error:
            print(f"{', '.join(same)}  ({factory})\n  cannot be used: {error.problem}\n")
    _print("every backend, beside its own", options_of(TierSettings))
    return 0


def describe(option: OptionInfo) -> tuple[str, str, str, str]:
    """Name, type or unit, default and help of an option, as people read them."""
    return option.name, _type(option), _default(option), option.help


def _print(title: str, options: Mapping[str, OptionInfo]) -> None:
    rows = [describe(option) for option in options.values()]
    print(title)
    print(columns(rows, indent="  ") if rows else "  no options")
    print()


def _type(option: OptionInfo) -> str:
    union = typing.get_origin(option.type) in (typing.Union, types.UnionType)
    kinds = typing.get_args(option.type) if union else (option.type,)
    return " or ".join(_kind(option, kind) for kind in kinds)


def _kind(option: OptionInfo, kind: Any) -> str:
    if kind is types.NoneType:
        return "none"
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if kind in (int, float) and option.unit:
        return option.unit
    return {str: "string", int: "whole number", float: "number", bool: "true|false"}.get(kind, str(kind))


def _default(option: OptionInfo) -> str:
    if option.required:
        return "required"
    if option.default is None:
        return "default none"
    # A default is not a secret, but showing one invites to keep it.
    return "default ***" if option.secret and option.default else f"default {_value(option, option.default)}"


def _value(option: OptionInfo, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if option.unit.startswith("bytes") and value:
        for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (10**9, "GB"), (10**6, "MB")):
            if value % factor == 0:
                return f"{value // factor:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'
