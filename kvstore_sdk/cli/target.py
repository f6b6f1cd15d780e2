"""The store that a tool works on: its options on the command line, and opening it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_sdk.backend import Backend, backend_options, open_backend
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.tools.retry import Retry

__all__ = ["Target", "add_filter", "add_output", "add_target", "add_threads", "prefix_of", "retry_of", "target_of"]

FROM_ENVIRONMENT = "env:"
MAX_THREADS = 256
_BOUND = "max_bytes"
_USER = re.compile("://[^/]*@")
"""And its password, in a URL."""


@dataclass(frozen=True, slots=True)
class Target:
    """A store as somebody named it. `repr` and `str` show no options, which may be secret.

    Attributes:
        command: That works on it, for errors.
        backend: A URL, the name of a backend, or `module:factory`.
        location: Where the store is, where `backend` is no URL.
        options: Of the backend, beside those of the URL.
    """

    command: str
    backend: str
    location: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def open(self, *, writes: bool, creates: bool = True) -> AbstractContextManager[Backend]:
        """Open it; leaving the context closes it.

        Args:
            writes: Whether the command stores or removes something. If not, a backend with an option `read_only` is opened with it, and
                without `max_bytes`, for what looks only keeps nothing below a bound.
            creates: Whether a store is made where there is none. If not, it is opened as if to be read first.

        Raises:
            ConfigError: the backend, its location or an option is wrong.
            BackendError: it could not be opened.
        """
        base, mark, query = self.backend.partition("?") if self.location is None else (self.backend, "", "")
        pairs = query.split("&") if mark else []
        given = {*self.options, *map(_name, pairs)}
        if (writes and creates) or "read_only" in given or "read_only" not in backend_options(self.backend):
            return closing(open_backend(self.backend, self.options, location=self.location))
        kept = "&".join(pair for pair in pairs if _name(pair) != _BOUND)
        options = {name: value for name, value in self.options.items() if name != _BOUND}
        looking = open_backend(base + (mark and kept and mark + kept), options | {"read_only": True}, location=self.location)
        if not writes:
            return closing(looking)
        looking.close()
        return closing(open_backend(self.backend, self.options, location=self.location))

    def __str__(self) -> str:
        # Without the URL's query, which may carry what is not for the screen. It has no fragment and no password, or it would not open.
        shown = self.backend.partition("?")[0]
        # A location by itself is the backend's own affair, and may be a URL with all of that.
        return shown if self.location is None else f"{shown} at {_USER.sub('://', self.location.partition('?')[0])}"


def _name(pair: str) -> str:
    """Of the option in a part of a query."""
    return pair.partition("=")[0]


def add_target(
    parser: argparse.ArgumentParser, name: str = "target", flags: str = "", what: str = "the store", *, optional: bool = False
) -> None:
    """Add the arguments that name a store: a positional one, `--location` and `--option`.

    Args:
        parser: Of the command.
        name: Of the positional argument: `target`, `source`, ...
        flags: Comes before `location` and `option`, for a command with two stores: `to-` makes `--to-location` and `--to-option`.
        what: The store, in words.
        optional: It is named by a flag, `--NAME`, and may be left out.
    """
    shown = name.upper()
    parser.add_argument(
        f"--{name}" if optional else name, metavar=shown, help=f"{what}: a URL, such as file:///mnt/kv, a backend's name, or module:factory"
    )
    parser.add_argument(f"--{flags}location", dest=f"{name}_location", metavar="LOCATION", help=f"where it is, when {shown} is no URL")
    parser.add_argument(
        f"--{flags}option",
        dest=f"{name}_options",
        metavar="NAME=VALUE",
        type=_option,
        action="append",
        default=[],
        help="an option of its backend; repeatable. A secret is given as NAME=env:VARIABLE: every user can read a command line",
    )


def add_output(parser: argparse.ArgumentParser, timeout_s: float = 30.0, *, tries: bool = True) -> None:
    """Add `--json`, `--progress` and `--timeout`, which every tool has. `tries`: it tries again what failed."""
    parser.add_argument("--json", action="store_true", help="results as JSON")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None, help="on standard error (default: when that is a terminal)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=timeout_s,
        help=f"for one call on the store (default: {timeout_s:g})" + ("; what fails for now is tried up to five times" if tries else ""),
    )


def add_threads(parser: argparse.ArgumentParser, default: int = 4) -> None:
    """Add `--threads`. No more calls are made at one time than the backend allows."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=_threads,
        default=default,
        help=f"records at one time, 1 to {MAX_THREADS} (default: {default})",
    )


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add `--namespace` and `--prefix`, which say what to look at."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--namespace", metavar="DIGITS", type=_digits, help="of this namespace, or those that begin with these hex digits")
    either.add_argument("--prefix", default="", metavar="TEXT", help="of names that begin with this text")


def prefix_of(arguments: argparse.Namespace) -> str:
    """What names begin with, as `add_filter` was told."""
    prefix: str = arguments.prefix if arguments.namespace is None else f"v1/{arguments.namespace}"
    return prefix


def target_of(arguments: argparse.Namespace, command: str, name: str = "target") -> Target:
    """The store that `add_target` was told.

    Raises:
        ConfigError: it is a path, an option is given twice, or a variable of the environment is not set.
    """
    backend, given = getattr(arguments, name), getattr(arguments, f"{name}_options")
    if not backend.strip():
        raise ConfigError(command, name, "must not be empty; write a URL, a backend's name, or module:factory")
    if ":" not in backend and backend.startswith(("/", ".", "~")):
        raise ConfigError(command, name, f"is a path, not a URL; write {Path(backend).expanduser().absolute().as_uri()}")
    options: dict[str, str] = {}
    for option, value in given:
        if option in options:
            raise ConfigError(command, option, "is given twice; leave one out")
        if value.startswith(FROM_ENVIRONMENT):
            variable = value.removeprefix(FROM_ENVIRONMENT)
            if variable not in os.environ:
                raise ConfigError(command, option, f"is to come from the environment, where {variable} is not set")
            value = os.environ[variable]
        options[option] = value
    return Target(command, backend, getattr(arguments, f"{name}_location"), options)


def retry_of(arguments: argparse.Namespace) -> Retry:
    """How patient the command is, as `--timeout` says."""
    return Retry(timeout_s=arguments.timeout)


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        # Without the text: it may be a secret in the wrong place.
        raise argparse.ArgumentTypeError("must be NAME=VALUE, or NAME=env:VARIABLE")
    return name, value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds from 0.001 to 86400")
    return value


def _digits(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{1,32}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 32 lower-case hex digits")
    return text


def _threads(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MAX_THREADS}")
    return int(text)
