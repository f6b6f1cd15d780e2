"""Processes that have a location open, and can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.target import Place

__all__ = ["Child"]

START_S = 60.0
ANSWER_S = 60.0
END_S = 10.0
"""For the kernel, to end a process that was killed, and for what it wrote to be read."""
_READ_BYTES = 1 << 16
_LOOK_S = 0.002
_SHOWN = 2


class Child:
    """A process that runs `kvstore_sdk_conformance.child`, and answers one line for each line that it is sent.

    What the backend prints goes to a file, the tail of which is part of what is said when the process ends unasked. Processes that the
    backend started and left behind end with `discard`, not with `kill`: they may be where its records are.

    Args:
        log: Takes what the process is told, as comments of a script.
        shared: Whether the backend declares that processes share a location: then one that cannot open it breaks that.
    """

    def __init__(self, place: Place, *, shared: bool, log: Callable[[str], None]) -> None:
        self._place = place
        self._tell = log
        self._shared = shared
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `kill`
        paths = [*place.import_path, *sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        # By -c: with -m the folder that this process was started in would come first on the path.
        command = [sys.executable, "-c", "from kvstore_sdk_conformance.child import main; main()"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Open the location.

        Raises:
            ConformanceFailure: it could not.
        """
        self._tell("# another process opens the location")
        # By a pipe, not by the command line: options may be secret.
        self.post(**self._place.to_json())
        answer = self.receive(START_S)
        if "error" in answer:
            breaks = "KV-SHARE-01" if self._shared else None
            raise ConformanceFailure("another process to open the location", answer["error"], breaks=breaks)

    def post(self, **command: Any) -> None:
        """Send a command, and wait for nothing."""
        assert self._process.stdin is not None
        if "do" in command:
            told = ", ".join(f"{name}={_short(value)}" for name, value in command.items() if name != "do")
            self._tell(f"# another process: {command['do']}({told})")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The next line.

        Raises:
            ConformanceFailure: there is none in time, or the process ended.
        """
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        # `select` takes no descriptor above 1,023, and a backend may have many open.
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._rest:
            ready = waiting.poll(1000.0 * max(0.0, until_s - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), _READ_BYTES) if ready else None
            if piece is None:
                raise ConformanceFailure("an answer of another process", f"none within {timeout_s:g} s", breaks="KV-LIVE-03")
            if not piece:
                raise ConformanceFailure("another process to go on", f"its end: {self.log()[-2000:]}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def ask(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Send a command and return its answer.

        Raises:
            ConformanceFailure: the answer is that a requirement is broken, or there is none.
        """
        self.post(do=do, **arguments)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to a command that was posted.

        Raises:
            ConformanceFailure: it is that a requirement is broken, or there is none.
        """
        line = self.receive(timeout_s)
        if "failure" in line:
            raise ConformanceFailure(**line["failure"])
        return line["answer"]

    def store(self, names: Sequence[str], size: int, tag: int, mode: str = "create") -> None:
        """Store what the check needs, like `View.store`: `Record(size, tag)`, `Record(size, tag + 1)` and so on."""
        self.ask("store", names=list(names), size=size, tag=tag, mode=mode)

    def put(self, names: Sequence[str], size: int, tag: int, mode: str = "create") -> list[str]:
        """Put a record under each name: `Record(size, tag)`, `Record(size, tag + 1)` and so on. Returns the names of the statuses."""
        answer: list[str] = self.ask("put", names=list(names), size=size, tag=tag, mode=mode)
        return answer

    def get(self, names: Sequence[str], size: int, tags: Sequence[int]) -> list[tuple[str, int | None]]:
        """For each name the status, and which of the tags the record has; None: none of them."""
        answer = self.ask("get", names=list(names), size=size, tags=list(tags))
        return [(status, tag) for status, tag in answer]

    def exists(self, names: Sequence[str]) -> list[bool | str]:
        """For each name the answer, or the text of the failure."""
        answer: list[bool | str] = self.ask("exists", names=list(names))
        return answer

    def delete(self, names: Sequence[str]) -> list[str]:
        answer: list[str] = self.ask("delete", names=list(names))
        return answer

    def kill(self) -> None:
        """`kill -9`, and read what the process wrote before. Idempotent."""
        if self._process.returncode is None:
            self._tell("# another process: kill -9")
            os.kill(self.pid, signal.SIGKILL)
            self._wait(END_S)
            self._drain()

    def discard(self) -> None:
        """End the process and whatever it left behind. Idempotent."""
        if self._process.returncode is None:
            self.kill()
            # Until it is waited for no other group of processes can have its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(END_S)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            # What was not sent is lost with its reader.
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def left(self) -> list[Any]:
        """Whole lines that it sent and nobody received, once it was killed."""
        *lines, _ = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self, timeout_s: float = 20.0) -> None:
        """Let it close its backend and end."""
        self.post(do="exit")
        self._wait(timeout_s)
        self.discard()

    def log(self) -> str:
        """What the process printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _wait(self, timeout_s: float) -> None:
        """Until the process has ended, or the time is over. It keeps its number."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(_LOOK_S)

    def _drain(self) -> None:
        """Read what the dead process wrote. That is all there; the pipe does not end while a process that it forked has it open."""
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        os.set_blocking(source, False)
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s:
            try:
                piece = os.read(source, _READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                return
            self._rest += piece


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > _SHOWN:
        return f"[{', '.join(map(repr, value[:_SHOWN]))}, and {len(value) - _SHOWN} more]"
    return repr(value)
