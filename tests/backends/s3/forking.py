"""A forked child for a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_child(step: Callable[[], object]) -> None:
    """Run `step` in a forked child and pass on that it failed. It has a minute."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            step()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # nothing may get back into pytest in this process
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
