"""A process that has a location open and does what it is told, a line at a time: the other half of `children`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from kvstore_sdk.backend import DeleteStatus, Failure, KVStoreError, Mode, Put
from kvstore_sdk_conformance.data import Record, which
from kvstore_sdk_conformance.engines import Engines
from kvstore_sdk_conformance.failure import ConformanceFailure, show
from kvstore_sdk_conformance.forks import Forks
from kvstore_sdk_conformance.steps import create
from kvstore_sdk_conformance.target import Place
from kvstore_sdk_conformance.tier_driver import Engine, payload_sizes
from kvstore_sdk_conformance.view import View

__all__ = ["Programs", "main"]


def main() -> None:
    """Read the place, open it, and carry commands out until one says `exit`, or the input ends."""
    # Whatever a backend prints must not look like an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    place = Place.from_json(json.loads(sys.stdin.buffer.readline()))
    try:
        programs = Programs(place, answers)
    except KVStoreError as error:
        _send(answers, {"error": str(error)})
        return
    _send(answers, {})
    for line in sys.stdin.buffer:
        command = json.loads(line)
        do = command.pop("do")
        if do == "exit":
            break
        try:
            _send(answers, {"answer": getattr(programs, do)(**command)})
        except ConformanceFailure as failure:
            found = {"expected": failure.expected, "seen": failure.seen, "note": failure.note, "breaks": failure.breaks}
            _send(answers, {"failure": found})
    programs.view.close()


class Programs(Engines, Forks):
    """What the process can be told to do; arguments and answers are JSON."""

    def __init__(self, place: Place, answers: BinaryIO) -> None:
        self.place = place
        self._answers = answers
        self.view = View("child", place.open(), lambda _: None)

    def put(self, names: Sequence[str], size: int, tag: int, mode: str) -> list[str]:
        """`Record(size, tag + number)` under each name, in batches."""
        statuses: list[str] = []
        for batch in self.view.batches([(name, Record(size, tag + number)) for number, name in enumerate(names)]):
            statuses += [result.status.name for result in self.view.put_all(batch, Mode(mode))]
        return statuses

    def store(self, names: Sequence[str], size: int, tag: int, mode: str) -> None:
        """Like `put`, trying again what may be tried again, until everything is there."""
        self.view.store(*((name, Record(size, tag + number)) for number, name in enumerate(names)), mode=Mode(mode))

    def create(self, names: Sequence[str], size: int, tag: int, batch: int, at_s: float) -> dict[str, Any]:
        """`Record(size, tag)` under each name, in calls of `batch` from the instant `at_s` on.

        Returns each status, and as it is shown, as `answers`; and when that began and ended, by the clock that all processes share.
        """
        time.sleep(max(0.0, at_s - time.monotonic()))
        began_s = time.monotonic()
        results = create(self.view, names, size, tag, batch)
        answers = [(result.status.name, show(result)) for result in results]
        return {"answers": answers, "began_s": began_s, "ended_s": time.monotonic()}

    def stream(self, names: Sequence[str], size: int, tag: int, mode: str, batch: int) -> int:
        """Like `put`, in calls of `batch`; before each call a line `{"putting": [numbers]}`, after it `{"put": [[number, status]]}`.

        Between the two lines there is nothing but the call.
        """
        numbered = list(enumerate(names))
        for start in range(0, len(numbered), batch):
            some = numbered[start : start + batch]
            with self.view.lend([size] * len(some)) as arena:
                for buffer, (number, _) in zip(arena.buffers, some, strict=True):
                    buffer.view[:] = Record(size, tag + number).bytes
                puts = [Put(name, (buffer,), Mode(mode)) for buffer, (_, name) in zip(arena.buffers, some, strict=True)]
                _send(self._answers, {"putting": [number for number, _ in some]})
                results = self.view.raw("put", puts)
                answered = [[number, result.status.name] for (number, _), result in zip(some, results, strict=True)]
                _send(self._answers, {"put": answered})
        return len(numbered)

    def get(self, names: Sequence[str], size: int, tags: Sequence[int]) -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        for batch in self.view.batches([(name, size) for name in names]):
            found += [(got.result.status.name, which(got.bytes, tags)) for got in self.view.get_all(batch)]
        return found

    def exists(self, names: Sequence[str]) -> list[bool | str]:
        answers = [answer for batch in self.view.batches(names) for answer in self.view.exists(*batch)]
        return [show(answer) if isinstance(answer, Failure) else answer for answer in answers]

    def delete(self, names: Sequence[str]) -> list[str]:
        answers = [answer for batch in self.view.batches(names) for answer in self.view.delete(*batch)]
        return [answer.name if isinstance(answer, DeleteStatus) else show(answer) for answer in answers]

    def load_chunks(self, keys: Sequence[str], visible_s: float) -> tuple[list[str], str]:
        """Look up and load these chunks with a Tier. Returns those that are not there, and what the Tier counted."""
        engine = Engine(self.view, payload_sizes(self.view.capabilities), "tier-child")
        left = engine.load([bytes.fromhex(key) for key in keys], visible_s)
        counted = engine.counted()
        engine.close()
        return [key.hex() for key in left], counted

    def close(self) -> None:
        self.view.close()

    def reopen(self) -> None:
        """A new view in the place of the old one."""
        self.view = View("child", self.place.open(), lambda _: None)


def _send(answers: BinaryIO, message: object) -> None:
    answers.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
