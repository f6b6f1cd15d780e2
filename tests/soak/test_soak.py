"""The soak itself: some seconds of it are good, and with a mistake in it they are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from soak_plants import PLANTS
from soak_watch import children_of, is_alive, look_at

COMMAND = Path(__file__).parent / "soak.py"
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(300)

LEFT = {"descriptors and threads left after close", "more than before, once it is at rest"}
MISTAKES: dict[str, set[str]] = {
    "": set(),
    "wrong-byte": {"wrong bytes"},
    "leak": {"growth of memory"},
    "descriptors": {"growth of descriptors", *LEFT},
    "threads": {"growth of threads", *LEFT},
    "stuck-job": {"stuck jobs and requests"},
    "lost-request": {"stuck jobs and requests"},
}
"""What is planted, and what is found: one of these. Seconds on a busy machine may have too few samples for a slope."""


class Soaking:
    """A soak that runs."""

    def __init__(self, out: Path, *options: str) -> None:
        self.out = out
        command = [sys.executable, str(COMMAND), "--out", str(out), "--seed", "3", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended(self) -> tuple[int, dict[str, Any], str]:
        """Its exit code, what it found, and what it printed."""
        printed, _ = self.process.communicate(timeout=LIMIT_S)
        said = json.loads((self.out / "soak.json").read_text()) if (self.out / "soak.json").exists() else {}
        return self.process.returncode, said, printed

    def kill(self) -> None:
        """Its processes end by themselves then."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def soaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Soaking]]:
    """One with each mistake, all at once: each waits more than it computes."""
    common = ("--tiers", "fs")
    # Long enough that some faults hit although all of them share a busy machine.
    running = {"": Soaking(tmp_path_factory.mktemp("good") / "out", *common, "--seconds", "20")}
    for mistake in filter(None, MISTAKES):
        options = (*common, "--seconds", "8", "--workers", "1", "--stuck-s", "3", "--rest-s", "3", "--plant", mistake)
        running[mistake] = Soaking(tmp_path_factory.mktemp(mistake) / "out", *options)
    yield running
    for one in running.values():
        one.kill()


def bad(said: dict[str, Any]) -> set[str]:
    return {finding["what"] for finding in said["findings"] if not finding["good"]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_some_seconds_are_good_and_with_a_mistake_they_are_not(soaks: dict[str, Soaking], mistake: str) -> None:
    code, said, printed = soaks[mistake].ended()
    assert code == (1 if mistake else 0), printed
    if mistake:
        assert MISTAKES[mistake] & bad(said), printed
    else:
        assert said["counts"]["verified_bytes"] > 1e6
        assert said["kills"] > 0
        assert (soaks[mistake].out / "soak.svg").exists()


def test_every_mistake_that_can_be_planted_is_tried() -> None:
    assert set(PLANTS) == set(MISTAKES) - {""}


def test_a_worker_that_dies_is_found(tmp_path: Path) -> None:
    running = Soaking(tmp_path / "out", "--seconds", "60", "--tiers", "fs", "--workers", "1")
    assert running.process.stdout is not None
    assert "began" in running.process.stdout.readline()
    [worker] = children_of(running.process.pid)
    os.kill(worker, signal.SIGKILL)
    code, said, printed = running.ended()
    assert code == 1
    assert "workers that ended by themselves" in bad(said), printed


@pytest.mark.parametrize("options", [["--tiers", "tape"], ["--seconds", "-1"], ["--plant", "roses"]])
def test_a_wrong_command_line_is_refused(tmp_path: Path, options: list[str]) -> None:
    code, _, printed = Soaking(tmp_path / "out", *options).ended()
    assert code == 2
    assert len(printed.strip().splitlines()[-1]) < 300


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    code, _, printed = Soaking(tmp_path).ended()
    assert code == 2, printed
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    program = "import time; print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_kernel_tells_of_processes(sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.pid in children_of(os.getpid())
    assert is_alive(sleeper.pid)
    look = look_at(sleeper.pid)
    assert look is not None
    assert (look.threads, look.memory_bytes > 1 << 20, look.descriptors >= 3) == (1, True, True)
    sleeper.kill()
    sleeper.wait()
    assert not is_alive(sleeper.pid)
    assert look_at(sleeper.pid) is None
