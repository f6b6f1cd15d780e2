"""Removing records by name, on a store that is in use."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_sdk.backend import Backend, BreachError, Deadline, DeleteStatus, Failure, SupportsDelete, UnsupportedError
from kvstore_sdk.errors import Advice, BackendError
from kvstore_sdk.tools.retry import Retry

__all__ = ["check_removes", "remove"]


def check_removes(backend: Backend, doing: str) -> SupportsDelete:
    """The backend, as one that records can be removed from.

    Raises:
        UnsupportedError: it is none. Nothing was asked yet.
    """
    if not isinstance(backend, SupportsDelete):
        raise UnsupportedError(f"{doing}: {type(backend).__name__} does not remove records (SupportsDelete), and this has to")
    return backend


def remove(backend: SupportsDelete, names: Sequence[str], retry: Retry) -> list[DeleteStatus | BackendError]:
    """Remove each of `names`, no more than the backend takes in one call.

    Returns:
        For each what became of it: ABSENT where somebody else was first, or an error that is about this record alone.

    Raises:
        BackendError: none can be removed: permission is missing, or the store failed, and did so again. Some may be gone.
    """
    answers: dict[str, DeleteStatus | BackendError] = {}
    left = list(names)

    def attempt(deadline: Deadline) -> None:
        nonlocal left
        results = backend.delete(left, deadline)
        if not isinstance(results, Sequence) or len(results) != len(left) or not all(map(_is_answer, results)):
            raise BreachError("delete: the backend answered what is no list of an answer for each name; that is for its vendor to fix")
        again = []
        for name, result in zip(left, results, strict=True):
            if not isinstance(result, Failure):
                answers[name] = result
            elif result.error.advice is Advice.RETRY:
                again.append((name, result.error))
            elif result.error.advice is Advice.FIX_CONFIG:
                raise result.error
            else:
                answers[name] = result.error
        left = [name for name, _ in again]
        if again:
            raise again[0][1]

    retry.call("delete", attempt)
    return [answers[name] for name in names]


def _is_answer(result: object) -> bool:
    return isinstance(result, DeleteStatus | Failure)
