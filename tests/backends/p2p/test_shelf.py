"""A shelf holds whole records, evicts the least recently used, and never what somebody reads."""

from __future__ import annotations

import mmap
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from p2p_sources import content

from kvstore_sdk.backend import ClosedError, Get, GetStatus, InvalidError, Loan, Mode, NoSpaceError, Put, PutStatus, Region
from kvstore_sdk_backends.p2p.shelf import Shelf

PAGE = mmap.PAGESIZE


@pytest.fixture
def desk() -> Iterator[Region]:
    region = Region(64 * PAGE)
    yield region
    region.close()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf(8 * PAGE)
    yield made
    made.close()


def put(shelf: Shelf, desk: Region, name: str, size_bytes: int = PAGE, mode: Mode = Mode.CREATE, text: str = "") -> PutStatus:
    buffer = desk.buffer(0, size_bytes)
    buffer.view[:] = content(text or name, size_bytes)
    return shelf.put(Put(name, (buffer,), mode)).status


def got(shelf: Shelf, desk: Region, name: str, size_bytes: int = PAGE) -> bytes | GetStatus:
    buffer = desk.buffer(32 * PAGE, size_bytes)
    status = shelf.get(Get(name, (buffer,))).status
    return bytes(buffer.view) if status is GetStatus.FOUND else status


def lend(shelf: Shelf, name: str) -> Loan:
    [loan] = shelf.lend([name])
    assert loan is not None
    return loan


def test_a_record_comes_out_as_it_was_put_in(shelf: Shelf, desk: Region) -> None:
    assert put(shelf, desk, "a", 5000) is PutStatus.STORED
    assert got(shelf, desk, "a", 5000) == content("a", 5000)
    assert shelf.sizes(["a", "b"]) == [5000, 0]
    assert shelf.exists(["a", "b"]) == [True, False]


def test_a_record_of_many_parts_is_their_bytes_in_order(shelf: Shelf, desk: Region) -> None:
    desk.view[: 3 * PAGE] = content("x", 3 * PAGE)
    parts = (desk.buffer(2 * PAGE, PAGE), desk.buffer(0, 100), desk.buffer(PAGE, 7))
    assert shelf.put(Put("a", parts)).status is PutStatus.STORED
    into = (desk.buffer(40 * PAGE, 50), desk.buffer(50 * PAGE, PAGE + 57))
    assert shelf.get(Get("a", into)).status is GetStatus.FOUND
    assert b"".join(part.view for part in into) == b"".join(part.view for part in parts)


def test_a_get_of_another_size_says_both_sizes(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "a", 5000)
    result = shelf.get(Get("a", (desk.buffer(0, 4999),)))
    assert (result.status, result.size_bytes, result.asked_bytes) == (GetStatus.WRONG_SIZE, 5000, 4999)


def test_create_leaves_what_is_there_and_replace_does_not(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "a")
    assert put(shelf, desk, "a", text="other") is PutStatus.EXISTS
    assert got(shelf, desk, "a") == content("a", PAGE)
    assert put(shelf, desk, "a", 2 * PAGE, Mode.REPLACE, "other") is PutStatus.STORED
    assert got(shelf, desk, "a", 2 * PAGE) == content("other", 2 * PAGE)
    assert shelf.usage().used_bytes == 2 * PAGE


def test_the_least_recently_used_record_leaves_first(shelf: Shelf, desk: Region) -> None:
    for name in "abcdefgh":
        put(shelf, desk, name)
    got(shelf, desk, "a")
    shelf.give_back([lend(shelf, "b")])
    put(shelf, desk, "c")
    for name in "ijk":
        assert put(shelf, desk, name) is PutStatus.STORED
    assert [name for name in "abcdefghijk" if shelf.exists([name])[0]] == list("abcghijk")


def test_a_lent_record_is_not_evicted_and_keeps_its_bytes(shelf: Shelf, desk: Region) -> None:
    """LEAK-02: and it is evicted once it was given back."""
    put(shelf, desk, "lent")
    loan = lend(shelf, "lent")
    for number in range(30):
        assert put(shelf, desk, f"n{number}") is PutStatus.STORED
    assert bytes(loan.buffer.view) == content("lent", PAGE)
    assert shelf.exists(["lent"]) == [True]
    shelf.give_back([loan])
    for number in range(30, 60):
        put(shelf, desk, f"n{number}")
    assert shelf.exists(["lent"]) == [False]


