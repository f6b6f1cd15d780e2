"""One call of a tool on a store, tried again while its error says that this may help."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvstore_sdk.backend import Deadline, TimedOutError
from kvstore_sdk.errors import Advice, BackendError, KVStoreError, ThrottledError, error_from_os, text_of

__all__ = ["Retry"]

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_LONGEST_WISH_S = 60.0
"""A store may ask for more; then the tool says that the store asked for peace rather than sit there."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient a tool is.

    Attributes:
        timeout_s: Time that one call gets.
        tries: Calls in all, at least 1. Between two of them are pauses that double, or what the store asks for, 60 s at most.
    """

    timeout_s: float = 30.0
    tries: int = 5

    def call(self, doing: str, attempt: Callable[[Deadline], _T]) -> _T:
        """What `attempt` returns.

        Args:
            doing: Operation and object, for errors of backends that raise other exceptions than theirs.
            attempt: One call. What it raises ends this, except for errors with the advice RETRY.

        Raises:
            BackendError: of the last try.
        """
        pause_s = _FIRST_PAUSE_S
        for left in range(self.tries - 1, -1, -1):
            try:
                return attempt(Deadline.after(self.timeout_s))
            except BackendError as error:
                if error.advice is not Advice.RETRY or not left:
                    raise
                wish_s = error.retry_after_s if isinstance(error, ThrottledError) else 0.0
                if wish_s > _LONGEST_WISH_S:
                    raise
            except KVStoreError:
                raise
            except OSError as cause:
                if left:
                    wish_s = 0.0
                else:
                    raise error_from_os(doing, cause) from cause
            except Exception as cause:
                # A vendor's code may fail in any way.
                raise BackendError(f"{doing}: the backend raised {type(cause).__name__} ({text_of(cause)})") from cause
            time.sleep(max(pause_s, wish_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise TimedOutError(f"{doing}: no tries are left")
