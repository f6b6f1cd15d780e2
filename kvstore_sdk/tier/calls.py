"""The one place from which a backend is called: every answer it may give comes out as a well-formed one.

A call is an `Asked`, which does not say how it is made. What needs answers is a generator that yields one `Asked` after another and is sent
the answers to each; `drive` makes the calls on the thread that runs it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar, cast

from kvstore_sdk import errors
from kvstore_sdk.backend import (
    Backend,
    BackendError,
    BreachError,
    ClosedError,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Hint,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    SupportsDelete,
    SupportsHints,
    SupportsReports,
    SupportsSettle,
    ThrottledError,
    Ticket,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
    error_from_os,
)
from kvstore_sdk.errors import text_of
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Asked", "Asking", "Calls", "drive"]

logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")
_LOG_AGAIN_S = 30.0
_LONGEST_WISH_S = 86_400.0
"""Whoever wants to be left alone for longer than a day has made a mistake."""
_MAX_KINDS = 256
"""Kinds of failures that are told apart in the log. Vendor code can make up types without end."""


class Calls:
    """Calls a backend and distrusts what it says.

    - An exception of any kind, `SystemExit` of vendor code included, fails all items of the call.
    - A result list of another length or with other types in it is a breach: all items fail, and it is counted.
    - What the backend does not offer is refused here, without a call.
    - Each kind of failure is logged once with backend, operation, name, error and elapsed time; repeats each 30 s at most, with a count.
    """

    def __init__(self, backend: Backend, metrics: TierMetrics, label: str, *, into_rows: bool = False) -> None:
        """`into_rows`: its buffers are rows, and not staging memory, whose bytes are checked elsewhere."""
        self.backend = backend
        self._into_rows = into_rows
        self.capabilities = backend.capabilities
        # Asked once, while nothing depends on it: looking at an object of the vendor's may raise.
        self._settles = isinstance(backend, SupportsSettle)
        self._deletes = isinstance(backend, SupportsDelete)
        self.takes_hints = isinstance(backend, SupportsHints)
        self._takes_reports = isinstance(backend, SupportsReports)
        self._metrics = metrics
        self._label = label
        self._logged: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._log_lock = threading.Lock()

    def exists(self, names: Sequence[str], deadline: Deadline) -> Asked[bool | Failure]:
        def right(answer: Any) -> bool:
            return answer is True or answer is False or _is_failure(answer)

        def error_of(name: str, answer: bool | Failure) -> BackendError | None:
            return answer.error if isinstance(answer, Failure) else None

        return Asked(self, "exists", names, names, deadline, right, Failure, error_of)

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        """Say whom to ask in the call of `exists` that follows on this thread. Raises nothing, and does not wait."""
        backend: Any = self.backend
        self._tell("hint", names[0], lambda: backend.hint(list(names), hint))

    def report_corrupt(self, name: str) -> None:
        """Say that what the last `get` of this name gave is corrupt. Raises nothing, and does not wait."""
        if self._takes_reports:
            backend: Any = self.backend
            self._tell("report_corrupt", name, lambda: backend.report_corrupt([name]))

    def _tell(self, operation: str, name: str, tell: Callable[[], object]) -> None:
        try:
            tell()
        except BaseException as error:  # noqa: BLE001  # as below
            failure = UnavailableError(f"{self._label} {operation}: raised {type(error).__name__}: {text_of(error)}")
            failure.__cause__ = error
            self._failed(operation, name, failure, 0.0)

    def put(self, puts: Sequence[Put], deadline: Deadline) -> Asked[PutResult]:
        def right(answer: Any) -> bool:
            if not isinstance(answer, PutResult) or not isinstance(answer.status, PutStatus):
                return False
            return self._is_whole(answer, answer.status is PutStatus.FAILED, answer.status is PutStatus.IN_DOUBT)

        def error_of(name: str, answer: PutResult) -> BackendError | None:
            if answer.status in (PutStatus.STORED, PutStatus.EXISTS):
                return None
            return answer.error or _error_of(answer.status.value, f"{self._label} put {name}")

        def fail(error: BackendError) -> PutResult:
            if self._leaves_doubt(error):
                return PutResult(PutStatus.IN_DOUBT, error, _NEVER_OVER)
            # An exception leaves open what was stored: UNKNOWN, and repeating is safe.
            return PutResult(PutStatus.UNKNOWN, error)

        asked = Asked(self, "put", [put.name for put in puts], puts, deadline, right, fail, error_of)
        if self.capabilities.read_only:
            asked.refuse(PutResult.failed(ReadOnlyError(f"{self._label} put: the backend is read-only")))
        return asked

    def get(self, gets: Sequence[Get], deadline: Deadline) -> Asked[GetResult]:
        def right(answer: Any) -> bool:
            if not isinstance(answer, GetResult) or not isinstance(answer.status, GetStatus):
                return False
            return self._is_whole(answer, answer.status is GetStatus.FAILED, answer.status is GetStatus.IN_DOUBT)

        def error_of(name: str, answer: GetResult) -> BackendError | None:
            if answer.status in (GetStatus.FOUND, GetStatus.MISSING, GetStatus.WRONG_SIZE):
                return None
            return answer.error or _error_of(answer.status.value, f"{self._label} get {name}")

        def fail(error: BackendError) -> GetResult:
            if self._leaves_doubt(error):
                return GetResult(GetStatus.IN_DOUBT, error, _NEVER_OVER)
            return GetResult.failed(error)

        return Asked(self, "get", [get.name for get in gets], gets, deadline, right, fail, error_of)

    def delete(self, names: Sequence[str], deadline: Deadline) -> Asked[DeleteStatus | Failure]:
        def right(answer: Any) -> bool:
            return isinstance(answer, DeleteStatus) or _is_failure(answer)

        def error_of(name: str, answer: DeleteStatus | Failure) -> BackendError | None:
            return answer.error if isinstance(answer, Failure) else None

        asked = Asked[DeleteStatus | Failure](self, "delete", names, names, deadline, right, Failure, error_of)
        if not self._deletes or self.capabilities.read_only:
            asked.refuse(Failure(UnsupportedError(f"{self._label} delete: the backend does not offer it")))
        return asked

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> Asking[list[bool]]:
        """Which operations are over. What cannot be asked counts as not over."""
        known = [ticket for ticket in tickets if ticket is not _NEVER_OVER] if self._settles else []
        if not known:
            return [False for _ in tickets]
        answers: list[bool] = yield Asked(
            self,
            "settle",
            ["" for _ in known],
            known,
            deadline,
            lambda answer: answer is True or answer is False,
            lambda error: False,
            lambda name, answer: None,
        )
        found = iter(answers)
        return [ticket is not _NEVER_OVER and next(found) for ticket in tickets]

    def _is_whole(self, answer: PutResult | GetResult, failed: bool, in_doubt: bool) -> bool:
        """Whether a result has what goes with its status, and nothing of a wrong type."""
        if answer.error is None:
            return not failed and (not in_doubt or self._may_doubt(answer.ticket))
        return isinstance(answer.error, BackendError) and (not in_doubt or self._may_doubt(answer.ticket))

    def _leaves_doubt(self, error: BackendError) -> bool:
        """Whether transfers may go on that nobody will hear of: what the backend answered cannot be read, and it may have been in doubt."""
        return self._into_rows and self.capabilities.in_doubt and isinstance(error, BreachError)

    def _may_doubt(self, ticket: Ticket | None) -> bool:
        return ticket is not None and self.capabilities.in_doubt and self._settles

    def judge(self, asked: Asked[R], ask: Callable[[], Any], started_s: float) -> list[R]:
        """The answers to a call, well-formed whatever `ask` returns or raises. Counts and logs what failed."""
        operation, names = asked.operation, asked.names
        doing = f"{self._label} {operation}"
        failure: BackendError | None = None
        answers: list[R] = []
        try:
            returned = ask()
            answers, failure = self._read(doing, returned, asked)
        except BackendError as error:
            failure = _own_error(error)
        except OSError as error:
            failure = _from_os(doing, error)
        except BaseException as error:  # noqa: BLE001  # vendor code may raise anything; the engine survives it
            failure = UnavailableError(f"{doing}: raised {type(error).__name__}: {text_of(error)}")
            failure.__cause__ = error
        elapsed_s = time.monotonic() - started_s
        self._metrics.observe("call_seconds", elapsed_s, operation)
        if failure is not None:
            for name in names:
                self._failed(operation, name, failure, elapsed_s)
            return [asked.fail(failure) for _ in names]
        good: object = _NONE
        for name, answer in zip(names, answers, strict=True):
            if answer is good:
                continue
            if (its_error := asked.error_of(name, answer)) is not None:
                self._failed(operation, name, its_error, elapsed_s)
            else:
                good = answer
        return answers

    def _read(self, doing: str, returned: Any, asked: Asked[R]) -> tuple[list[R], BreachError | None]:
        """What a method returned, and how it breaks the contract. Raises nothing: once it has returned, whatever keeps its answer from
        being read is a breach, because the answer may have been that calls are in doubt."""
        answers: list[R] = []
        try:
            # Copied first: it may be of a class of the vendor's, and may change while we look.
            listed = isinstance(returned, (list, tuple))
            answers = _own_all(islice(returned, len(asked.names) + 1)) if listed else []
            wrong = _what_is_wrong(returned, answers, asked.names, asked.right)
            cause: BaseException | None = None
        except BaseException as error:  # noqa: BLE001  # a vendor's class may do anything when it is looked at
            wrong, cause = f"its answer cannot be read: {type(error).__name__}: {text_of(error)}", error
        if wrong is None:
            return answers, None
        self._metrics.count("breaches", asked.operation)
        failure = BreachError(f"{doing}: {wrong}")
        failure.__cause__ = cause
        return answers, failure

    def _failed(self, operation: str, name: str, error: BackendError, elapsed_s: float) -> None:
        kind = _kind(error)
        self._metrics.count("call_failures", operation, kind)
        cause = error.__cause__
        key = (operation, type(error).__name__, type(cause).__name__ if cause is not None else "")
        now = time.monotonic()
        with self._log_lock:
            if key not in self._logged and len(self._logged) >= _MAX_KINDS:
                key = (operation, "", "")
            last_s, held_back = self._logged.get(key, (-math.inf, 0))
            if now - last_s < _LOG_AGAIN_S:
                self._logged[key] = (last_s, held_back + 1)
                return
            self._logged[key] = (now, 0)
        more = f" ({held_back} more like it since)" if held_back else ""
        text = text_of(error)
        # Most errors name their record themselves. It is of the SDK's own making, so never long.
        of = "" if name and name in text else f" of {name or 'its tickets'}"
        logger.warning(
            "%s: %s%s failed after %.1f ms: %s: %s; advice: %s%s",
            self._label, operation, of, elapsed_s * 1000, kind, text, _ADVICE[kind], more,
        )  # fmt: skip


class Asked(Generic[R]):
    """One call of a backend, not made yet.

    Attributes:
        operation: Name of the backend's method.
        names: Of the items, for the log.
        items: What the method is given.
        refused: The answers, where no call is to be made.
    """

    __slots__ = ("_calls", "deadline", "error_of", "fail", "items", "names", "operation", "refused", "right")

    def __init__(
        self,
        calls: Calls,
        operation: str,
        names: Sequence[str],
        items: Sequence[Any],
        deadline: Deadline,
        right: Callable[[Any], bool],
        fail: Callable[[BackendError], R],
        error_of: Callable[[str, R], BackendError | None],
    ) -> None:
        self._calls = calls
        self.operation = operation
        self.names = names
        self.items = items
        self.deadline = deadline
        self.right = right
        self.fail = fail
        self.error_of = error_of
        self.refused: list[R] | None = None

    def refuse(self, answer: R) -> None:
        """This is the answer to each item."""
        self.refused = [answer for _ in self.names]

    def run(self) -> list[R]:
        """Make the call on this thread. Raises nothing."""
        if self.refused is not None:
            return self.refused
        # A list of its own: the backend may keep it or change it.
        return self.judge(lambda: getattr(self._calls.backend, self.operation)(list(self.items), self.deadline), time.monotonic())

    def judge(self, ask: Callable[[], Any], started_s: float) -> list[R]:
        """The answers, well-formed, to a call that began then. `ask` returns what the backend returned, or raises what it raised."""
        return self._calls.judge(self, ask, started_s)


Asking: TypeAlias = Generator[Asked[Any], list[Any], T]
"""What has to call a backend before it can return a T: yields calls, and is sent the answers to each."""


def drive(steps: Asking[T]) -> T:
    """Run to the end, with the calls made on this thread."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send(asked.run())
    except StopIteration as end:
        return cast(T, end.value)


