"""The whole comparison in one run: what a script does, or fails to do, must neither hold up the others nor be kept quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 60.0

# A process of its own runs them: it ends all that it finds below itself.
DRIVER = """
import sys
sys.path.insert(0, {source!r})
from pathlib import Path
import plan, run
plan.HERE = Path({here!r})
run.GRACE_S = 2.0
def script(name, **more):
    more = dict(outputs=("json", "markdown", "svg"), memory_gb=0.0) | more
    return plan.Script(name, "what " + name + " shows", {{"quick": ("--few",), "full": ()}}, **more)
sys.exit(run.main(sys.argv[1:], [{scripts}]))
"""

GOOD = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("--json", "--markdown", "--svg", "--folder"):
    parser.add_argument(name, type=pathlib.Path)
parser.add_argument("--few", action="store_true")
args = parser.parse_args()
(args.folder / "left over").write_text("x")
entry = {"name": "gil", "target": "", "met": args.few, "found": "3.1 points"}
args.json.write_text(json.dumps({"targets": [entry], "cells": []}))
args.markdown.write_text("## What was found\\n")
args.svg.write_text("<svg/>")
"""


class Run:
    """A folder of scripts, and the folders that a run of them is given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.disk = folder / "scripts", folder / "out", folder / "disk"
        self.folder.mkdir()
        self.disk.mkdir()

    def script(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def start(self, scripts: str, *arguments: str) -> subprocess.Popen[str]:
        driver = DRIVER.format(source=str(SOURCE), here=str(self.folder), scripts=scripts)
        command = [sys.executable, "-c", driver, "--folder", str(self.disk), "--out", str(self.out), *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __call__(self, scripts: str, *arguments: str) -> tuple[int, str]:
        process = self.start(scripts, *arguments)
        said, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, said

    @property
    def index(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "index.json").read_text())
        return found

    @property
    def page(self) -> str:
        return (self.out / "index.md").read_text()

    @property
    def statuses(self) -> dict[str, str]:
        return {one["name"]: one["status"] for one in self.index["scripts"]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_script_found_is_on_the_page_and_nothing_stays_on_the_disk(run: Run) -> None:
    run.script("good", GOOD)
    code, said = run("script('good', targets=('gil', 'scale'), disk_gb={'quick': 0.0, 'full': 0.0})", "--profile", "quick")
    assert code == 0, said
    assert "## What was found" in run.page
    assert "![good](good.svg)" in run.page
    found = [(row["met"], row["found"]) for row in run.index["targets"]]
    # In the order of the targets; of the second nobody said anything.
    assert found == [(True, "3.1 points"), (None, "")]
    assert list(run.disk.iterdir()) == []


def test_a_missed_target_is_stated_and_is_no_failure(run: Run) -> None:
    run.script("good", GOOD)
    code, said = run("script('good', targets=('gil',), disk_gb={'quick': 0.0, 'full': 0.0})")
    assert code == 0, said
    assert "| **missed** | 3.1 points |" in run.page
    assert "1 missed" in said


def test_a_script_that_fails_holds_nobody_up_and_its_targets_count_as_not_run(run: Run) -> None:
    run.script("bad", GOOD + "raise SystemExit('it broke')\n")
    run.script("good", "print('a table | of its own')\n")
    disk = "disk_gb={'quick': 0.0, 'full': 0.0}"
    code, said = run(f"script('bad', targets=('gil',), {disk}), script('good', outputs=())")
    assert code == 1, said
    assert run.statuses == {"bad": "failed", "good": "ok"}
    assert "it broke" in run.index["scripts"][0]["why"]
    assert [row["met"] for row in run.index["targets"]] == [None]
    assert "a table | of its own" in run.page


def test_a_script_that_is_not_done_in_time_is_ended_with_all_that_it_started(run: Run) -> None:
    text = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(run.disk / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    run.script("hangs", text)
    run.script("good", "")
    code, said = run("script('hangs', outputs=(), limit_s=1.5), script('good', outputs=())")
    assert code == 1, said
    assert run.statuses == {"hangs": "ended", "good": "ok"}
    for pid in (run.disk / "pids").read_text().split():
        wait_for(lambda pid=pid: not is_there(int(pid)))  # type: ignore[misc]


def test_what_a_script_leaves_behind_in_a_session_of_its_own_is_ended_too(run: Run) -> None:
    text = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(run.disk / 'pid')!r}).write_text(str(child.pid))\n"
    )
    run.script("leaves", text)
    code, said = run("script('leaves', outputs=())")
    assert code == 0, said
    assert not is_there(int((run.disk / "pid").read_text()))


def test_an_interrupted_run_ends_its_script_and_publishes_what_it_has(run: Run) -> None:
    run.script("good", "")
    run.script("long", f"import pathlib, os, time\npathlib.Path({str(run.disk / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    process = run.start("script('good', outputs=()), script('long', outputs=())")
    wait_for(lambda: (run.disk / "pid").exists() and (run.disk / "pid").read_text() != "")
    process.terminate()
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143, said
    assert run.statuses == {"good": "ok"}
    assert not is_there(int((run.disk / "pid").read_text()))


def test_what_is_lacking_is_said_and_is_no_failure_unless_nothing_ran(run: Run) -> None:
    run.script("good", "")
    lacking = "script('peers', needs=(plan.LMCACHE,), targets=('fs-lmcache',), outputs=()), script('big', outputs=(), memory_gb=1e6)"
    code, said = run(f"{lacking}, script('good', outputs=())")
    assert code == 0, said
    assert run.statuses == {"peers": "lacking", "big": "lacking", "good": "ok"}
    assert "peers is left out: it lacks LMCache (make bench-peers)" in said
    assert "GB of memory" in run.index["scripts"][1]["why"]
    assert run(lacking)[0] == 1


def test_a_disk_that_is_too_small_is_refused_before_anything_runs(run: Run) -> None:
    run.script("good", GOOD)
    code, said = run("script('good', disk_gb={'quick': 1e9, 'full': 1e9})")
    assert code == 2
    assert "it takes" in said
    assert not run.out.exists()


def test_an_earlier_runs_files_do_not_pass_for_this_ones(run: Run) -> None:
    run.script("good", GOOD)
    one = "script('good', targets=('gil',), disk_gb={'quick': 0.0, 'full': 0.0})"
    assert run(one)[0] == 0
    run.script("good", "")
    assert run(one)[0] == 0
    assert [row["met"] for row in run.index["targets"]] == [None]
    assert "What was found" not in run.page


def test_only_what_is_asked_for_runs_and_a_name_that_is_none_is_refused(run: Run) -> None:
    run.script("good", "")
    scripts = "script('good', outputs=()), script('other', outputs=())"
    assert run(scripts, "--only", "good")[0] == 0
    assert run.statuses == {"good": "ok"}
    code, said = run(scripts, "--only", "god")
    assert code == 2
    assert "good, other" in said


def test_every_script_of_the_plan_is_there_and_every_target_has_one_that_judges_it(script: Callable[[str], ModuleType]) -> None:
    plan, targets = script("plan"), script("targets")
    names = [one.name for one in plan.SCRIPTS]
    assert len(set(names)) == len(names)
    assert all((SOURCE / f"{name}.py").is_file() for name in names)
    assert sorted(target for one in plan.SCRIPTS for target in one.targets) == sorted(targets.TARGETS)
    for one in plan.SCRIPTS:
        assert set(one.arguments) == set(plan.PROFILES), one.name
        assert one.disk_gb is None or set(one.disk_gb) == set(plan.PROFILES), one.name


def test_a_target_is_met_when_all_that_judge_it_say_so(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    targets = script("targets")

    def write(name: str, body: object) -> Path:
        (tmp_path / name).write_text(body if isinstance(body, str) else json.dumps(body))
        return tmp_path / name

    files = [
        write("1.json", {"targets": [targets.judge("s3", True, "1.01 of boto3")]}),
        write("2.json", {"targets": [targets.judge("s3", False, "0.90 of s3fs"), targets.judge("gil", True, "2 points")]}),
        write("3.json", [1, 2]),
        write("4.json", "no JSON"),
        tmp_path / "none.json",
    ]
    found = {row.target: (row.met, row.found) for row in targets.verdicts(files)}
    assert found[targets.TARGETS["s3"]] == (False, "1.01 of boto3; 0.90 of s3fs")
    assert found[targets.TARGETS["gil"]] == (True, "2 points")
    assert found[targets.TARGETS["ttft"]] == (None, "")
    assert len(found) == len(targets.TARGETS)
    with pytest.raises(KeyError):
        targets.judge("no target", True, "")
