"""Each fault does what it says, to the calls it is for, and to no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvstore_sdk.backend import (
    BackendError,
    Capabilities,
    ClosedError,
    Deadline,
    Failure,
    GetResult,
    GetStatus,
    Mode,
    NoSpaceError,
    PutResult,
    PutStatus,
    SupportsSettle,
    UnavailableError,
)
from kvstore_sdk.testing import (
    Action,
    Call,
    Fault,
    FaultyBackend,
    Hang,
    InDoubt,
    Raise,
    ReadLate,
    Return,
    ReturnLate,
    Say,
    SwapRecords,
    WriteLate,
    WrongBytes,
    WrongSize,
)

SOON = 30.0
Open = Callable[..., FaultyBackend]


@pytest.fixture
def faulty(inner: Any) -> Iterator[Open]:
    """Wrap the memory backend; the wrapper is closed afterwards, and no thread of it may be left."""
    opened = []

    def wrap(*script: Fault, seed: int = 0) -> FaultyBackend:
        opened.append(FaultyBackend(inner, script, seed=seed))
        return opened[-1]

    yield wrap
    for backend in opened:
        backend.heal()
        backend.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-late")]


class InThread(threading.Thread):
    """Runs one call; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="test-call")
        self._call = call
        self.start()

    def run(self) -> None:
        with suppress(ClosedError):
            self._answer = self._call()

    def result(self) -> Any:
        self.join(SOON)
        assert not self.is_alive()
        return self._answer


def test_without_a_script_everything_passes(faulty: Open, bench: Any) -> None:
    backend = faulty()
    assert bench.fetch(backend, "a") == (GetResult(GetStatus.FOUND), bench.record("a"))
    assert backend.exists(["a", "z"], Deadline.after(SOON)) == [True, False]
    assert [(event.op, event.names, event.faults) for event in backend.log] == [("get", ("a",), []), ("exists", ("a", "z"), [])]


@pytest.mark.parametrize("error", [UnavailableError, OSError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_raise_raises_whatever_it_is_given(faulty: Open, bench: Any, error: type[BaseException]) -> None:
    backend = faulty(Fault("get", Raise(error), times=1))
    with pytest.raises(error):
        bench.fetch(backend, "a")
    assert bench.fetch(backend, "a")[0].status is GetStatus.FOUND


def test_raise_after_loses_only_the_answer(faulty: Open, inner: Any, bench: Any) -> None:
    backend = faulty(Fault("put", Raise(after=True)))
    with pytest.raises(UnavailableError):
        bench.store(backend, "new", b"x")
    assert inner.exists(["new"], Deadline.after(SOON)) == [True]


def test_a_hang_ignores_the_deadline_and_ends_with_release(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Hang()))
    call = InThread(lambda: bench.fetch(backend, "a", timeout_s=0.001))
    assert backend.wait_hanging()
    call.join(0.05)
    assert call.is_alive()
    assert backend.hanging == 1
    backend.release()
    assert call.result() == (GetResult(GetStatus.FOUND), bench.record("a"))
    assert backend.hanging == 0


def test_a_hang_after_a_release_hangs_again_until_heal(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Hang()))
    backend.release()
    call = InThread(lambda: bench.fetch(backend, "a"))
    assert backend.wait_hanging()
    backend.heal()
    assert call.result()[0].status is GetStatus.FOUND
    assert bench.fetch(backend, "a")[0].status is GetStatus.FOUND


def test_what_a_call_does_after_heal_by_rules_it_had_before_is_over_at_once(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Hang()), Fault("get", Hang()), Fault("get", InDoubt()))
    call = InThread(lambda: bench.fetch(backend, "a"))
    assert backend.wait_hanging()
    backend.heal()
    result = call.result()[0]
    assert result.status is GetStatus.IN_DOUBT
    assert isinstance(backend, SupportsSettle)
    assert backend.settle([result.ticket], Deadline.after(SOON)) == [True]


