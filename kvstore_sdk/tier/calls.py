"""The one place from which a backend is called: every answer it may give comes out as a well-formed one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    BreachError,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    SupportsDelete,
    SupportsSettle,
    Ticket,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
    error_from_os,
)
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Calls"]

logger = logging.getLogger(__name__)

R = TypeVar("R")
_LOG_AGAIN_S = 30.0


class Calls:
    """Calls a backend and distrusts what it says.

    - An exception of any kind, `SystemExit` of vendor code included, fails all items of the call.
    - A result list of another length or with other types in it is a breach: all items fail, and it is counted.
    - What the backend does not offer is refused here, without a call.
    - Each kind of failure is logged once with backend, operation, name, error and elapsed time; repeats each 30 s at most, with a count.
    """

    def __init__(self, backend: Backend, metrics: TierMetrics, label: str) -> None:
        self.backend = backend
        self.capabilities = backend.capabilities
        self._metrics = metrics
        self._label = label
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        self._log_lock = threading.Lock()

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        def right(answer: Any) -> bool:
            return answer is True or answer is False or (isinstance(answer, Failure) and isinstance(answer.error, BackendError))

        answers: list[bool | Failure] = self._call("exists", names, right, Failure, lambda: self.backend.exists(names, deadline))
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, Failure):
                self._failed("exists", name, answer.error)
        return answers

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if self.capabilities.read_only:
            refused = ReadOnlyError(f"{self._label} put: the backend is read-only")
            return [PutResult.failed(refused) for _ in puts]

        def right(answer: Any) -> bool:
            if not isinstance(answer, PutResult) or not isinstance(answer.status, PutStatus):
                return False
            if answer.status is PutStatus.FAILED and not isinstance(answer.error, BackendError):
                return False
            return answer.status is not PutStatus.IN_DOUBT or self._may_doubt(answer.ticket)

        # An exception leaves open what was stored: UNKNOWN, and repeating is safe.
        names = [put.name for put in puts]
        answers = self._call(
            "put", names, right, lambda error: PutResult(PutStatus.UNKNOWN, error), lambda: self.backend.put(puts, deadline)
        )
        for put, answer in zip(puts, answers, strict=True):
            if answer.status not in (PutStatus.STORED, PutStatus.EXISTS):
                self._failed("put", put.name, answer.error or _error_of(answer.status.value, f"{self._label} put {put.name}"))
        return answers

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        def right(answer: Any) -> bool:
            if not isinstance(answer, GetResult) or not isinstance(answer.status, GetStatus):
                return False
            if answer.status is GetStatus.FAILED and not isinstance(answer.error, BackendError):
                return False
            return answer.status is not GetStatus.IN_DOUBT or self._may_doubt(answer.ticket)

        answers = self._call("get", [get.name for get in gets], right, GetResult.failed, lambda: self.backend.get(gets, deadline))
        for get, answer in zip(gets, answers, strict=True):
            if answer.status not in (GetStatus.FOUND, GetStatus.MISSING, GetStatus.WRONG_SIZE):
                self._failed("get", get.name, answer.error or _error_of(answer.status.value, f"{self._label} get {get.name}"))
        return answers

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        backend = self.backend
        if not isinstance(backend, SupportsDelete) or self.capabilities.read_only:
            return [Failure(UnsupportedError(f"{self._label} delete: the backend does not offer it")) for _ in names]

        def right(answer: Any) -> bool:
            return isinstance(answer, DeleteStatus) or (isinstance(answer, Failure) and isinstance(answer.error, BackendError))

        return self._call("delete", names, right, Failure, lambda: backend.delete(names, deadline))

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        """Which operations are over. What cannot be asked counts as not over."""
        backend = self.backend
        if not isinstance(backend, SupportsSettle):
            return [False for _ in tickets]
        return self._call(
            "settle",
            ["" for _ in tickets],
            lambda answer: answer is True or answer is False,
            lambda error: False,
            lambda: backend.settle(tickets, deadline),
        )

    def _may_doubt(self, ticket: Ticket | None) -> bool:
        return ticket is not None and self.capabilities.in_doubt and isinstance(self.backend, SupportsSettle)

    def _call(
        self,
        operation: str,
        names: Sequence[str],
        right: Callable[[Any], bool],
        fail: Callable[[BackendError], R],
        call: Callable[[], Any],
    ) -> list[R]:
        started_s = time.monotonic()
        doing = f"{self._label} {operation}"
        try:
            answers = call()
        except BackendError as error:
            failure: BackendError = error
        except OSError as error:
            failure = error_from_os(doing, error)
        except BaseException as error:  # noqa: BLE001  # vendor code may raise anything; the engine survives it
            failure = UnavailableError(f"{doing}: raised {type(error).__name__}: {_text(error)}")
            failure.__cause__ = error
        else:
            if isinstance(answers, (list, tuple)) and len(answers) == len(names) and all(map(right, answers)):
                return list(answers)
            self._metrics.count("breaches", operation)
            failure = BreachError(f"{doing}: {_describe(answers)} for {len(names)} items is not what the contract allows")
        finally:
            elapsed_s = time.monotonic() - started_s
            self._metrics.observe("call_seconds", elapsed_s, operation)
        self._log(operation, names[0] if names else "", failure, elapsed_s)
        return [fail(failure) for _ in names]

    def _failed(self, operation: str, name: str, error: BackendError) -> None:
        self._metrics.count("call_failures", operation, type(error).__name__)
        self._log(operation, name, error, None)

    def _log(self, operation: str, name: str, error: BackendError, elapsed_s: float | None) -> None:
        kind = (operation, type(error).__name__)
        now = time.monotonic()
        with self._log_lock:
            last_s, held_back = self._logged.get(kind, (-_LOG_AGAIN_S, 0))
            if now - last_s < _LOG_AGAIN_S:
                self._logged[kind] = (last_s, held_back + 1)
                return
            self._logged[kind] = (now, 0)
        took = "" if elapsed_s is None else f" after {elapsed_s * 1000:.1f} ms"
        more = f" ({held_back} more like it since)" if held_back else ""
        logger.warning(
            "%s: %s of %s failed%s: %s: %s; it counts as a miss, advice: %s%s",
            self._label, operation, name[:64] or "its tickets", took, kind[1], _text(error), error.advice.value, more,
        )  # fmt: skip


def _text(error: BaseException) -> str:
    """The first line of what an error says; vendor code may raise one that cannot say it."""
    try:
        return (str(error).splitlines() or [""])[0][:300]
    except Exception:  # noqa: BLE001
        return "(its text cannot be had)"


def _describe(answers: object) -> str:
    return f"a list of {len(answers)}" if isinstance(answers, (list, tuple)) else f"an answer of type {type(answers).__name__}"


def _error_of(status: str, doing: str) -> BackendError:
    kind = TimedOutError if status == "timed_out" else UnavailableError
    return kind(f"{doing}: {status}")
