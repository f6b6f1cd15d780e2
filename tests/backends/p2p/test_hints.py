"""What requests said of who has their records: by name, bounded, waited for once."""

from __future__ import annotations

import threading

import pytest

from kvstore_sdk.backend import Hint
from kvstore_sdk_backends.p2p import hints as hints_module
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.hints import Hinted, Hints

HERE = Address("127.0.0.1", 7400)


def test_names_are_told_apart_by_what_was_said_of_them() -> None:
    hints = Hints()
    hints.note(["a", "b"], Hint("127.0.0.1:7400"))
    hints.note(["c"], Hint("host.example:7401"))
    assert hints.take(["c", "b", "nothing", "a"], wait=True) == {
        Hinted(Address("host.example", 7401), 0.0, ()): ["c"],
        Hinted(HERE, 0.0, ()): ["b", "a"],
    }


def test_one_look_up_waits_and_a_load_never_does() -> None:
    hints = Hints()
    hints.note(["a", "b"], Hint("127.0.0.1:7400", 5.0, until=("b",)))
    at_once = {Hinted(HERE, 0.0, ()): ["a", "b"]}
    assert hints.take(["a", "b"], wait=False) == at_once
    assert hints.take(["a", "b"], wait=True) == {Hinted(HERE, 5.0, ("b",)): ["a", "b"]}
    assert hints.take(["a", "b"], wait=True) == at_once
    # Until it is said again.
    hints.note(["a"], Hint("127.0.0.1:7400", 1.0))
    assert hints.take(["a"], wait=True) == {Hinted(HERE, 1.0, ()): ["a"]}


def test_each_of_two_requests_for_the_same_has_its_own_wait() -> None:
    hints = Hints()
    noted, go = threading.Event(), threading.Event()
    taken: dict[str, object] = {}

    def first() -> None:
        hints.note(["a", "b"], Hint("127.0.0.1:7400", 5.0, until=("b",)))
        noted.set()
        assert go.wait(20.0)
        taken["first"] = hints.take(["a", "b"], wait=True)
        # What this thread asks next is another matter.
        taken["next"] = hints.take(["a", "b"], wait=True)

    def second() -> None:
        hints.note(["a", "b"], Hint("host.example:7401", 2.0))
        taken["second"] = hints.take(["a", "b"], wait=True)

    one = threading.Thread(target=first)
    one.start()
    assert noted.wait(20.0)
    other = threading.Thread(target=second)
    other.start()
    other.join(20.0)
    go.set()
    one.join(20.0)
    there = Address("host.example", 7401)
    assert taken["first"] == {Hinted(HERE, 5.0, ("b",)): ["a", "b"]}
    assert taken["second"] == {Hinted(there, 2.0, ()): ["a", "b"]}
    assert taken["next"] == hints.take(["a", "b"], wait=False) == {Hinted(there, 0.0, ()): ["a", "b"]}


@pytest.mark.parametrize("peer", ["", "nowhere", "host:0", "host:99999", "a b:7", "[::1", "-", "http://host:80/"])
def test_what_is_no_address_is_refused(peer: str) -> None:
    hints = Hints()
    with pytest.raises(ValueError, match=r"\S"):
        hints.note(["a"], Hint(peer or "x"))
    assert len(hints) == 0


def test_they_are_bounded_and_the_oldest_go_first() -> None:
    hints = Hints(max_names=3)
    for name in "abcd":
        hints.note([name], Hint("127.0.0.1:7400"))
    assert hints.take(list("abcd"), wait=True) == {Hinted(HERE, 0.0, ()): ["b", "c", "d"]}


def test_they_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "KEPT_S", -1.0)
    hints = Hints()
    hints.note(["a"], Hint("127.0.0.1:7400"))
    assert hints.take(["a"], wait=True) == {}
    assert len(hints) == 0


def test_the_names_that_are_waited_for_are_not_gone_through_for_each_name() -> None:
    """A long prompt has thousands, and each call of its look-up carries them all."""

    class Chain(tuple[str, ...]):
        def __hash__(self) -> int:
            raise AssertionError("all names of a chain were gone through")

    hints = Hints()
    names = [f"v1/{number}" for number in range(4)]
    hints.note(names, Hint("127.0.0.1:1", 2.0, Chain(names)))
    [(hinted, found)] = hints.take(names, wait=True).items()
    assert found == names
    assert hinted.until == tuple(names)