def test_a_hang_of_some_seconds_is_a_slow_store(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("*", Hang(0.03)))
    start = time.monotonic()
    assert bench.fetch(backend, "a")[0].status is GetStatus.FOUND
    assert time.monotonic() - start >= 0.03


def test_a_hang_after_the_operation_has_already_filled_the_buffer(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", Hang(after=True)))
    call = InThread(lambda: bench.fetch(backend, "b"))
    assert backend.wait_hanging()
    assert bench.read() == bench.record("b")
    backend.release()
    call.result()


def test_close_ends_hangs_and_late_work_and_closes_the_backend_below(inner: Any, bench: Any) -> None:
    backend = FaultyBackend(inner, [Fault("get", Hang(), names="a".__eq__), Fault("get", WriteLate(), names="b".__eq__)])
    call = InThread(lambda: bench.fetch(backend, "a"))
    assert backend.wait_hanging()
    bench.fetch(backend, "b", slot=1)
    backend.close()
    backend.close()
    call.join(SOON)
    assert not call.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-late")]
    assert inner.exists(["a"], Deadline.after(SOON)) != [True]
    assert bench.fetch(backend, "c")[0].status is GetStatus.CLOSED


def test_a_hanging_close_ends_with_release(faulty: Open, inner: Any) -> None:
    backend = faulty(Fault("close", Hang(), times=1))
    call = InThread(backend.close)
    assert backend.wait_hanging()
    assert inner.exists(["a"], Deadline.after(SOON)) == [True]
    backend.release()
    call.result()
    assert isinstance(inner.exists(["a"], Deadline.after(SOON))[0], Failure)


def test_return_late_is_right_but_after_the_deadline(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", ReturnLate(0.02)))
    deadline = Deadline.after(0.02)
    [result] = backend.get([bench.get("a")], deadline)
    assert time.monotonic() >= deadline.at_s + 0.02
    assert (result.status, bench.read()) == (GetStatus.FOUND, bench.record("a"))


def test_say_lies_that_a_record_is_stored(faulty: Open, inner: Any, bench: Any) -> None:
    backend = faulty(Fault("put", Say(PutResult(PutStatus.STORED)), names="new".__eq__))
    assert bench.store(backend, "new", b"x").status is PutStatus.STORED
    assert bench.store(backend, "true", b"x").status is PutStatus.STORED
    assert inner.exists(["new", "true"], Deadline.after(SOON)) == [False, True]


def test_say_lies_about_existence_for_the_chosen_names_only(faulty: Open) -> None:
    backend = faulty(Fault("exists", Say(True), names="y".__eq__), Fault("exists", Say(False), names="b".__eq__))
    assert backend.exists(["a", "b", "x", "y"], Deadline.after(SOON)) == [True, False, False, True]


def test_say_fails_some_items_and_the_others_are_done(faulty: Open, bench: Any) -> None:
    full = PutResult.failed(NoSpaceError("injected"))
    backend = faulty(Fault("put", Say(full), names=lambda name: name.endswith("2")))
    results = backend.put([bench.put("n1", 1), bench.put("n2", 2), bench.put("n3", 3)], Deadline.after(SOON))
    assert results == [PutResult(PutStatus.STORED), full, PutResult(PutStatus.STORED)]
    assert backend.exists(["n1", "n2", "n3"], Deadline.after(SOON)) == [True, False, True]


@pytest.mark.parametrize(("after", "visible"), [(False, False), (True, True)])
def test_say_unknown_with_and_without_storing(faulty: Open, inner: Any, bench: Any, after: bool, visible: bool) -> None:
    backend = faulty(Fault("put", Say(PutResult(PutStatus.UNKNOWN), after=after)))
    assert bench.store(backend, "new", b"x").status is PutStatus.UNKNOWN
    assert inner.exists(["new"], Deadline.after(SOON)) == [visible]


@pytest.mark.parametrize("nonsense", [None, 42, "stored", PutResult(PutStatus.STORED)])
def test_say_gives_answers_of_a_wrong_type(faulty: Open, bench: Any, nonsense: object) -> None:
    backend = faulty(Fault("get", Say(nonsense)))
    assert bench.fetch(backend, "a")[0] is nonsense


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda results: results[:-1], [True]),
        (lambda results: [*results, True], [True, False, True]),
        (lambda results: [], []),
        (lambda results: None, None),
        (lambda results: 7, 7),
        (tuple, (True, False)),
    ],
)
def test_return_changes_the_whole_answer(faulty: Open, change: Callable[[Any], object], seen: object) -> None:
    backend = faulty(Fault("exists", Return(change)))
    assert backend.exists(["a", "z"], Deadline.after(SOON)) == seen