def test_a_lent_record_that_is_replaced_keeps_its_bytes_until_it_is_given_back(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "a")
    loan = lend(shelf, "a")
    assert put(shelf, desk, "a", mode=Mode.REPLACE, text="new") is PutStatus.STORED
    for number in range(30):
        put(shelf, desk, f"n{number}")
    assert bytes(loan.buffer.view) == content("a", PAGE)
    shelf.give_back([loan])
    assert shelf.lent_bytes == 0


def test_half_of_the_memory_stays_free_of_loans(shelf: Shelf, desk: Region) -> None:
    for name in "abcdefgh":
        put(shelf, desk, name)
    loans = shelf.lend(list("abcdefgh"))
    assert [loan is not None for loan in loans] == [True] * 4 + [False] * 4
    assert put(shelf, desk, "x", 4 * PAGE) is PutStatus.STORED
    shelf.give_back([loan for loan in loans if loan is not None])
    assert lend(shelf, "x").buffer.length == 4 * PAGE


def test_a_record_of_more_than_half_can_be_lent_alone(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "large", 6 * PAGE)
    put(shelf, desk, "small")
    assert lend(shelf, "large").buffer.length == 6 * PAGE
    assert shelf.lend(["small"]) == [None]


def test_a_loan_that_is_given_back_twice_is_over_once(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "a")
    first, second = lend(shelf, "a"), lend(shelf, "a")
    shelf.give_back([first, first])
    assert shelf.lent_bytes == PAGE
    for number in range(30):
        put(shelf, desk, f"n{number}")
    assert bytes(second.buffer.view) == content("a", PAGE)


def test_nothing_is_evicted_for_a_record_that_has_no_room(shelf: Shelf, desk: Region) -> None:
    for name in "abcdefgh":
        put(shelf, desk, name)
    too_large = shelf.put(Put("x", (desk.buffer(0, 9 * PAGE),)))
    assert isinstance(too_large.error, InvalidError)
    loan = lend(shelf, "d")
    beside_a_loan = shelf.put(Put("x", (desk.buffer(0, 6 * PAGE),)))
    assert isinstance(beside_a_loan.error, NoSpaceError)
    assert shelf.exists(list("abcdefgh")) == [True] * 8
    shelf.give_back([loan])
    assert put(shelf, desk, "x", 6 * PAGE) is PutStatus.STORED


def test_a_closed_shelf_answers_and_takes_nothing(shelf: Shelf, desk: Region) -> None:
    put(shelf, desk, "a")
    loan = lend(shelf, "a")
    shelf.close()
    shelf.close()
    assert put(shelf, desk, "b") is PutStatus.CLOSED
    closed = shelf.get(Get("a", (desk.buffer(0, PAGE),)))
    assert (closed.status, type(closed.error)) == (GetStatus.CLOSED, ClosedError)
    assert (shelf.sizes(["a"]), shelf.exists(["a"]), shelf.lend(["a"])) == ([0], [False], [None])
    assert bytes(loan.buffer.view) == content("a", PAGE)
    shelf.give_back([loan])
    with pytest.raises(ValueError, match="released"):
        _ = shelf.region.view[0]