def _what_is_wrong(returned: Any, answers: list[Any], names: Sequence[str], right: Callable[[Any], bool]) -> str | None:
    """How an answer breaks the contract, or None."""
    if not isinstance(returned, (list, tuple)):
        return f"answered a {type(returned).__name__}, a list of {len(names)} results was expected"
    if len(answers) != len(names):
        number = len(answers) if len(answers) < len(names) else f"more than {len(names)}"
        return f"answered {number} results for {len(names)} items"
    before: object = _NONE
    for place, answer in enumerate(answers):
        if answer is not before and not right(answer):
            return f"item {place} is a {type(answer).__name__} that the contract does not allow"
        before = answer
    return None


def _own_all(returned: Iterable[Any]) -> list[Any]:
    """As `_own`, each. Backends give one object to most items of a call: what is the same as the one before is not looked at again."""
    answers: list[Any] = []
    before: object = _NONE
    own: Any = None
    for answer in returned:
        if answer is not before:
            before, own = answer, _own(answer)
        answers.append(own)
    return answers


def _own(answer: Any) -> Any:
    """A result and an error of our own making: those of a vendor's classes may say something else when they are looked at again."""
    if type(answer) in (PutResult, GetResult) and answer.error is None:
        return answer
    if not isinstance(answer, (PutResult, GetResult, Failure)):
        return answer
    error: Any = _own_error(answer.error) if isinstance(answer.error, BackendError) else answer.error
    if isinstance(answer, Failure):
        return Failure(error)
    if isinstance(answer, PutResult):
        return PutResult(answer.status, error, answer.ticket)
    return GetResult(answer.status, error, answer.ticket, answer.size_bytes, answer.asked_bytes)


