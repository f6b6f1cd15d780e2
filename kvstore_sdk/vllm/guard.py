"""Methods that vLLM calls without a guard of its own: an exception out of one ends the engine."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["NeverRaises", "never_raises"]

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""How often one method's exceptions are logged: the engine may call it a thousand times a second."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


class NeverRaises:
    """What is called `shown_as` in the log when something goes wrong in it."""

    shown_as = "kvstore"

    def _complain(self, method: str) -> None:
        """Log the exception that is being handled, each method at most every `LOG_EVERY_S`."""
        times: dict[str, float] = self.__dict__.setdefault("_complaints", {})
        now = time.monotonic()
        if now >= times.get(method, 0.0):
            times[method] = now + LOG_EVERY_S
            logger.exception("%s: %s failed", self.shown_as, method)


def never_raises(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Whatever goes wrong in a method of a `NeverRaises` is logged, and `default()` is the answer."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: NeverRaises, *arguments: Any, **options: Any) -> Any:
            try:
                return method(self, *arguments, **options)
            except Exception:  # noqa: BLE001  logged by `_complain`
                self._complain(method.__name__)
                return default()

        return cast(_Method, guarded)

    return wrap
