"""Requests that name a peer: their look-ups wait for it, for as long as the request says, and for nothing that another tier has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.backend import Backend, Deadline, Failure, Hint
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Waiting(Wide):
    """Waits for what is not there yet, as a request's hint says, or until `close`.

    Attributes:
        told: Every hint, in order.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, calls=32)
        self.told: list[Hint] = []
        self._over = threading.Event()
        self._hints: dict[str, Hint] = {}

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        self.told.append(hint)
        self._hints.update(dict.fromkeys(names, hint))

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        wait_s = max((self._hints.pop(name).wait_s for name in names if name in self._hints), default=0.0)
        until_s = min(deadline.at_s, time.monotonic() + wait_s)
        while True:
            answers = super().exists(names, deadline)
            if all(answer is True for answer in answers) or time.monotonic() >= until_s or self._over.wait(0.005):
                return answers

    def close(self) -> None:
        self._over.set()
        super().close()


@pytest.fixture
def shelf() -> str:
    return f"store-hints-{time.monotonic_ns()}"


@pytest.fixture
def peer(shelf: str) -> Waiting:
    return Waiting(open_memory(shelf))


def hinted(stand: Stand, wait_s: float, tiers: Sequence[str] | None = None) -> str:
    name = f"hinted-{time.monotonic_ns()}"
    stand.store.begin_request(name, tiers, Hint("peer:1", wait_s))
    return name


def steps(stand: Stand, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        stand.step()
        time.sleep(0.0005)


def looks(stand: Stand, request: str, some: list[bytes]) -> list[Lookup]:
    return [stand.store.lookup(request, one) for one in some]


SHORT: dict[str, Any] = {"lookup_timeout_s": 0.1, "tier_settings": {"lookup_timeout_s": 0.1}}
"""How long others wait."""


def test_a_request_waits_for_what_its_peer_is_about_to_have(new_stand: NewStand, peer: Waiting, shelf: str) -> None:
    stand = new_stand(peer, **SHORT)
    writer = new_stand(open_memory(shelf))
    request = hinted(stand, LIMIT_S)
    assert looks(stand, request, keys(3)) == [PENDING] * 3
    steps(stand, 0.5)
    assert looks(stand, request, keys(3)) == [PENDING] * 3
    writer.put(keys(3))
    assert stand.hits(keys(3), request) == 3
    assert [hint.peer for hint in peer.told] == ["peer:1"]
    assert not stand.total("lookup_timeouts")


def test_a_wait_that_ends_without_it_is_a_miss(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 0.3)
    began_s = time.monotonic()
    assert stand.ask(keys(2), request) == [MISS] * 2
    assert time.monotonic() - began_s >= 0.3
    assert not stand.total("lookup_timeouts")


def test_others_do_not_wait_for_what_a_request_waits_for(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 10 * LIMIT_S)
    assert looks(stand, request, keys(2)) == [PENDING] * 2
    stand.step()
    assert stand.ask(keys(2), stand.request()) == [MISS] * 2
    assert looks(stand, request, keys(2)) == [PENDING] * 2


def test_what_another_tier_has_is_not_waited_for(new_stand: NewStand, shelf: str) -> None:
    peer = Waiting(open_memory(""))
    stand = new_stand({"peers": peer, "files": open_memory(shelf)}, lookup_timeout_s=10 * LIMIT_S)
    writer = new_stand(open_memory(shelf))
    writer.put(keys(2))
    writer.settle()
    request = hinted(stand, 10 * LIMIT_S)
    assert stand.ask(keys(2), request) == [HIT] * 2
    assert [stand.store.source(request, one) for one in keys(2)] == ["files", "files"]


def test_what_comes_to_host_memory_ends_the_wait(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 10 * LIMIT_S)
    assert looks(stand, request, keys(1)) == [PENDING]
    stand.step()
    stand.put(keys(1))
    assert stand.ask(keys(1), request) == [HIT]


def test_a_request_that_starts_over_does_not_wait_again(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 1.0)
    assert stand.ask(keys(1), request) == [MISS]
    stand.store.restart_request(request)
    assert stand.ask(keys(1), request) == [MISS]
    first, second = (hint.wait_s for hint in peer.told)
    assert 0.0 < first <= 1.0
    assert second == 0.0


def test_a_tier_that_a_request_may_not_load_from_hears_of_no_peer(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand({"peers": peer, "files": open_memory("")})
    assert stand.ask(keys(1), hinted(stand, 10 * LIMIT_S, ["files"])) == [MISS]
    assert peer.told == []


def test_a_reset_ends_waits(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 10 * LIMIT_S)
    assert looks(stand, request, [key(0)]) == [PENDING]
    stand.step()
    stand.store.reset("w1")
    assert looks(stand, request, [key(0)]) == [MISS]


def test_the_end_of_a_request_ends_what_is_known_of_its_hint(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer)
    request = hinted(stand, 10 * LIMIT_S)
    assert looks(stand, request, [key(0)]) == [PENDING]
    stand.store.end_request(request)
    assert stand.ask([key(0)], request) == [MISS]


def test_close_does_not_sit_a_wait_out(new_stand: NewStand, peer: Waiting) -> None:
    stand = new_stand(peer, tier_settings={"close_timeout_s": LIMIT_S})
    request = hinted(stand, 100 * LIMIT_S)
    assert looks(stand, request, [key(0)]) == [PENDING]
    stand.wait(lambda: peer.told, "the question")
    assert stand.store.close() is True
    assert looks(stand, request, [key(0)]) == [MISS]
