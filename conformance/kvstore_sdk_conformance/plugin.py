"""The options of the suite for pytest. Inert, and without an import of anything else, until `--kvstore-backend` is given."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "NO_BACKEND",
    "PACKAGE",
    "TOLD",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_sessionfinish",
]

PACKAGE = "kvstore_sdk_conformance"
TOLD = "KVSTORE_CONFORMANCE_EXIT_CODE"
NO_BACKEND = "kvstore-sdk conformance: no backend: give --kvstore-backend=TARGET, a URL, the name of a backend, or module:factory"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("kvstore", "conformance of a kvstore-sdk backend (pytest --pyargs kvstore_sdk_conformance)")
    add = group.addoption
    add("--kvstore-backend", metavar="TARGET", help="the backend: module:factory, the name of an installed one, or a URL of it")
    add(
        "--kvstore-location",
        metavar="LOCATION",
        help="where to test, with {fresh} for a name that is new each time; by default a temporary folder",
    )
    add(
        "--kvstore-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the backend; may be repeated. A secret is given as NAME=env:VARIABLE: every user can read a command line",
    )
    add("--kvstore-profile", metavar="PROFILE", action="append", default=[], help="check these profiles only (core, durability, ..., all)")
    add("--kvstore-seed", metavar="N", default="1", help="of everything that is drawn; 'random' for a new one (default 1)")
    add("--kvstore-deviations", metavar="FILE", help="TOML: id = 'why this backend breaks it'")
    add("--kvstore-strict", action="store_true", help="a SHOULD that is broken fails the run as well")
    add("--kvstore-largest", metavar="SIZE", default="256MiB", help="largest record that is tried (default 256MiB)")
    add("--kvstore-examples", metavar="N", default="40", help="sequences of operations that are tried (default 40)")
    add("--kvstore-report", metavar="FILE", action="append", default=[], help="write a report: .json, .md, or .badge.json; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    """Start a run of the suite, if one is asked for."""
    if config.getoption("kvstore_backend") is not None:
        if importlib.util.find_spec("hypothesis") is None:
            raise pytest.UsageError("kvstore-sdk conformance: hypothesis is not installed; run: pip install hypothesis")
        from kvstore_sdk_conformance.session import Session

        config.pluginmanager.register(Session.begin(config), "kvstore-conformance-session")
    elif any(str(argument).startswith(PACKAGE) for argument in config.args):
        raise pytest.UsageError(NO_BACKEND)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the command how the run ended: a backend may end this process with another code."""
    if (told := os.environ.get(TOLD)) and not hasattr(session.config, "workerinput"):
        Path(told).write_text(str(int(session.exitstatus)), encoding="ascii")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Refuse to run checks without a backend, however they were named."""
    if config.getoption("kvstore_backend") is None:
        for item in items:
            if getattr(getattr(item, "function", None), "kvstore_requirement", None) is not None:
                raise pytest.UsageError(NO_BACKEND)
