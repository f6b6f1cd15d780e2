"""A real Redis, or Valkey, server for a test: its own process, on a free port of the loopback, keeping nothing on disk."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

START_TIMEOUT_S = 20.0
PORT_TRIES = 5  # a free port can be taken by somebody else before the server has it


class RedisServer:
    """Not started yet; `redis_server` gives one that runs, and ends it."""

    def __init__(self, folder: Path, settings: Sequence[str] = ()) -> None:
        """`settings` are lines of redis.conf, more than those that are always there."""
        self.port = 0
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of database 0, without a prefix: append `/<prefix>`."""
        return f"acmeredis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when the server answers. After a `stop` it has the same port again, and no record."""
        for last in [*[False] * (PORT_TRIES - 1), True]:
            port = self.port or _free_port()
            try:
                self._start(port)
            except ChildProcessError:
                if last or self.port:
                    raise
            else:
                self.port = port
                return

    def stop(self) -> None:
        """End the process at once. Idempotent."""
        if self._process is not None:
            self._process.kill()  # also one that is paused
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Make it hang: connections are still accepted by the kernel, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _start(self, port: int) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None, "these tests need a server: apt-get install redis-server"
        always = ["bind 127.0.0.1", f"port {port}", f'dir "{self._folder}"', 'save ""', "appendonly no", "daemonize no", 'logfile "log"']
        config, log = self._folder / "redis.conf", self._folder / "log"
        config.write_text("\n".join([*always, *self._settings, ""]))
        self._process = subprocess.Popen([program, config])
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not _answers(port):
            if self._process.poll() is not None:
                self.stop()
                raise ChildProcessError(f"{program} ended: {log.read_text() if log.exists() else 'no log'}")
            if time.monotonic() > give_up_at:
                self.stop()
                raise TimeoutError(f"{program} does not answer on port {port}")
            time.sleep(0.02)


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    # Any answer will do: one that wants a password says so.
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(1) in (b"+", b"-")
    return False
