"""Nodes as a test sees them: processes that are told what to do, paused, killed and looked at."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from p2p_network import Machine
from soak_watch import children_of, is_alive, look_at

__all__ = ["LATE_S", "NodeProcess", "loads_all", "names", "wait_for"]

SCRIPT = Path(__file__).parent / "p2p_node.py"
ANSWER_S = 60.0
LIMIT_S = 40.0
PATIENT_S = 10.0
"""For a peer to answer a look-up. One that is alive and has to wait for a core is not taken for one that is not."""

LATE_S = 15.0
"""How late an answer may be on a busy machine. What has run into another time-out than its own, of a kernel's or of none, is later."""

_lives = itertools.count()


def names(prefix: str, count: int) -> list[str]:
    return [f"v1/test/{prefix}-{number}" for number in range(count)]


def wait_for(condition: Callable[[], object], within_s: float = LIMIT_S) -> None:
    """Until it is true."""
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, f"not so within {within_s:g} s"
        time.sleep(0.02)


def loads_all(node: NodeProcess, wanted: list[str], size: int, timeout_s: float = 10.0) -> bool:
    """Look up and load, once. Whether all came; a byte that is wrong is an error at once."""
    if node.ask("exists", names=wanted, timeout_s=timeout_s)["answers"] != [True] * len(wanted):
        return False
    done = node.ask("get", names=wanted, size=size, timeout_s=timeout_s)
    assert done["wrong"] == 0
    assert done["took_s"] < timeout_s + LATE_S
    return bool(set(done["statuses"]) == {"FOUND"})


class NodeProcess:
    """One node, in a network of its own where `machine` is given.

    Attributes:
        address: `host:port` at which it listens, once it is open.
    """

    def __init__(self, machine: Machine | None = None, environment: dict[str, str] | None = None) -> None:
        self.address = ""
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        command = [sys.executable, str(SCRIPT)]
        self._process = subprocess.Popen(
            machine.enter(command) if machine is not None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | (environment or {}),
        )
        self._reader = threading.Thread(target=self._read, name=f"node-{next(_lives)}-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def family(self) -> list[int]:
        """The process, and those that it started."""
        return [self.pid, *children_of(self.pid)]

    def begin(self, do: str, **arguments: Any) -> Future[Any]:
        """Tell it, and do not wait."""
        number, asked = next(self._numbers), Future[Any]()
        with self._lock:
            self._asked[number] = asked
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"id": number, "do": do} | arguments).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            asked.set_exception(ProcessLookupError(f"the node is gone: {self.log()}"))
        return asked

    def ask(self, do: str, **arguments: Any) -> Any:
        """Tell it, and wait for the answer."""
        try:
            return self.begin(do, **arguments).result(ANSWER_S)
        except TimeoutError:
            raise TimeoutError(f"{do}: no answer in {ANSWER_S:g} s: {self.log()}") from None

    def open(self, target: str = "p2p://127.0.0.1:0", *, slots: int = 64, slot_bytes: int = 1 << 20, **options: Any) -> str:
        """Open a backend by its URL. Returns the address of a node."""
        patient = {"answer_timeout_s": PATIENT_S} if target.startswith("p2p:") else {}
        self.address = self.ask("open", target=target, options=patient | options, slots=slots, slot_bytes=slot_bytes)["address"]
        return self.address

    def lent(self) -> int:
        """Records that it keeps where they are for its peers: found for them, or on their way."""
        stats = self.ask("stats")
        return int(stats["served_leases_now"] + stats["served_sending_now"])

    def pause(self) -> None:
        """SIGSTOP of all of it: nothing of it runs when this returns."""
        for pid in self.family:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: all(_is_stopped(pid) for pid in self.family))

    def go_on(self) -> None:
        for pid in self.family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """`kill -9`. What it started ends by itself, which is waited for."""
        children = children_of(self.pid)
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        wait_for(lambda: not any(map(is_alive, children)))

    def use(self, *pids: int) -> tuple[int, int, int]:
        """Of all of it, or of these of its processes: memory of their own in bytes, open descriptors, threads."""
        looks = [look for look in map(look_at, pids or self.family) if look is not None]
        return sum(look.anonymous_bytes for look in looks), sum(look.descriptors for look in looks), sum(look.threads for look in looks)

    def end(self) -> int | None:
        """Let it close, or kill it where it does not in time; its exit code. Idempotent."""
        if self._process.returncode is None:
            self.go_on()
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        return self._process.returncode

    def log(self, tail: int = 4000) -> str:
        """The end of what it logged and printed."""
        if self._log.closed:
            return ""
        return os.pread(self._log.fileno(), 1 << 20, max(0, os.fstat(self._log.fileno()).st_size - tail)).decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                # The last line of a node that was killed.
                continue
            with self._lock:
                asked = self._asked.pop(said["id"])
            if "error" in said:
                asked.set_exception(RuntimeError(said["error"]))
            else:
                asked.set_result(said["answer"])
        with self._lock:
            left, self._asked = self._asked, {}
        for asked in left.values():
            if not asked.done():
                asked.set_exception(ProcessLookupError("the node is gone"))


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True