def _own_error(error: BackendError) -> BackendError:
    """A plain error of the nearest class of `kvstore_sdk.errors`, with the same text and the same wish to wait."""
    kind: Any = next(parent for parent in type(error).__mro__ if parent.__module__ == BackendError.__module__)
    text = text_of(error)
    if issubclass(kind, ThrottledError):
        wish = vars(error).get("retry_after_s", 0.0)
        sane = isinstance(wish, (int, float)) and 0.0 <= wish <= _LONGEST_WISH_S
        return ThrottledError(text, float(wish) if sane else 0.0)
    own = cast(BackendError, kind(text))
    own.__cause__ = error
    return own


_NONE = object()
"""No answer of a backend."""

_NEVER_OVER: Ticket = "the answer that named it could not be read"
"""Ticket of what stays out of use for good. The bound on quarantined memory bounds it too."""

_ADVICE = {name: kind.advice.value for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BackendError)}


def _kind(error: BackendError) -> str:
    """The nearest class of the SDK's own: labels of metrics must be few."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _from_os(doing: str, error: OSError) -> BackendError:
    try:
        failure = error_from_os(doing, error)
    except BaseException:  # noqa: BLE001  # a class of the vendor's that cannot say what it is
        failure = UnavailableError(f"{doing}: raised {type(error).__name__}")
    failure.__cause__ = error
    return failure


def _is_failure(answer: Any) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, BackendError)


def _error_of(status: str, doing: str) -> BackendError:
    kind = TimedOutError if status == "timed_out" else ClosedError if status == "closed" else UnavailableError
    return kind(f"{doing}: {status}")
