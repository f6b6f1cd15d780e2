"""What runs in the child: one backend, called as the parent asks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    SupportsDelete,
    SupportsList,
    SupportsRegions,
    SupportsSettle,
    SupportsUsage,
    open_backend,
)
from kvstore_sdk.isolation.crossing import pack_capabilities, pack_error
from kvstore_sdk.isolation.inside import enter_child
from kvstore_sdk.isolation.line import Line
from kvstore_sdk.isolation.logs import SendsRecords
from kvstore_sdk.isolation.service import Service

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 4096
"""What servers allow a process; a leak ends here, and not in the machine's table of files."""
_OOM_SCORE = 500
"""When memory runs out, the kernel takes the child before the engine."""


def main(fd: int, parent_pid: int) -> None:
    """Serve the parent at the other end of `fd` until it is gone. Never returns."""
    try:
        _confine(parent_pid)
        _serve(Line(socket.socket(fileno=fd)))
    except BaseException as error:  # noqa: BLE001  # the end of this process; its parent shall know why
        logging.getLogger("kvstore_sdk.isolation").error("the child ends: %s: %s", type(error).__name__, error)
    finally:
        # Threads of vendor code may hang, and nobody waits for what they would still do.
        os._exit(1)


def _confine(parent_pid: int) -> None:
    """Bound this process before any code of a vendor runs in it."""
    # The parent's thread that started us lives as long as we are to.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before that, and what it wants opened already waits in the line.
    if os.getppid() != parent_pid:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # The engine ends us when it is done, also when somebody presses Ctrl-C in its terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A daemon has no standard error, and what opens a file next would be written to as if it were.
    try:
        os.fstat(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != 2:
            os.dup2(nowhere, 2)
            os.close(nowhere)
    # Standard output may be the answer of a command; nothing of a backend belongs there.
    os.dup2(2, 1)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < _OOM_SCORE:
            file.write(str(_OOM_SCORE))
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        faulthandler.enable()
    enter_child()


def _serve(line: Line) -> None:
    hello, _ = line.receive()
    label = str(hello["label"])
    sys.path[:] = hello["sys_path"]
    handler = SendsRecords(line.send)
    logging.basicConfig(handlers=[handler], level=hello["log_level"], format="%(message)s", force=True)
    try:
        backend = open_backend(hello["target"], hello["options"], location=hello["location"])
        offer = {"capabilities": pack_capabilities(backend.capabilities), "surfaces": _surfaces(backend)}
        service = Service(backend, line, label)
    except BaseException as error:  # noqa: BLE001  # whatever a vendor's code raised, the parent is told
        line.send([0, False, pack_error(error, f"{label}: open")])
        # It ends us once it has read that.
        for _ in itertools.repeat(None):
            line.receive()
    line.send([0, True, offer])
    service.run()


def _surfaces(backend: Backend) -> list[str]:
    surfaces: tuple[Any, ...] = (SupportsDelete, SupportsList, SupportsUsage, SupportsRegions, SupportsSettle)
    return [surface.__name__ for surface in surfaces if isinstance(backend, surface)]
