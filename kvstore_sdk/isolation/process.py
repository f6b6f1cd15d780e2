"""The child as a process: started, watched, killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from kvstore_sdk.backend import UnavailableError

__all__ = ["ChildProcess"]

_ROOT = str(Path(__file__).parents[2])
# Appended: whatever else lies beside the package must not come before the standard library.
_COMMAND = "import sys; sys.path.append(sys.argv[1]); from kvstore_sdk.isolation.child import main; main(*map(int, sys.argv[2:]))"


class ChildProcess:
    """One child. Made, and all methods but `kill` called, by one thread that lives as long as the child is to: with it the child ends.

    Attributes:
        socket: This end of the line to it.
        pid: Of the child; it leads a session and a process group of its own.
    """

    def __init__(self, cwd: str | None) -> None:
        """Start it. Nothing about the store is in its arguments or its environment.

        Raises:
            UnavailableError: no process or descriptor is to be had.
        """
        if not sys.executable:
            raise UnavailableError("isolation: this process does not know its Python interpreter, so no child can be started")
        try:
            self.socket, theirs = map(_beside_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as cause:
            raise UnavailableError(f"isolation: no socket pair for a child ({cause.strerror})") from cause
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P: no module of the working folder comes before those of the standard library.
                    [sys.executable, "-P", "-c", _COMMAND, _ROOT, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    close_fds=True,
                    # A folder that was removed since holds nothing for a store, but must not keep it from being opened.
                    cwd=cwd if cwd is not None and os.path.isdir(cwd) else "/",
                )
            self.pid = self._process.pid
            # Names this process even when somebody else has waited for it and its number was given again.
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as cause:
            self.socket.close()
            if hasattr(self, "_process"):
                self._process.kill()
                self._process.wait()
            raise UnavailableError(f"isolation: the child cannot be started ({cause.strerror})") from cause
        self._closed = False
        # Guards the number of the pidfd against being closed, and given to something else, while it is used.
        self._killing = threading.Lock()

    def fileno(self) -> int:
        """Readable once the process, all its threads and its memory are gone."""
        return self._pidfd

    @property
    def gone(self) -> bool:
        """Whether it has ended, so that nothing of it touches memory any more."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is gone, for so long at most; whether it is."""
        # Unlike select, it takes descriptors of any number.
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """End it; `reap` ends what it started. From any thread; does not wait."""
        with self._killing:
            if not self._closed:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def reap(self) -> str:
        """After it is gone: take it from the table of processes, and end what it left in its group. Returns how it ended."""
        # Until it is waited for, its number is not given to another group. Somebody else may have done so: then nothing is found.
        with contextlib.suppress(OSError):
            if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait(timeout=1.0)
        if code < 0:
            try:
                return f"killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"killed by signal {-code}"
        return f"ended with exit code {code}"

    def private_bytes(self) -> int | None:
        """Memory of its own, in RAM and swapped out; regions and files do not count. None where the kernel does not say."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return None
        found = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
        if "RssAnon" not in found:
            return None
        return sum(int(value.split()[0]) * 1024 for value in found.values())

    def leave(self) -> None:
        """Close what belongs to it here. The socket is its user's to close."""
        with self._killing:
            self._closed = True
            os.close(self._pidfd)
        # Whoever asks later hears how it ended, and not a warning that nobody waited for it.
        self._process.returncode = self._process.returncode if self._process.returncode is not None else -signal.SIGKILL

    def forget(self) -> None:
        """In a forked process: the child is not its child. Nobody else is here to hold the lock for."""
        if not self._closed:
            self._closed = True
            os.close(self._pidfd)
        self._process.returncode = 0


def _beside_standard(sock: socket.socket) -> socket.socket:
    """The socket under a number that is none of the standard streams', which this process may have closed."""
    if sock.fileno() > 2:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
