"""`kvstore conformance`: the conformance suite, for people who do not know pytest.

The suite stands above the SDK, so nothing of it is imported here: it runs in a process of its own, which a backend may take down with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_command"]

SUITE = "kvstore_sdk_conformance"
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 4  # as pytest's
LINGER_S = 10.0
"""For what a backend does when Python ends; threads that never end keep a process for ever."""
POLL_S = 0.2
TOLD = "KVSTORE_CONFORMANCE_EXIT_CODE"
VARIABLE = "KVSTORE_CONFORMANCE_OPTION"
# What would add options or plugins of another project to the run.
MISLEADING = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Runs the conformance suite on a backend: names every requirement that it breaks, with why it matters, what was seen and how to "
        "see it again, and gives a verdict for each profile. Exit code 0: nothing is broken; 1: something is; 4: the run could not start."
    )
    parser: argparse.ArgumentParser = commands.add_parser("conformance", help="check that a backend keeps the contract", description=text)
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="module:factory, the name of an installed backend, or a URL of it")
    add("--location", metavar="LOCATION", help="where to test, with {fresh} for a name that is new each time (default: a temporary folder)")
    add(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the backend; repeatable. A secret is given as NAME=env:VARIABLE: every user can read a command line",
    )
    add("--profile", metavar="PROFILE", action="append", default=[], help="check these only: core, durability, ..., all; repeatable")
    add("--seed", metavar="N", help="of everything that is drawn; 'random' for a new one (default: 1)")
    add("--deviations", metavar="FILE", help="TOML: id = 'why this backend breaks it'")
    add("--strict", action="store_true", help="a SHOULD that is broken fails the run as well")
    add("--largest", metavar="SIZE", help="largest record that is tried (default: 256MiB)")
    add("--examples", metavar="N", help="sequences of operations that are tried (default: 40)")
    add("--report", metavar="FILE", action="append", default=[], help="write a report: .json, .md or .badge.json; repeatable")
    add("-k", metavar="EXPR", dest="expression", help="run the checks whose name has this only; no verdict comes of it")
    add("--list", action="store_true", help="list the requirements, of the given profiles or all; runs nothing")
    add("--explain", metavar="ID", action="append", default=[], help="say all there is to say about a requirement; runs nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the suite, and return its exit code."""
    found = importlib.util.find_spec(SUITE)
    wanted = [SUITE] if arguments.list or arguments.explain else [SUITE, "pytest", "hypothesis"]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        return _refuse(f"{' and '.join(missing)} not installed; run: pip install pytest hypothesis (the extra kvstore-sdk[conformance])")
    assert found is not None
    assert found.submodule_search_locations is not None
    if arguments.list or arguments.explain:
        asked = [f"--explain={id_}" for id_ in arguments.explain] or ["--list", *_all("--profile", arguments.profile)]
        return subprocess.run([sys.executable, "-m", SUITE, *asked], env=_environment()).returncode
    if arguments.target is None:
        return _refuse("no backend: name a TARGET: a URL, the name of a backend, or module:factory")
    options, values = _hidden(arguments.option)
    folder = Path(found.submodule_search_locations[0])
    command = ["pytest", str(folder), f"--kvstore-backend={arguments.target}", *_all("--kvstore-option", options)]
    # Neither the settings and conftest files of the folder that this is started in, nor plugins that happen to be installed.
    command += ["-c", str(folder / "command.ini"), f"--rootdir={os.getcwd()}", f"--confcutdir={folder}"]
    command += ["-p", f"{SUITE}.plugin", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += _all("--kvstore-profile", arguments.profile) + _all("--kvstore-report", arguments.report)
    for name in ("location", "seed", "deviations", "largest", "examples"):
        if (value := getattr(arguments, name)) is not None:
            command.append(f"--kvstore-{name}={value}")
    command += ["--kvstore-strict"] if arguments.strict else []
    command += [f"-k={arguments.expression}"] if arguments.expression is not None else []
    return _run(command, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **values})


def _all(flag: str, values: Sequence[str]) -> list[str]:
    return [f"{flag}={value}" for value in values]


def _hidden(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The options without their values, and the environment that holds those: other users may read the one and not the other."""
    shown, values = [], {}
    for number, option in enumerate(options):
        name, equals, value = option.partition("=")
        if equals and not value.startswith("env:"):
            variable = f"{VARIABLE}_{number}"
            values[variable] = value
            option = f"{name}=env:{variable}"
        # What is no pair is refused by the suite, which repeats nothing of it; it is not put on the command line either.
        shown.append(option if equals else "")
    return shown, values


def _run(arguments: Sequence[str], variables: dict[str, str]) -> int:
    """Run a module of Python, and return its exit code.

    A backend may end the process that tests it, with any code, or keep it from ending. So success counts only if the suite has said so, in
    a file; and once it has, the process gets `LINGER_S` to end.
    """
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        told = Path(folder) / "exit-code"
        process = subprocess.Popen([sys.executable, "-m", *arguments], env=_environment() | variables | {TOLD: str(told)})
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = _wait(process, told)
        finally:
            signal.signal(signal.SIGTERM, before)
        said = int(told.read_text()) if told.exists() else None
    if code is None:
        return said or EXIT_OK
    if code < 0:
        return _refuse(f"the run was ended by {signal.Signals(-code).name}", EXIT_FAILED)
    if code == EXIT_OK and said is None:
        return _refuse("the backend ended the process before the run was over: no verdict", EXIT_FAILED)
    return code or said or EXIT_OK


def _wait(process: subprocess.Popen[bytes], told: Path) -> int | None:
    """The exit code; None when the process had said its own and did not end."""
    end_s = math.inf
    while True:
        try:
            return process.wait(POLL_S)
        except KeyboardInterrupt:
            # The process got it as well, and says how far it came.
            continue
        except subprocess.TimeoutExpired:
            if told.exists():
                end_s = min(end_s, time.monotonic() + LINGER_S)
            if time.monotonic() >= end_s:
                process.kill()
                process.wait()
                return None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in MISLEADING}


def _refuse(problem: str, code: int = EXIT_USAGE) -> int:
    print(f"kvstore conformance: {problem}", file=sys.stderr)
    return code
