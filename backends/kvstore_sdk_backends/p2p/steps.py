"""Steps that go on by themselves: nobody waits for what becomes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvstore_sdk.backend import Deadline

__all__ = ["Steps"]

logger = logging.getLogger(__name__)


class Steps:
    """Coroutines on the loop. What one of them raises is logged."""

    def __init__(self, label: str) -> None:
        """On the loop's thread. `label`: of the node, in the log."""
        self._loop = asyncio.get_running_loop()
        self._label = label
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, step: Coroutine[Any, Any, None]) -> None:
        """Begin one."""
        task = self._loop.create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def finish(self, until: Deadline) -> None:
        """Wait for those that were begun, and no longer than until."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=until.remaining_s())

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (cause := task.exception()) is not None:
            logger.error("%s: a step of serving failed", self._label, exc_info=cause)