@pytest.mark.parametrize("offset", [0, 4096, -1])
def test_wrong_bytes_on_a_get_changes_the_buffer_and_not_the_store(faulty: Open, bench: Any, offset: int) -> None:
    backend = faulty(Fault("get", WrongBytes(offset, length=1, flip=0x80), times=1))
    result, seen = bench.fetch(backend, "a")
    expected = bytearray(bench.record("a"))
    expected[offset] ^= 0x80
    assert (result.status, seen) == (GetStatus.FOUND, bytes(expected))
    assert bench.fetch(backend, "a")[1] == bench.record("a")


def test_wrong_bytes_on_a_put_changes_the_store_and_not_the_buffer(faulty: Open, inner: Any, bench: Any) -> None:
    backend = faulty(Fault("put", WrongBytes(10, length=3, flip=0xFF)))
    record = bench.record("n")
    assert bench.store(backend, "new", record).status is PutStatus.STORED
    assert bench.read(15) == record
    assert bench.fetch(inner, "new")[1] == record[:10] + bytes(byte ^ 0xFF for byte in record[10:13]) + record[13:]


def test_wrong_bytes_of_a_missing_record_changes_nothing(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", WrongBytes()))
    bench.fill(0, bench.record("s"))
    assert bench.fetch(backend, "z") == (GetResult(GetStatus.MISSING), bench.record("s"))


def test_wrong_bytes_reach_every_part_of_an_item(faulty: Open, inner: Any, bench: Any) -> None:
    get = bench.get("a")
    parts = tuple(bench.region.buffer(offset, 4096) for offset in (65536, 0))
    backend = faulty(Fault("get", WrongBytes(4096)))
    backend.get([type(get)("a", parts)], Deadline.after(SOON))
    record = bench.record("a")
    assert bytes(parts[0].view) == record[:4096]
    assert bytes(parts[1].view) == bytes([record[4096] ^ 1]) + record[4097:]


@pytest.mark.parametrize("delta", [-1, -4096, 1, 100])
def test_wrong_size_on_a_get_is_said_and_on_a_put_is_stored(faulty: Open, inner: Any, bench: Any, delta: int) -> None:
    backend = faulty(Fault("*", WrongSize(delta)))
    assert bench.fetch(backend, "a")[0] == GetResult.wrong_size(8192 + delta, 8192)
    assert bench.store(backend, "new", bench.record("n")).status is PutStatus.STORED
    assert bench.fetch(inner, "new")[0] == GetResult.wrong_size(8192 + delta, 8192)


def test_swap_records_serves_another_whole_record(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", SwapRecords({"a": "c", "b": "a"}.__getitem__), names=lambda name: name in "ab"))
    results = backend.get([bench.get("a", 0), bench.get("b", 1), bench.get("d", 2)], Deadline.after(SOON))
    assert [result.status for result in results] == [GetStatus.FOUND] * 3
    assert [bench.read(slot) for slot in range(3)] == [bench.record(name) for name in "cad"]


def test_swap_records_finds_another_by_itself(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", SwapRecords(), names="a".__eq__))
    assert bench.fetch(backend, "a")[1] == bench.record("a")
    bench.fetch(backend, "b")
    assert bench.fetch(backend, "a") == (GetResult(GetStatus.FOUND), bench.record("b"))


def test_write_late_breaks_the_buffer_after_the_call(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", WriteLate(fill=0xEE)))
    bench.fill(0, bench.record("s"))
    assert bench.fetch(backend, "a") == (GetResult(GetStatus.TIMED_OUT), bench.record("s"))
    assert not backend.wait_late(0.02)
    assert bench.read() == bench.record("s")
    backend.release()
    assert backend.wait_late()
    assert bench.read() == b"\xee" * 8192
    assert bench.read(1) == bytes(8192)


def test_write_late_may_tell_the_truth_first(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", WriteLate(0.02, answer=None)))
    assert bench.fetch(backend, "a") == (GetResult(GetStatus.FOUND), bench.record("a"))
    assert backend.wait_late()
    assert bench.read() == b"\xee" * 8192


def test_write_late_survives_memory_that_is_gone(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("get", WriteLate()))
    bench.fetch(backend, "a")
    bench.region.close()
    backend.release()
    assert backend.wait_late()
    assert backend.late_errors == []


@pytest.mark.parametrize("answer", [PutStatus.TIMED_OUT, PutStatus.STORED])
def test_read_late_stores_what_the_buffer_holds_by_then(faulty: Open, inner: Any, bench: Any, answer: PutStatus) -> None:
    backend = faulty(Fault("put", ReadLate(answer=answer)))
    assert bench.store(backend, "new", bench.record("n")).status is answer
    assert inner.exists(["new"], Deadline.after(SOON)) == [False]
    bench.fill(15, bench.record("reused"))
    backend.release()
    assert backend.wait_late()
    assert bench.fetch(inner, "new")[1] == bench.record("reused")


def test_in_doubt_honours_the_contract(faulty: Open, inner: Any, bench: Any) -> None:
    backend = faulty(Fault("*", InDoubt(), names=lambda name: name in ("a", "new")))
    assert backend.capabilities.in_doubt
    assert isinstance(backend, SupportsSettle)
    first, second = backend.get([bench.get("a", 0), bench.get("b", 1)], Deadline.after(SOON))
    assert (first.status, second.status) == (GetStatus.IN_DOUBT, GetStatus.FOUND)
    assert bench.read(1) == bench.record("b")
    put = bench.store(backend, "new", bench.record("n"))
    assert put.status is PutStatus.IN_DOUBT
    assert first.ticket != put.ticket
    assert backend.settle([first.ticket, put.ticket], Deadline.after(0.02)) == [False, False]
    assert bench.read(0) == bytes(8192)
    backend.release()
    assert backend.settle([put.ticket, first.ticket], Deadline.after(SOON)) == [True, True]
    assert bench.read(0) == bench.record("a")
    assert bench.fetch(inner, "new", 2)[1] == bench.record("n")


def test_in_doubt_settles_even_when_the_store_below_failed(inner: Any, bench: Any) -> None:
    backend = FaultyBackend(FaultyBackend(inner, [Fault("put", Raise(OSError))]), [Fault("put", InDoubt())])
    result = bench.store(backend, "new", b"x")
    backend.release()
    assert backend.settle([result.ticket], Deadline.after(SOON)) == [True]
    assert [type(error) for error in backend.late_errors] == [OSError]
    backend.close()


def test_an_error_of_the_store_below_is_kept_whatever_its_type(inner: Any, bench: Any) -> None:
    """A ValueError counts as memory that is gone only if the memory is gone."""
    backend = FaultyBackend(FaultyBackend(inner, [Fault("put", Raise(ValueError))]), [Fault("put", InDoubt())])
    bench.store(backend, "new", b"x")
    backend.release()
    assert backend.wait_late()
    assert [type(error) for error in backend.late_errors] == [ValueError]
    backend.close()


def test_a_rule_forgets_names_that_it_has_not_seen_for_long(faulty: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak of millions of names must not fill the memory."""
    monkeypatch.setattr("kvstore_sdk.testing.faulty.MAX_DRAWS", 3)
    backend = faulty(Fault("exists", Say(False), probability=0.5))

    def draws(name: str, number: int) -> list[Any]:
        return [backend.exists([name], Deadline.after(SOON))[0] for _ in range(number)]

    first = draws("a", 16)
    assert len(set(map(str, first))) == 2
    for name in ("b", "c", "d"):
        backend.exists([name], Deadline.after(SOON))
    [rule] = backend._rules
    assert list(rule.draws) == ["b", "c", "d"]
    assert draws("a", 16) == first, "as good as new"


def test_in_doubt_must_be_in_the_first_script(faulty: Open) -> None:
    backend = faulty()
    assert not isinstance(backend, SupportsSettle)
    assert not backend.capabilities.in_doubt
    with pytest.raises(ValueError, match="first script"):
        backend.arm(Fault("get", InDoubt()))
    faulty(Fault("get", InDoubt(), times=0)).arm(Fault("put", InDoubt()))


def test_settle_asks_the_backend_below_for_its_own_tickets(inner: Any, bench: Any) -> None:
    asked: list[object] = []

    class Doubtful:
        """Answers for tickets of its own."""

        capabilities = Capabilities(max_record_bytes=8192, in_doubt=True)

        def settle(self, tickets: list[object], deadline: Deadline) -> list[bool]:
            asked.extend(tickets)
            return [ticket == "over" for ticket in tickets]

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    backend = FaultyBackend(Doubtful(), [Fault("get", InDoubt())])
    [result] = backend.get([bench.get("a")], Deadline.after(SOON))
    assert backend.settle(["over", result.ticket, "open"], Deadline.after(0.01)) == [True, False, False]
    assert asked == ["over", "open"]
    backend.release()
    assert backend.settle([result.ticket], Deadline.after(SOON)) == [True]
    backend.close()


def test_rules_apply_in_order_and_see_what_those_before_let_through(faulty: Open, bench: Any) -> None:
    lie, wrong = Fault("get", Say(GetResult(GetStatus.MISSING)), names="a".__eq__), Fault("get", WrongBytes(0))
    backend = faulty(lie, wrong)
    first, second = backend.get([bench.get("a", 0), bench.get("b", 1)], Deadline.after(SOON))
    assert (first.status, second.status) == (GetStatus.MISSING, GetStatus.FOUND)
    assert bench.read(0) == bytes(8192)
    assert bench.read(1)[0] == ord("b") ^ 1
    bench.fetch(backend, "a")
    assert [event.faults for event in backend.log] == [[lie, wrong], [lie]]
    assert (backend.fired(lie), backend.fired(wrong)) == (2, 1)


def test_skip_and_times_choose_the_calls(faulty: Open, bench: Any) -> None:
    rule = Fault("get", Say(GetResult(GetStatus.MISSING)), names="a".__eq__, skip=2, times=2)
    backend = faulty(rule)
    seen = []
    for _ in range(6):
        bench.fetch(backend, "b")
        seen.append(bench.fetch(backend, "a")[0].status)
    found, missing = GetStatus.FOUND, GetStatus.MISSING
    assert seen == [found, found, missing, missing, found, found]
    assert backend.fired(rule) == 2


def _hits(backend: FaultyBackend, names: list[str]) -> list[bool]:
    return [bool(backend.exists([name], Deadline.after(SOON))[0]) for name in names]


def test_probability_is_drawn_from_the_seed_whatever_the_order_of_names(faulty: Open) -> None:
    names = [f"n{number}" for number in range(400)]
    rule = Fault("exists", Say(True), probability=0.25)
    seen = _hits(faulty(rule, seed=7), names)
    assert 60 < sum(seen) < 140
    assert _hits(faulty(rule, seed=7), names[::-1])[::-1] == seen
    assert _hits(faulty(rule, seed=8), names) != seen
    again = faulty(rule, seed=7)
    assert _hits(again, names) == seen
    assert _hits(again, names) != seen, "a second draw for a name is another one"


def test_random_bytes_are_drawn_from_the_seed(faulty: Open, bench: Any) -> None:
    seen = [bench.fetch(faulty(Fault("get", WrongBytes()), seed=seed), "a")[1] for seed in (1, 1, 2)]
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert all(record != bench.record("a") for record in seen)


def test_arm_adds_and_heal_drops_rules(faulty: Open, bench: Any) -> None:
    backend = faulty()
    rule = Fault("*", Say(GetResult(GetStatus.MISSING)))
    backend.arm(rule)
    assert bench.fetch(backend, "a")[0].status is GetStatus.MISSING
    backend.heal()
    assert bench.fetch(backend, "a")[0].status is GetStatus.FOUND
    assert backend.fired(rule) == 1


def test_a_star_covers_neither_close_nor_what_the_action_is_not_for(faulty: Open, bench: Any) -> None:
    backend = faulty(Fault("*", Raise()), Fault("*", SwapRecords()))
    for op in (
        lambda: backend.exists(["a"], Deadline.after(1)),
        lambda: backend.usage(Deadline.after(1)),
        lambda: bench.fetch(backend, "a"),
    ):
        with pytest.raises(BackendError):
            op()
    backend.close()


SENSELESS: dict[str, Callable[[], object]] = {
    "an unknown operation": lambda: Fault("fetch", Raise()),
    "an action of another operation": lambda: Fault("put", SwapRecords()),
    "items where there are none": lambda: Fault("close", Say(None)),
    "a probability above 1": lambda: Fault("get", Raise(), probability=1.5),
    "a negative skip": lambda: Fault("get", Raise(), skip=-1),
    "a negative times": lambda: Fault("get", Raise(), times=-1),
    "no flipped bit": lambda: WrongBytes(flip=0),
    "no changed byte": lambda: WrongBytes(length=0),
    "no change of size": lambda: WrongSize(0),
}


@pytest.mark.parametrize("senseless", SENSELESS)
def test_a_rule_that_makes_no_sense_is_refused(senseless: str) -> None:
    with pytest.raises(ValueError, match=r"^(Fault|WrongBytes|WrongSize): "):
        SENSELESS[senseless]()


def test_an_action_of_ones_own(faulty: Open, inner: Any, bench: Any) -> None:
    class Duplicate(Action):
        """Stores every record a second time under another name."""

        ops = frozenset({"put"})

        def run(self, call: Call, proceed: Callable[[Any], Any]) -> Any:
            results = proceed(call.items)
            for index in call.chosen:
                put = call.items[index]
                call.inner.put([type(put)(put.name + "-twin", put.parts, Mode.REPLACE)], Deadline.after(SOON))
            return results

    backend = faulty(Fault("put", Duplicate()))
    bench.store(backend, "new", bench.record("n"))
    assert bench.fetch(inner, "new-twin")[1] == bench.record("n")


def test_calls_of_many_threads_are_all_logged(faulty: Open, bench: Any) -> None:
    rule = Fault("exists", Say(True), times=50)
    backend = faulty(rule)

    def ask() -> int:
        return sum(backend.exists(["z"], Deadline.after(SOON)) == [True] for _ in range(25))

    calls = [InThread(ask) for _ in range(4)]
    assert sum(call.result() for call in calls) == 50
    assert len(backend.log) == 100
    assert backend.fired(rule) == 50


@pytest.mark.parametrize(("action", "said"), [(Hang, "the class Hang"), (lambda call, proceed: None, "a function"), (None, "a NoneType")])
def test_an_action_that_is_none_is_refused_with_what_to_write(action: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^Fault: action: {said} is no action; write an instance, Hang\(\) for example$"):
        Fault("get", action)
