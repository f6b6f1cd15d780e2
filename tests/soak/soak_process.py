"""A worker as its parent sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from soak_plan import Plan
from soak_watch import children_of

__all__ = ["WorkerProcess"]

WORKER = Path(__file__).parent / "soak_worker.py"
START_S = 60.0
END_S = 300.0


class WorkerProcess:
    """Starts at once. What it logs goes to `worker-<life>.log`.

    Attributes:
        ready: What it said when it had opened its stores.
        report: What it said last about itself.
        end: What it said when it had closed; None before.
    """

    def __init__(self, plan: Plan, life: int, until_s: float, places: dict[str, dict[str, Any]], planted: bool) -> None:
        self.life = life
        self.ready: dict[str, Any] | None = None
        self.report: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self._changed = threading.Condition()
        with Path(plan.out, f"worker-{life}.log").open("wb") as log:
            self._process = subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self._reader = threading.Thread(target=self._read, name=f"soak-reader-{life}", daemon=True)
        self._reader.start()
        needs = {"plan": plan.text(), "life": life, "until_s": until_s, "places": places, "planted": planted}
        self._tell(json.dumps(needs))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def wait_ready(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.ready is not None or not self.is_running, START_S) and self.ready is not None

    def finish(self) -> None:
        """Tell it to come to rest and close; `wait_ended` waits for that."""
        self._tell("end")

    def wait_ended(self) -> bool:
        """Wait until it has. False: it did not in time, and was killed, or it ended in another way."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()
        return self.end is not None and self._process.returncode == 0

    def kill(self) -> list[int]:
        """`kill -9`. Returns the children that it had."""
        children = children_of(self.pid) if self.is_running else []
        self._process.kill()
        self._process.wait()
        self._close()
        return children

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                # The last line of a worker that was killed.
                continue
            with self._changed:
                if "ready" in said:
                    self.ready = said
                elif "ended" in said:
                    self.end = said
                else:
                    self.report = said
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _close(self) -> None:
        self._reader.join(10.0)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
