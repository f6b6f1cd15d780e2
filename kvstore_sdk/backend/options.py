"""One option schema for every backend: the keyword-only parameters of its factory.

A factory `open_store(location, *, io_threads: int = 4, connect_timeout_s: float = 3.0)` declares two options. Name, type, default and unit
are read off its signature, so there is nothing to keep in step:

- types are `str`, `int`, `float`, `bool`, `Literal[...]`, and any of them `| None`;
- `Annotated[int, Bounds(ge=1, le=1024), "what it means"]` adds limits and a sentence of help;
- a name that ends in `_bytes` or `_bytes_per_s` takes `4GiB` and the like, one that ends in `_s`, and in no other `_per_s`, takes
  `500ms` and the like;
- a parameter without a default must be given.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvstore_sdk.errors import ConfigError

__all__ = ["Bounds", "OptionInfo", "nearest_name", "options_of", "parse_options"]

_SECRET = re.compile(
    r"secret|passw|passphrase|pwd|token|credential|signature|authorization|bearer|cookie|connection_string|storage_options|key($|_)|"
    r"(^|_)(auth|dsn|jwt|sas|salt)($|_)",
    re.IGNORECASE,
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*")
_SIZES = {"B": 1} | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)?\s*")
_TIMES = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_REFUSED = {
    "codec": "codecs are outside this SDK: quantise the KV cache in the engine",
    "compression": "compression is outside this SDK: quantise the KV cache in the engine",
    "encryption": "encryption is outside this SDK: use an encrypted volume or the object store's own",
    "encryption_key": "encryption is outside this SDK: use an encrypted volume or the object store's own",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive limits of a number."""

    ge: float = -math.inf
    le: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.le):
            return f"{self.ge} or more"
        return f"{self.le} or less" if math.isinf(self.ge) else f"from {self.ge} to {self.le}"


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option as its factory declares it. `default` is `inspect.Parameter.empty` when it must be given."""

    name: str
    type: Any
    default: Any
    bounds: Bounds
    help: str

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def unit(self) -> str:
        if self.name.endswith("_bytes_per_s"):
            return "bytes per second"
        if self.name.endswith("_bytes"):
            return "bytes"
        return "seconds" if self.name.endswith("_s") and not self.name.endswith("_per_s") else ""

    @property
    def secret(self) -> bool:
        """Whether its value may be shown to nobody, as its name says."""
        return bool(_SECRET.search(self.name))


def options_of(factory: Callable[..., Any]) -> dict[str, OptionInfo]:
    """The options that `factory` declares: its keyword-only parameters, in order. One without a type is a string.

    Raises:
        NameError: a type is written as a string and means nothing where the factory is defined.
    """
    found = {}
    for name, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint, bounds, text = parameter.annotation, Bounds(), ""
        if hint is inspect.Parameter.empty:
            hint = str
        if typing.get_origin(hint) is typing.Annotated:
            hint, *notes = typing.get_args(hint)
            bounds = next((n for n in notes if isinstance(n, Bounds)), bounds)
            text = next((n for n in notes if isinstance(n, str)), text)
        found[name] = OptionInfo(name, hint, parameter.default, bounds, text)
    return found


def parse_options(where: str, schema: Mapping[str, OptionInfo], given: Mapping[str, object]) -> dict[str, Any]:
    """Check and convert `given`; strings, as a URL carries them, are parsed. Defaults are left to the factory.

    Raises:
        ConfigError: an option is unknown, missing, of the wrong type or out of bounds. The message names it, and the choices.
    """
    for name in given:
        if name not in schema:
            raise ConfigError(where, name, _REFUSED.get(name) or f"unknown option; {_known(name, schema)}")
    parsed = {}
    for name, option in schema.items():
        if name in given:
            parsed[name] = _convert(where, option, given[name])
        elif option.required:
            raise ConfigError(where, name, "must be given")
    return parsed


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Of the known names the one that a misspelt name was probably meant for; empty where none is near."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.8)), "")


def _known(name: str, schema: Iterable[str]) -> str:
    takes = "it takes " + (", ".join(sorted(schema)) or "no options")
    near = nearest_name(name, schema)
    return f"did you mean {near}? {takes}" if near else takes


def _convert(where: str, option: OptionInfo, value: object) -> Any:
    shown = "***" if option.secret else _shown(value)
    choices = [option.type]
    if typing.get_origin(option.type) in (typing.Union, types.UnionType):
        choices = [choice for choice in typing.get_args(option.type) if choice is not type(None)]
        if value is None and len(choices) < len(typing.get_args(option.type)):
            return None
    for choice in choices:
        try:
            result = _convert_one(option, choice, value)
        except (TypeError, ValueError, OverflowError):
            continue
        is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
        if is_number and not option.bounds.ge <= result <= option.bounds.le:
            raise ConfigError(where, option.name, f"{shown} is out of bounds, it must be {option.bounds}")
        return result
    wanted = " or ".join(_type_name(option, choice) for choice in choices)
    if str in choices and isinstance(value, (list, tuple)):
        wanted += "; write one, with commas between what it lists"
    raise ConfigError(where, option.name, f"{shown} is not {wanted}")


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python writes no whole number of more than some thousand digits.
        return "a number of thousands of digits"


def _convert_one(option: OptionInfo, kind: Any, value: object) -> Any:
    if typing.get_origin(kind) is Literal:
        # True equals 1, and a URL writes both as text.
        for choice in typing.get_args(kind):
            if (type(value) is type(choice) and value == choice) or (isinstance(value, str) and value == str(choice)):
                return choice
        raise ValueError
    if kind is str and isinstance(value, str):
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _FLAGS:
            return _FLAGS[value.lower()]
        raise ValueError
    if kind in (int, float) and not isinstance(value, bool):
        number: float
        if isinstance(value, str):
            number = _parse_number(option, value)
        elif isinstance(value, (int, float)):
            number = value
        else:
            raise TypeError
        if kind is int:
            if isinstance(number, float) and not number.is_integer():
                raise ValueError
            return int(number)
        if not math.isfinite(number):
            raise ValueError
        return float(number)
    raise TypeError


def _parse_number(option: OptionInfo, text: str) -> float:
    if option.unit:
        sized = option.unit.startswith("bytes")
        pattern, factors = (_SIZE, _SIZES) if sized else (_TIME, _TIMES)
        match = pattern.fullmatch(text)
        if match is None:
            raise ValueError
        # A whole number stays exact, however large.
        count = int(match[1]) if match[1].isdigit() else float(match[1])
        number = count * (factors[match[2]] if match[2] else 1)
        return round(number) if sized else number
    return float(text) if not re.fullmatch(r"[+-]?\d+", text) else int(text)


def _type_name(option: OptionInfo, kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if kind in (int, float) and option.unit:
        return f"a number of {option.unit}" + (" (such as 4GiB)" if option.unit.startswith("bytes") else " (such as 2.5 or 500ms)")
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}.get(kind, str(kind))
