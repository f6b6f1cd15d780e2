"""CAP-01, ATM-09, ATM-10: a bound that holds at every moment, whoever writes, reads and dies."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline

_log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("child.py")
WRITERS = READERS = 6
LARGEST = 65536
SAMPLE_EVERY_S = 0.1


class Crowd:
    """Processes in places; a place whose process was killed gets a new one."""

    def __init__(self, complaints: Path) -> None:
        self.complaints = complaints
        self.places: dict[str, tuple[str, ...]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.killed = 0
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(self, place: str, *arguments: object) -> None:
        self.places[place] = tuple(map(str, arguments))
        with self.complaints.open("ab") as errors:
            self.running[place] = subprocess.Popen(
                [sys.executable, str(CHILD), *self.places[place]], stdout=subprocess.DEVNULL, stderr=errors, env=self._environment
            )

    def replace(self, place: str) -> None:
        process = self.running[place]
        process.kill()
        if process.wait(30) == -signal.SIGKILL:
            self.killed += 1
            self.start(place, *self.places[place])

    def stop(self) -> None:
        """Nobody moves until `go_on`: files are counted one after another, and shall all be of one moment."""
        for process in self.running.values():
            process.send_signal(signal.SIGSTOP)
        for process in self.running.values():
            for _ in range(10_000):
                if process.poll() is not None or Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ":
                    break
                time.sleep(0.0005)

    def go_on(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(30)


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    made = Crowd(tmp_path / "complaints")
    yield made
    made.end()


def bytes_in(folder: Path) -> int:
    total = 0
    for above, _, names in os.walk(folder):
        if not above.endswith("/space"):
            total += sum(os.stat(f"{above}/{name}").st_size for name in names)
    return total


@pytest.mark.parametrize(
    ("count", "max_bytes", "kills"),
    [(2_000, 100 << 20, 8), pytest.param(20_000, 500 << 20, 300, marks=pytest.mark.long)],
    ids=["short", "long"],
)
@pytest.mark.timeout(900)
def test_the_bound_holds_while_writers_and_readers_are_killed(
    count: int,
    max_bytes: int,
    kills: int,
    crowd: Crowd,
    memory_folder: Path,
    tmp_path: Path,
    open_folder: Callable[..., Any],
) -> None:
    folder, chance = memory_folder / "kv", random.Random(9)
    notes = [tmp_path / f"note-{number}" for number in range(WRITERS + READERS)]
    for note in notes:
        note.touch()
    for writer in range(WRITERS):
        crowd.start(f"writer {writer}", "hoard", folder, max_bytes, writer, count, notes[writer])
    for reader in range(READERS):
        crowd.start(f"reader {reader}", "consult", folder, max_bytes, count, reader, notes[WRITERS + reader])
    samples = []
    while writing := [place for place in crowd.running if place.startswith("writer") and crowd.running[place].poll() is None]:
        time.sleep(SAMPLE_EVERY_S)
        crowd.stop()
        try:
            samples.append(bytes_in(folder))
        finally:
            crowd.go_on()
        # By what was stored, for a fast machine is through in a second.
        stored = sum(int(note.read_bytes() or b"0") for note in notes[:WRITERS])
        for _ in range(stored * kills // (WRITERS * count) - crowd.killed):
            crowd.replace(chance.choice(writing + [f"reader {reader}" for reader in range(READERS)]))
    assert [int(note.read_bytes()) for note in notes[:WRITERS]] == [count] * WRITERS
    for note in notes[WRITERS:]:
        note.with_name(note.name + ".stop").touch()
    assert {place: process.wait(30) for place, process in crowd.running.items()} == dict.fromkeys(crowd.running, 0)
    assert crowd.complaints.read_text() == ""
    found = [int(note.read_bytes() or b"0") for note in notes[WRITERS:]]
    in_flight = WRITERS * LARGEST
    _log.info(
        "%d killed, %d samples, at most %.4f of max_bytes, %d found", crowd.killed, len(samples), max(samples) / max_bytes, sum(found)
    )
    assert max(samples) <= max_bytes * 1.02 + in_flight
    assert max(samples) > max_bytes * 0.9, "the bound was never reached, so nothing was shown"
    assert sum(found) > 100
    assert crowd.killed > kills // 2

    after = open_folder(folder, max_bytes=max_bytes)
    usage = after.usage(Deadline.after(60))
    assert (usage.used_bytes, usage.capacity_bytes) == (bytes_in(folder / "v1"), max_bytes)
    assert max_bytes * 0.8 < usage.used_bytes <= max_bytes
