"""A backend that is right, and whose every process has a helper: forked when it is opened, with all that its parent has open."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore_sdk.backend import Backend, Deadline
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.fs import open_fs

__all__ = ["LIFE_S", "Helped", "open_helped"]

LIFE_S = 120.0
"""Of a helper that nobody ends: well beyond what a check waits for."""


def open_helped(location: str) -> Helped:
    return Helped(open_fs(location), Path(location).parent.parent / "helpers")


class Helped(BackendWrapper):
    """Ends its helper when it is closed. A process that is killed leaves it behind; `pids` gets a file for each helper."""

    def __init__(self, inner: Backend, pids: Path) -> None:
        super().__init__(inner)
        self._parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._helper = os.fork()
        if self._helper == 0:
            time.sleep(LIFE_S)
            os._exit(0)
        pids.mkdir(exist_ok=True)
        (pids / str(self._helper)).touch()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "close" and self._helper and os.getpid() == self._parent:
            helper, self._helper = self._helper, 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
        return proceed(items)
