"""Whatever a backend answers, raises or returns, what comes out is well-formed, counted, and logged once."""

from __future__ import annotations

import errno
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_bench import LIMIT_S

from kvstore_sdk.backend import (
    Advice,
    BackendError,
    BreachError,
    Capabilities,
    ClosedError,
    Deadline,
    DeleteStatus,
    DeniedError,
    Failure,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    Region,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk.tier import TierMetrics
from kvstore_sdk.tier import calls as module
from kvstore_sdk.tier.calls import Asked, Calls, drive

Answer = Callable[[Sequence[Any]], Any]
NAMES = ["v1/a", "v1/b", "v1/c"]


class Says:
    """A backend that answers every call with what a test wants."""

    def __init__(self, answer: Answer, **offers: Any) -> None:
        self.answer = answer
        self.capabilities = Capabilities(max_record_bytes=1 << 20, **offers)
        self.deadlines: list[Deadline] = []

    def _say(self, items: Sequence[Any], deadline: Deadline) -> Any:
        self.deadlines.append(deadline)
        return self.answer(items)

    exists = put = get = delete = settle = _say

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    made = Region(4096 * len(NAMES))
    yield made
    made.close()


class Caller:
    """Calls in front of such a backend, and what they are asked."""

    OPERATIONS = ("exists", "put", "get", "delete", "settle")

    def __init__(self, region: Region, answer: Answer, **offers: Any) -> None:
        self.metrics = TierMetrics()
        self.backend = Says(answer, **offers)
        self.calls = Calls(self.backend, self.metrics, "label")
        self.buffers = [region.buffer(4096 * number, 4096) for number in range(len(NAMES))]

    def ask(self, operation: str) -> list[Any]:
        deadline = Deadline.after(LIMIT_S)
        if operation == "put":
            return self.calls.put([Put(name, (buffer,)) for name, buffer in zip(NAMES, self.buffers, strict=True)], deadline).run()
        if operation == "get":
            return self.calls.get([Get(name, (buffer,)) for name, buffer in zip(NAMES, self.buffers, strict=True)], deadline).run()
        if operation == "settle":
            return drive(self.calls.settle(NAMES, deadline))
        ask: Callable[[Sequence[Any], Deadline], Asked[Any]] = getattr(self.calls, operation)
        return ask(NAMES, deadline).run()


def error_of(answer: Any) -> BackendError | None:
    return answer.error if isinstance(answer, (Failure, PutResult, GetResult)) else None


def check_well_formed(operation: str, answers: list[Any]) -> None:
    assert type(answers) is list
    assert len(answers) == len(NAMES)
    for answer in answers:
        if operation == "put":
            assert isinstance(answer.status, PutStatus)
            assert answer.status is not PutStatus.FAILED or isinstance(answer.error, BackendError)
            assert answer.status is not PutStatus.IN_DOUBT or answer.ticket is not None
        elif operation == "get":
            assert isinstance(answer.status, GetStatus)
            assert answer.status is not GetStatus.FAILED or isinstance(answer.error, BackendError)
            assert answer.status is not GetStatus.IN_DOUBT or answer.ticket is not None
        elif operation == "delete":
            assert isinstance(answer, (DeleteStatus, Failure))
        else:
            assert answer in (True, False) or isinstance(answer, Failure)
        assert error_of(answer) is None or isinstance(error_of(answer), BackendError)


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be said")

    __repr__ = __str__


class UnsayableBackendError(UnavailableError):
    def __str__(self) -> str:
        raise SystemExit("cannot be said either")


class UnsayableOSError(OSError):
    @property
    def strerror(self) -> str:  # type: ignore[override]
        raise RuntimeError("no text")

    errno = property(strerror.fget)  # type: ignore[assignment,arg-type]


class ListThatRaises(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise KeyError("no")


class ListThatLies(list[Any]):
    def __len__(self) -> int:
        return len(NAMES)


class Slippery:
    """Raises when it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


def endless() -> Iterator[bool]:
    while True:
        yield True


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: RuntimeError("broken"),
    "unsayable": lambda: Unsayable(),
    "unsayable backend error": lambda: UnsayableBackendError("x"),
    "unsayable os error": lambda: UnsayableOSError(),
    "os error": lambda: OSError(errno.EIO, "I/O error"),
    "time-out": lambda: TimeoutError("late"),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "generator exit": lambda: GeneratorExit(),
    "memory": lambda: MemoryError(),
    "stop iteration": lambda: StopIteration(),
    "group": lambda: BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError("x")]),
    "full": lambda: NoSpaceError("full"),
    "vendor's own": lambda: type("VendorError", (UnavailableError,), {})("vendor"),
}

ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(
        [
            object(),
            ListThatRaises([True] * 3),
            ListThatLies(),
            PutStatus.STORED,
            GetStatus.FOUND,
            DeleteStatus.ABSENT,
            Failure(UnavailableError("down")),
            Failure(ValueError("no BackendError")),  # type: ignore[arg-type]
            PutResult(PutStatus.STORED),
            PutResult(PutStatus.FAILED),
            PutResult(PutStatus.FAILED, NoSpaceError("full")),
            PutResult(PutStatus.UNKNOWN, "an error in words"),  # type: ignore[arg-type]
            PutResult(PutStatus.IN_DOUBT),
            PutResult(PutStatus.IN_DOUBT, ticket=1),
            PutResult("stored"),  # type: ignore[arg-type]
            GetResult(GetStatus.FOUND),
            GetResult(GetStatus.FOUND, ValueError("beside it")),  # type: ignore[arg-type]
            GetResult(GetStatus.FAILED),
            GetResult(GetStatus.TIMED_OUT),
            GetResult(GetStatus.CLOSED, ClosedError("closed")),
            GetResult(GetStatus.IN_DOUBT, ticket=[]),  # type: ignore[arg-type]
            GetResult.wrong_size(1, 2),
            GetResult(None),  # type: ignore[arg-type]
            GetResult,
            endless,
        ]
    ),
)
ANSWERS = st.one_of(
    ODD_VALUES,
    st.lists(ODD_VALUES, max_size=4),
    st.lists(ODD_VALUES, min_size=3, max_size=3).map(tuple),
    st.lists(ODD_VALUES, max_size=4).map(iter),
    st.dictionaries(st.integers(0, 3), ODD_VALUES, max_size=3),
    st.builds(endless),
)


@pytest.mark.parametrize("operation", Caller.OPERATIONS)
@given(answer=ANSWERS, in_doubt=st.booleans())
@settings(max_examples=150)
def test_any_answer_comes_out_well_formed(operation: str, answer: Any, in_doubt: bool, region: Region) -> None:
    caller = Caller(region, lambda _: answer, in_doubt=in_doubt)
    answers = caller.ask(operation)
    check_well_formed(operation, answers)
    if any(isinstance(error_of(one), BreachError) for one in answers):
        assert caller.metrics.total("breaches", operation) == 1
        assert all(isinstance(error_of(one), BreachError) for one in answers), "a breach fails every item"


NOT_WHOLE: list[tuple[str, Any]] = [
    ("put", PutResult(PutStatus.FAILED)),
    ("put", PutResult(PutStatus.UNKNOWN, "an error in words")),  # type: ignore[arg-type]
    ("put", PutResult(PutStatus.STORED, ValueError("beside it"))),  # type: ignore[arg-type]
    ("put", PutResult("stored")),  # type: ignore[arg-type]
    ("get", GetResult(GetStatus.FAILED)),
    ("get", GetResult(GetStatus.TIMED_OUT, TimeoutError("of Python"))),  # type: ignore[arg-type]
    ("get", GetResult(None)),  # type: ignore[arg-type]
    ("exists", Failure(ValueError("of Python"))),  # type: ignore[arg-type]
    ("exists", Failure(None)),  # type: ignore[arg-type]
    ("exists", 1),
    ("exists", None),
    ("delete", Failure("words")),  # type: ignore[arg-type]
    ("delete", True),
]


@pytest.mark.parametrize(("operation", "answer"), NOT_WHOLE, ids=range(len(NOT_WHOLE)))
def test_a_result_that_lacks_something_or_has_something_of_a_wrong_type_is_a_breach(operation: str, answer: Any, region: Region) -> None:
    right = {"exists": True, "put": PutResult(PutStatus.STORED), "get": GetResult(GetStatus.FOUND), "delete": DeleteStatus.DELETED}
    for answers in ([answer] * 3, [right[operation], right[operation], answer]):
        caller = Caller(region, lambda _, answers=answers: answers)
        assert all(isinstance(error_of(one), BreachError) for one in caller.ask(operation))
        assert caller.metrics.total("breaches", operation) == 1


@pytest.mark.parametrize("operation", Caller.OPERATIONS)
def test_answers_that_cannot_even_be_looked_at_are_failures(operation: str, region: Region) -> None:
    for answer in (Slippery(), [Slippery()] * 3, (True, Slippery(), True)):
        caller = Caller(region, lambda _, answer=answer: answer)
        check_well_formed(operation, caller.ask(operation))


@pytest.mark.parametrize("operation", Caller.OPERATIONS)
@pytest.mark.parametrize("error", ERRORS)
def test_any_exception_fails_every_item(operation: str, error: str, region: Region) -> None:
    """LIV-10, LIV-14"""

    def fail(_: Sequence[Any]) -> Any:
        raise ERRORS[error]()

    caller = Caller(region, fail)
    answers = caller.ask(operation)
    check_well_formed(operation, answers)
    if operation == "settle":
        assert answers == [False] * 3
    else:
        assert all(error_of(answer) is not None for answer in answers)
    assert caller.metrics.total("call_failures", operation) == 3


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(1), OSError(errno.EIO, "x")])
def test_a_put_that_raised_may_have_stored(error: BaseException, region: Region) -> None:
    def fail(_: Sequence[Any]) -> Any:
        raise error

    answers = Caller(region, fail).ask("put")
    assert {answer.status for answer in answers} == {PutStatus.UNKNOWN}
    assert {answer.error.advice for answer in answers} == {Advice.RETRY}


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, NoSpaceError), (errno.EACCES, DeniedError), (errno.EROFS, ReadOnlyError), (errno.EIO, UnavailableError)],
)
def test_an_os_error_says_what_may_be_done(code: int, kind: type[BackendError], region: Region) -> None:
    def fail(_: Sequence[Any]) -> Any:
        raise OSError(code, "text")

    assert {type(error_of(answer)) for answer in Caller(region, fail).ask("get")} == {kind}


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100])
@pytest.mark.parametrize("operation", Caller.OPERATIONS)
def test_a_list_of_another_length_fails_every_item(operation: str, count: int, region: Region) -> None:
    right = {"exists": True, "put": PutResult(PutStatus.STORED), "get": GetResult(GetStatus.FOUND), "delete": DeleteStatus.DELETED}
    caller = Caller(region, lambda _: [right.get(operation, True)] * count)
    answers = caller.ask(operation)
    if operation == "settle":
        assert answers == [False] * 3
    else:
        assert all(isinstance(error_of(answer), BreachError) for answer in answers)
        number = "more than 3" if count > 3 else str(count)
        assert f"answered {number} results for 3 items" in str(error_of(answers[0]))
    assert caller.metrics.total("breaches", operation) == 1


def test_right_answers_pass_as_they_are(region: Region) -> None:
    exists = [True, False, True]
    put = [PutResult(PutStatus.STORED), PutResult(PutStatus.EXISTS), PutResult(PutStatus.TIMED_OUT)]
    get = [GetResult(GetStatus.FOUND), GetResult(GetStatus.MISSING), GetResult.wrong_size(1, 2)]
    for operation, answers in (
        ("exists", exists),
        ("put", put),
        ("get", get),
        ("delete", [DeleteStatus.ABSENT] * 3),
        ("settle", [True] * 3),
    ):
        caller = Caller(region, lambda _, answers=answers: answers)
        assert caller.ask(operation) == answers
        # A tuple will do as well.
        assert Caller(region, lambda _, answers=answers: tuple(answers)).ask(operation) == answers
        assert caller.metrics.total("breaches") == 0


def test_a_list_that_changes_after_it_was_returned_changes_nothing(region: Region) -> None:
    kept: list[Any] = [True, True, True]
    answers = Caller(region, lambda _: kept).ask("exists")
    kept.clear()
    assert answers == [True, True, True]


def test_a_backend_that_changes_the_list_it_was_given_changes_nothing(region: Region) -> None:
    def consume(items: Any) -> list[bool]:
        count = len(items)
        while items:
            items.pop()
        return [True] * count

    assert Caller(region, consume).ask("exists") == [True, True, True]


def test_in_doubt_is_believed_only_with_a_ticket_and_only_where_it_was_declared(region: Region) -> None:
    honest = [GetResult(GetStatus.IN_DOUBT, ticket="t")] * 3
    assert Caller(region, lambda _: honest, in_doubt=True).ask("get") == honest
    for caller in (Caller(region, lambda _: honest), Caller(region, lambda _: [GetResult(GetStatus.IN_DOUBT)] * 3, in_doubt=True)):
        assert all(isinstance(answer.error, BreachError) for answer in caller.ask("get"))


def test_what_is_not_offered_is_refused_without_a_call(region: Region) -> None:
    caller = Caller(region, lambda _: pytest.fail("was called"), read_only=True)
    assert all(isinstance(answer.error, ReadOnlyError) for answer in caller.ask("put"))
    assert all(isinstance(answer.error, UnsupportedError) for answer in caller.ask("delete"))

    class Plain:
        capabilities = Capabilities(max_record_bytes=4096)

    calls = Calls(Plain(), TierMetrics(), "label")  # type: ignore[arg-type]
    assert isinstance(error_of(calls.delete(["v1/a"], Deadline.after(1)).run()[0]), UnsupportedError)
    assert drive(calls.settle([1, 2], Deadline.after(1))) == [False, False]


def test_the_deadline_is_passed_down_unchanged(region: Region) -> None:
    caller = Caller(region, lambda items: [True] * len(items))
    deadline = Deadline.after(3.0)
    caller.calls.exists(NAMES, deadline).run()
    assert caller.backend.deadlines == [deadline]


SAID: list[tuple[str, Any, str]] = [
    ("exists", [Failure(TimedOutError("v1/a: no answer"))] * 3, "TimedOutError: v1/a: no answer"),
    ("put", [PutResult.failed(NoSpaceError("put v1/a: ENOSPC (no space)"))] * 3, "NoSpaceError: put v1/a: ENOSPC"),
    ("put", [PutResult(PutStatus.TIMED_OUT)] * 3, "TimedOutError: label put v1/a: timed_out"),
    ("put", [PutResult(PutStatus.UNKNOWN)] * 3, "UnavailableError: label put v1/a: unknown"),
    ("get", [GetResult.failed(DeniedError("get v1/a: EACCES"))] * 3, "DeniedError: get v1/a: EACCES"),
    ("get", [GetResult(GetStatus.CLOSED)] * 3, "ClosedError: label get v1/a: closed"),
    ("get", None, "BreachError: label get: answered a NoneType, a list of 3 results was expected"),
    ("delete", [Failure(UnavailableError("status 503"))] * 3, "UnavailableError: status 503"),
]


@pytest.mark.parametrize(("operation", "answer", "text"), SAID, ids=range(len(SAID)))
def test_each_kind_of_failure_is_logged_once_with_what_is_needed(
    operation: str, answer: Any, text: str, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """OBS-05: backend, operation, key, error with its status, elapsed time, advice."""
    caller = Caller(region, lambda _: answer)
    for _ in range(20):
        caller.ask(operation)
    [record] = caplog.records
    said = record.getMessage()
    assert re.match(rf"label: {operation}( of v1/a)? failed after ", said)
    assert said.count("v1/a") == 1
    assert " ms: " in said
    assert text in said
    assert "; advice: " in said
    assert caller.metrics.total("call_failures", operation) == 60


def test_a_records_name_is_told_whole(region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"v1/{'0' * 32}/ff/{'f' * 128}-g12"
    monkeypatch.setitem(globals(), "NAMES", [name, "v1/b", "v1/c"])
    Caller(region, lambda _: [Failure(UnavailableError("down"))] * 3).ask("exists")
    [record] = caplog.records
    assert f"label: exists of {name} failed after " in record.getMessage()


def test_exceptions_of_different_types_are_different_kinds(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """OBS-05"""
    errors: list[BaseException] = [RuntimeError("one"), ValueError("two"), OSError(errno.EIO, "three"), RuntimeError("again")]
    left = iter(errors)

    def fail(_: Sequence[Any]) -> Any:
        raise next(left)

    caller = Caller(region, fail)
    for _ in errors:
        caller.ask("get")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    for text, line in zip(("RuntimeError: one", "ValueError: two", "EIO (three)"), said, strict=True):
        assert text in line


def test_repeats_are_logged_again_after_a_while_with_their_number(
    region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(region, lambda _: [GetResult(GetStatus.TIMED_OUT)] * 3)
    caller.ask("get")
    monkeypatch.setattr(module, "_LOG_AGAIN_S", 0.0)
    caller.ask("get")
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "more like it" not in first
    assert "(2 more like it since)" in second


def test_error_classes_without_end_take_neither_labels_nor_memory_without_end(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    numbers = iter(range(10_000))

    def fail(_: Sequence[Any]) -> Any:
        raise type(f"Vendor{next(numbers)}Error", (UnavailableError,), {})("down")

    caller = Caller(region, fail)
    caplog.set_level(logging.ERROR)
    for _ in range(1000):
        caller.ask("get")
    assert {labels for name, labels in caller.metrics.take().counters if name == "call_failures"} == {("get", "UnavailableError")}
    assert len(caller.calls._logged) <= module._MAX_KINDS + 1


def test_a_long_text_is_cut_and_a_text_of_many_lines_is_one(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller(region, lambda _: [GetResult.failed(UnavailableError("x" * 10_000 + "\nsecond line"))] * 3)
    caller.ask("get")
    [record] = caplog.records
    assert len(record.getMessage()) < 600
    assert "\n" not in record.getMessage()


def test_logs_show_neither_the_backend_nor_bytes(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """Secrets of a backend may be in its repr, and payloads are the users'."""

    class Secretive(Says):
        def __repr__(self) -> str:
            return "Secretive(password=hunter2)"

    for answer in (None, [], [GetResult(GetStatus.FAILED)] * 3, [GetResult(GetStatus.TIMED_OUT)] * 3):
        caller = Caller(region, lambda _: None)
        caller.calls.backend = Secretive(lambda _, answer=answer: answer)
        caller.ask("get")
        caller.ask("put")
    assert caplog.records
    assert "hunter2" not in caplog.text
    assert "memory at" not in caplog.text


def test_threads_that_fail_at_once_log_once(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller(region, lambda _: [GetResult(GetStatus.TIMED_OUT)] * 3)
    threads = [threading.Thread(target=lambda: [caller.ask("get") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(caplog.records) == 1
    assert caller.metrics.total("call_failures", "get", "TimedOutError") == 600


def test_a_throttled_answer_is_an_error_like_any_other(region: Region) -> None:
    answers = [Failure(ThrottledError("slow down", 2.0)), True, Failure(InvalidError("name"))]
    caller = Caller(region, lambda _: answers)
    throttled, present, invalid = caller.ask("exists")
    assert (type(throttled.error), throttled.error.retry_after_s, present, type(invalid.error)) == (ThrottledError, 2.0, True, InvalidError)
    assert caller.metrics.total("call_failures", "exists", "ThrottledError") == 1
    assert caller.metrics.total("call_failures", "exists", "InvalidError") == 1


def test_an_error_of_a_vendors_class_becomes_one_of_ours(region: Region) -> None:
    """LIV-01, LIV-11: what is decided by an error later must not depend on what a vendor's class says when it is looked at."""

    class Nasty(ThrottledError):
        @property
        def advice(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no advice")

    class Huge(ThrottledError):
        def __init__(self) -> None:
            super().__init__("huge")
            self.retry_after_s = 10**400

    def answers(_: Any) -> list[Any]:
        return [PutResult.failed(Nasty("slow down", 3.0)), PutResult.failed(Huge()), PutResult(PutStatus.STORED)]

    nasty, huge, stored = Caller(region, answers).ask("put")
    assert (type(nasty.error), nasty.error.retry_after_s, str(nasty.error)) == (ThrottledError, 3.0, "slow down")
    assert (type(huge.error), huge.error.retry_after_s) == (ThrottledError, 0.0)
    assert stored == PutResult(PutStatus.STORED)


def test_a_result_that_changes_when_it_is_looked_at_again_is_looked_at_once(region: Region) -> None:
    class TwoFaced(GetResult):
        looks = 0

        @property
        def status(self) -> GetStatus:  # type: ignore[override]
            TwoFaced.looks += 1
            return GetStatus.MISSING if TwoFaced.looks == 1 else GetStatus.FOUND

    one, _, _ = Caller(region, lambda _: [object.__new__(TwoFaced)] + [GetResult(GetStatus.FOUND)] * 2).ask("get")
    assert type(one) is GetResult
    assert one.status is not GetStatus.FOUND


def test_a_list_without_an_end_is_not_followed(region: Region) -> None:
    class Endless(list[Any]):
        def __iter__(self) -> Any:
            return itertools.repeat(True)

    assert all(isinstance(error_of(answer), BreachError) for answer in Caller(region, lambda _: Endless()).ask("exists"))


def test_the_first_wrong_item_is_named(region: Region) -> None:
    answers = Caller(region, lambda _: [PutResult(PutStatus.STORED), True, True]).ask("put")
    assert "item 1 is a bool that the contract does not allow" in str(error_of(answers[0]))