def test_threads_find_records_whole_or_not_at_all() -> None:
    """Puts, replaces, gets and loans at once, in a shelf that is too small for all: every byte that is read is of one put."""
    shelf = Shelf(24 * PAGE)
    over = threading.Event()
    failures: list[str] = []
    sizes = {f"n{number}": (1 + number % 3) * PAGE for number in range(16)}

    def check(what: str, view: memoryview) -> None:
        if len(set(view)) != 1:
            failures.append(what)

    def use(seed: int) -> None:
        dice = random.Random(seed)
        desk = Region(3 * PAGE)
        while not over.is_set():
            name, size_bytes = dice.choice(list(sizes.items()))
            buffer = desk.buffer(0, size_bytes)
            match dice.randrange(3):
                case 0:
                    buffer.view[:] = bytes([dice.randrange(256)]) * size_bytes
                    shelf.put(Put(name, (buffer,), dice.choice(list(Mode))))
                case 1:
                    if shelf.get(Get(name, (buffer,))).status is GetStatus.FOUND:
                        check("get", buffer.view)
                case _:
                    for loan in shelf.lend([name]):
                        if loan is not None:
                            check("loan", loan.buffer.view)
                            shelf.give_back([loan])
        desk.close()

    threads = [threading.Thread(target=use, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    over.wait(1.0)
    over.set()
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert (shelf.lent_bytes, shelf._busy) == (0, {})
    assert sum(shelf._holes.parts().values()) + sum(record.extent_bytes for record in shelf._records.values()) == shelf.region.size_bytes
    shelf.close()


class ShelfMachine(RuleBasedStateMachine):
    """Against a dictionary that knows what was put, in the order of use."""

    names = st.sampled_from([f"n{number}" for number in range(7)])
    pages = st.integers(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.desk = Region(8 * PAGE)
        self.shelf = Shelf(10 * PAGE)
        self.known: OrderedDict[str, bytes] = OrderedDict()
        self.loans: list[tuple[Loan, bytes]] = []
        self.puts = 0

    def teardown(self) -> None:
        self.shelf.close()
        self.shelf.give_back([loan for loan, _ in self.loans])
        self.desk.close()

    @rule(name=names, pages=pages, mode=st.sampled_from(Mode))
    def put(self, name: str, pages: int, mode: Mode) -> None:
        self.puts += 1
        record = content(str(self.puts), pages * PAGE - self.puts % 100)
        buffer = self.desk.buffer(0, len(record))
        buffer.view[:] = record
        status = self.shelf.put(Put(name, (buffer,), mode)).status
        if mode is Mode.CREATE and name in self.known:
            assert status is PutStatus.EXISTS
        elif status is PutStatus.STORED:
            self.known.pop(name, None)
            self.known[name] = record
        else:
            assert status is PutStatus.FAILED
            # No room for it even if all that nobody uses were gone; so nothing had to leave.
            assert self.loans
            return
        if status is PutStatus.EXISTS:
            self.known.move_to_end(name)
        self._see_what_left(name)

    def _see_what_left(self, kept: str) -> None:
        lent = {loan.name for loan, record in self.loans if self.known.get(loan.name) == record}
        candidates = [name for name in self.known if name not in lent and name != kept]
        gone = [name for name in candidates if not self.shelf.exists([name])[0]]
        assert gone == candidates[: len(gone)]
        for name in gone:
            del self.known[name]

    @rule(name=names)
    def get(self, name: str) -> None:
        expected = self.known.get(name)
        buffer = self.desk.buffer(4 * PAGE, len(expected) if expected else PAGE)
        status = self.shelf.get(Get(name, (buffer,))).status
        assert status is (GetStatus.MISSING if expected is None else GetStatus.FOUND)
        if expected is not None:
            assert bytes(buffer.view) == expected
            self.known.move_to_end(name)

    @rule(name=names)
    def lend(self, name: str) -> None:
        [loan] = self.shelf.lend([name])
        if loan is not None:
            self.loans.append((loan, self.known[name]))
            self.known.move_to_end(name)
        else:
            assert name not in self.known or self.loans

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.loans) - 1))
        loan, record = self.loans.pop(at)
        assert bytes(loan.buffer.view) == record
        self.shelf.give_back([loan])

    @invariant()
    def is_consistent(self) -> None:
        assert set(self.known) == {name for name in self.known if self.shelf.exists([name])[0]}
        assert self.shelf.sizes(list(self.known)) == [len(record) for record in self.known.values()]
        assert all(bytes(loan.buffer.view) == record for loan, record in self.loans)
        assert self.shelf.usage().used_bytes == sum(map(len, self.known.values()))
        assert self.shelf.usage().records == len(self.known)

    @invariant()
    def uses_each_page_once(self) -> None:
        places = {record.offset: record.extent_bytes for record in [*self.shelf._records.values(), *self.shelf._busy.values()]}
        end = 0
        for offset, size in sorted([*places.items(), *self.shelf._holes.parts().items()]):
            assert offset == end
            end += size
        assert end == self.shelf.region.size_bytes


ShelfMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShelfMachine = ShelfMachine.TestCase
