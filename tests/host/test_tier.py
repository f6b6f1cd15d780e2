"""Chunks in host memory: who gets room, who is evicted, who is safe."""

from __future__ import annotations

import sys
import types

import pytest
from host_checks import PAGE, check_books, check_no_overlap, host_of, key, keys, pinned, region_of, store

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import Flaw, seal, verify
from kvstore_sdk.host import HostTier, Purpose, SlotState
from kvstore_sdk.host.lru import LRU
from kvstore_sdk.keys import ChunkKey

STORE, PROMOTION = Purpose.STORE, Purpose.PROMOTION


# --- chunks come and go ---


def test_a_chunk_is_found_from_its_admission_on() -> None:
    host = host_of(4)
    (slot,) = host.admit([key(1)], STORE) or []
    assert host.get(key(1)) is slot
    assert (slot.state, slot.group, slot.payload_bytes, slot.record_bytes) == (SlotState.FILLING, 0, PAGE, 2 * PAGE)
    host.ready([slot])
    assert host.get(key(1)) is slot
    assert slot.state is SlotState.READY
    assert host.get(key(2)) is None


def test_a_slot_is_a_record() -> None:
    host = HostTier(region_of(8), {3: 5000}, start=PAGE)
    (slot,) = host.admit([key(1, 3)], STORE) or []
    record = host.record(slot.number)
    assert (record.offset, record.length) == (slot.offset, slot.record_bytes)
    name = ChunkKey.from_engine("0" * 32, slot.key)
    seal(record.view, name, "kv1:x", slot.payload_bytes)
    assert verify(host.region.view[slot.offset : slot.offset + slot.record_bytes], name, "kv1:x", 5000) is None
    record.view[-5000] ^= 1
    assert verify(record.view, name, "kv1:x", 5000) is Flaw.PAYLOAD
    assert slot.offset >= PAGE


def test_admission_is_all_or_nothing_and_evicts_nothing_in_vain() -> None:
    """CAP-04: what can never fit must not drive out what is there."""
    host = host_of(8)
    slots = store(host, range(8))
    assert host.admit(keys(range(100, 109)), STORE) is None
    pin = pinned(host, slots[:5])
    assert host.admit(keys(range(100, 104)), STORE) is None
    assert host.take_evicted() == []
    assert all(host.get(chunk) for chunk in keys(range(8)))
    assert host.stats().no_room[STORE] == 2
    host.unpin(pin)
    assert len(host.admit(keys(range(100, 104)), STORE) or []) == 4


def test_what_is_there_or_comes_twice_is_passed_over() -> None:
    """CAP-03: to store it again takes no second slot."""
    host = host_of(4)
    store(host, [0, 1])
    taken = host.admit(keys([0, 5, 1, 5, 6, 0]), STORE)
    assert taken is not None
    assert [slot.key for slot in taken] == keys([5, 6])
    assert host.stats().groups[0].used == 4
    assert host.admit([], STORE) == []


def test_neither_keys_of_the_call_nor_protected_ones_make_room_for_it() -> None:
    host = host_of(6)
    store(host, range(6))
    taken = host.admit(keys([5, 4, 10, 11]), STORE, protect=keys([3]))
    assert taken is not None
    assert set(host.take_evicted()) < set(keys([0, 1, 2]))
    assert host.admit(keys([10, 11, 12, 13, 14]), STORE, protect=keys([3, 4, 5])) is None
    assert host.take_evicted() == [], "one could go, three are needed"


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    """CAP-05: stored in two batches, used as a whole; a head without its tail is a prefix, a tail without its head is waste."""
    for policy in ("lru", "arc"):
        host = host_of(10, policy=policy)
        store(host, range(5))
        store(host, range(5, 10))
        host.used(keys(range(10)))
        store(host, range(100, 103))
        assert [host.get(chunk) is not None for chunk in keys(range(10))] == [True] * 7 + [False] * 3


def test_a_discarded_slot_is_free_at_once_and_a_late_call_on_it_is_without_effect() -> None:
    host = host_of(2)
    first, second = host.admit(keys([0, 1]), STORE) or []
    host.discard(first)
    assert host.get(key(0)) is None
    (third,) = host.admit([key(3)], STORE) or []
    assert third.number == first.number
    for late in (host.discard, host.release, lambda slot: host.ready([slot])):
        late(first)
    assert host.get(key(3)) is third
    assert third.state is SlotState.FILLING
    check_books(host, [second, third])
    with pytest.raises(ValueError, match="holds no chunk"):
        host.pin([first], background=False)
    with pytest.raises(ValueError, match="is not being filled"):
        host.quarantine(first)


def test_removing_takes_ready_and_unpinned_chunks_only() -> None:
    host = host_of(4)
    host.admit([key(0)], STORE)
    slots = store(host, [1, 2])
    pin = pinned(host, slots[:1])
    assert [host.remove(chunk) for chunk in keys([0, 1, 2, 3])] == [False, False, True, False]
    host.unpin(pin)
    assert host.remove(key(1))
    assert host.take_evicted() == keys([2, 1])


def test_evicted_keys_are_told_once_and_only_so_many_are_kept() -> None:
    host = host_of(2)
    store(host, [0, 1])
    store(host, [2])
    assert host.take_evicted() == [key(1)]
    assert host.take_evicted() == []
    for number in range(70_000):
        store(host, [number])
    assert len(host.take_evicted()) == 65_536


# --- pins ---


def test_pinned_chunks_are_never_evicted() -> None:
    host = host_of(4)
    slots = store(host, range(4))
    pin = pinned(host, slots[1:3])
    for number in range(100, 140):
        store(host, [number])
        assert host.get(key(1)) is slots[1]
        assert host.get(key(2)) is slots[2]
    host.unpin(pin)
    store(host, range(200, 204))
    assert host.get(key(1)) is host.get(key(2)) is None


def test_a_second_release_leaves_others_pins_alone() -> None:
    """RACE-05: one holder releases twice, a second one once; the third one's pin still protects."""
    host = host_of(2)
    slots = store(host, [0])
    first, second, third = (pinned(host, slots) for _ in range(3))
    assert host.unpin(first)
    assert not host.unpin(first)
    assert host.unpin(second)
    assert not host.unpin(first)
    assert slots[0].pins == 1
    for number in range(10, 20):
        assert host.admit([key(number)], STORE) is not None
        host.ready([host.get(key(number)) or slots[0]])
    assert host.get(key(0)) is slots[0]
    assert host.stats().double_releases == 2
    assert host.unpin(third)
    assert slots[0].pins == 0


def test_a_slot_pinned_while_it_was_filled_is_kept_once_it_is_ready() -> None:
    host = host_of(2)
    slots = host.admit(keys([0, 1]), STORE) or []
    pin = pinned(host, slots, background=True) if host.background_room_bytes >= 4 * PAGE else pinned(host, slots)
    host.ready(slots)
    assert host.admit([key(2)], STORE) is None
    host.unpin(pin)
    assert host.admit([key(2)], STORE) is not None


def test_a_pinned_slot_that_is_discarded_is_nobodys_until_the_pin_goes() -> None:
    host = host_of(2)
    (slot,) = host.admit([key(0)], STORE) or []
    pin = pinned(host, [slot])
    host.discard(slot)
    assert slot.state is SlotState.QUARANTINED
    assert host.get(key(0)) is None
    assert host.admit(keys([1, 2]), STORE) is None
    host.unpin(pin)
    assert host.admit(keys([1, 2]), STORE) is not None


@pytest.mark.parametrize("unpinned_first", [True, False])
def test_memory_that_is_pinned_and_in_quarantine_waits_for_both(unpinned_first: bool) -> None:
    host = host_of(2)
    (slot,) = host.admit([key(0)], PROMOTION) or []
    pin = pinned(host, [slot])
    host.quarantine(slot)
    if unpinned_first:
        host.unpin(pin)
    else:
        host.release(slot)
    assert slot.state is SlotState.QUARANTINED
    assert host.admit(keys([1, 2]), STORE) is None
    if unpinned_first:
        host.release(slot)
    else:
        host.unpin(pin)
    assert host.admit(keys([1, 2]), STORE) is not None


def test_one_slot_twice_in_a_pin_is_held_twice_and_released_twice() -> None:
    host = host_of(2)
    slots = store(host, [0])
    pin = pinned(host, slots * 2)
    assert slots[0].pins == 2
    host.unpin(pin)
    assert slots[0].pins == 0
    assert host.remove(key(0))


# --- the reserve ---


def test_promotions_cannot_take_the_reserve() -> None:
    """CAP-09: fifty requests wait for a slow tier; a running one can still store."""
    host = host_of(8)
    admitted = [host.admit([key(number)], PROMOTION) for number in range(50)]
    assert sum(slots is not None for slots in admitted) == 6
    assert host.stats().no_room[PROMOTION] == 44
    assert host.background_room_bytes == 0
    assert host.admit(keys([100, 101]), STORE) is not None
    assert host.admit([key(102)], STORE) is None


def test_promoted_chunks_that_wait_for_their_request_cannot_take_it_either() -> None:
    host = host_of(8)
    slots = host.admit(keys(range(6)), PROMOTION) or []
    waiting = pinned(host, slots, background=True)
    host.ready(slots)
    others = store(host, [10, 11])
    assert host.pin(others, background=True) is None, "a copy to a lower tier must be refused"
    assert host.stats().refused_pins == 1
    assert others[0].pins == 0
    again = pinned(host, slots, background=True)  # What is held already costs nothing more.
    assert pinned(host, others), "a transfer to the engine is never refused"
    host.unpin(waiting)
    assert host.background_room_bytes == 0
    host.unpin(again)
    assert host.stats().background_bytes == 0


def test_what_a_promotion_took_is_given_back_however_it_ends() -> None:
    host = host_of(8)
    ready, discarded, released, held = host.admit(keys(range(4)), PROMOTION) or []
    assert host.stats().background_bytes == 4 * 2 * PAGE
    host.ready([ready])
    host.discard(discarded)
    host.quarantine(released)
    host.quarantine(held)
    assert host.stats().background_bytes == 2 * 2 * PAGE, "what is in quarantine still keeps running requests from it"
    host.release(released)
    host.release(released)
    assert host.stats().background_bytes == 2 * PAGE
    host.release(held)
    assert host.stats().background_bytes == 0


def test_room_that_is_taken_for_good_is_told_apart_from_no_chunk() -> None:
    """CAP-10, LIV-21: None at once, counted by what asked, so that its owner says "not now" and not "never stored"; room once it goes."""
    host = host_of(8)
    pin = pinned(host, store(host, range(8)))
    assert host.admit([key(100)], PROMOTION) is None
    assert host.admit([key(100)], STORE) is None
    assert host.stats().no_room == {PROMOTION: 1, STORE: 1}
    host.unpin(pin)
    assert host.admit([key(100)], PROMOTION) is not None


@pytest.mark.parametrize(("reserve", "promotions"), [(0, 8), (2 * PAGE, 7), (7 * 2 * PAGE, 1), (None, 6)])
def test_the_reserve_is_what_was_asked_for(reserve: int | None, promotions: int) -> None:
    host = host_of(8, reserve_bytes=reserve)
    assert host.background_room_bytes == promotions * 2 * PAGE
    assert sum(host.admit([key(number)], PROMOTION) is not None for number in range(50)) == promotions


# --- memory that a late call may touch ---


def test_memory_in_quarantine_is_given_to_nobody_until_it_is_released() -> None:
    host = host_of(2)
    (slot,) = host.admit([key(0)], PROMOTION) or []
    host.quarantine(slot)
    assert host.get(key(0)) is None
    assert host.stats().groups[0].quarantined == 1
    assert host.admit(keys([0, 1]), STORE) is None
    (other,) = host.admit([key(0)], STORE) or []
    check_no_overlap([slot, other])
    host.quarantine(slot)
    host.release(slot)
    assert host.admit([key(1)], STORE) is not None
    host.release(slot)
    host.release(other)
    assert other.state is SlotState.FILLING
    host.ready([other])
    with pytest.raises(ValueError, match="is not being filled"):
        host.quarantine(other)


def test_a_reset_forgets_every_chunk_and_waits_for_what_is_in_use() -> None:
    host = host_of(6)
    slots = store(host, range(3))
    pin = pinned(host, slots[:1])
    filling, promoting = host.admit([key(10)], STORE), host.admit([key(11)], PROMOTION)
    assert filling is not None
    assert promoting is not None
    host.reset()
    assert not any(host.get(chunk) for chunk in keys([0, 1, 2, 10, 11]))
    assert len(host) == 0
    assert host.stats().groups[0].used == 3
    again = store(host, [0, 10, 11])
    check_no_overlap([*again, slots[0], *filling, *promoting])
    host.unpin(pin)
    host.ready(filling)
    host.quarantine(promoting[0])
    assert host.stats().groups[0].used == 4
    host.release(promoting[0])
    check_books(host, again)
    assert host.get(key(10)) is again[1], "a late end of the old transfer must not touch the new chunk"


def test_what_the_engine_forgot_goes_to_its_stores_alone_until_one_of_them_is_done() -> None:
    """Its transfers may still run. A store of the engine runs after them; a tier's call does not."""
    host = host_of(4, reserve_bytes=0)
    written, read = host.admit([key(0)], STORE), store(host, [1])
    assert written is not None
    pin = pinned(host, read)
    host.reset()
    host.forget([*written, *read])
    assert host.stats().engine_only_slots == 1
    host.unpin(pin)
    assert host.stats().engine_only_slots == 2
    places = {written[0].number, read[0].number}
    promoted = host.admit(keys([10, 11]), PROMOTION)
    assert promoted is not None
    assert places.isdisjoint(slot.number for slot in promoted)
    host.ready(promoted)
    assert host.admit(keys([12, 13, 14]), PROMOTION) is None
    assert host.take_evicted() == []
    (stored,) = host.admit([key(20)], STORE) or []
    assert stored.number in places
    host.discard(stored)
    assert host.stats().engine_only_slots == 2, "nothing was written there that the engine had put after the forgotten one"
    done = store(host, [21, 22])
    assert {slot.number for slot in done} == places
    assert host.stats().engine_only_slots == 0
    assert host.remove(key(21))
    assert host.stats().engine_only_slots == 0
    assert len(host.admit(keys([30, 31, 32, 33]), PROMOTION) or []) == 4


def test_a_promotion_cannot_be_forgotten() -> None:
    """Not the engine writes there but a tier, and that is told by `release`."""
    host = host_of(4)
    slots = host.admit([key(0)], PROMOTION) or []
    with pytest.raises(ValueError, match="is being filled by a promotion"):
        host.forget(slots)
    assert host.get(key(0)) is slots[0]


# --- what it is given ---


@pytest.mark.parametrize("sizes", [{0: 5 * PAGE}, {0: PAGE, 1: 5 * PAGE}])
def test_room_for_fewer_than_two_of_the_largest_is_refused(sizes: dict[int, int]) -> None:
    region = region_of(1, pages=11)
    with pytest.raises(ConfigError, match=f"host tier: size_bytes: {11 * PAGE} bytes hold fewer than two records of {6 * PAGE} bytes"):
        HostTier(region, sizes)
    with pytest.raises(ConfigError, match="hold fewer than two"):
        HostTier(region_of(1, pages=12), sizes, start=PAGE)
    HostTier(region_of(1, pages=12), sizes)


@pytest.mark.parametrize("reserve", [-1, 8 * 2 * PAGE, 7 * 2 * PAGE + 1])
def test_a_reserve_that_leaves_no_room_for_a_promotion_is_refused(reserve: int) -> None:
    with pytest.raises(ConfigError, match=f"reserve_bytes: {reserve} must be from 0 to {14 * PAGE}"):
        host_of(8, reserve_bytes=reserve)


def test_groups_without_length_and_policies_that_are_none_are_refused() -> None:
    for wrong in ({}, {0: 0}, {-1: PAGE}):
        with pytest.raises(ConfigError, match="payload_bytes"):
            HostTier(region_of(8), wrong)
    with pytest.raises(ConfigError, match="eviction policy mru"):
        host_of(8, policy="mru")


def test_a_key_of_a_group_without_slots_is_named_before_anything_happens() -> None:
    host = HostTier(region_of(8), {0: PAGE, 7: 2 * PAGE})
    with pytest.raises(KeyError, match="is of group 3; there are slots of 0, 7"):
        host.admit([key(0), key(1, 3)], STORE)
    with pytest.raises(KeyError, match="is of group 3"):
        host.could_admit([key(1, 3)])
    assert len(host) == 0
    assert host.payload_bytes(3) is None
    assert host.payload_bytes(7) == 2 * PAGE


@pytest.mark.parametrize("answer", [None, key(99), key(0), key(7), "text"], ids=["hides", "invents", "pinned", "filling", "no key"])
def test_a_policy_that_hides_or_invents_victims_is_replaced(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A vendor's policy may be wrong in any way: stores go on, no slot is lost, none given twice."""

    class Stubborn(LRU):
        def victim(self, protected: object = ()) -> bytes | None:
            return answer

    module = types.ModuleType("stubborn_policy")
    module.Stubborn = Stubborn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stubborn_policy", module)
    host = host_of(5, policy="stubborn_policy:Stubborn")
    slots = store(host, range(3))
    pin = pinned(host, slots[:1])
    filling = host.admit([key(7)], PROMOTION) or []
    taken = host.admit(keys([10, 11]), STORE)
    assert taken is not None
    # The least recently used one that may go.
    assert [host.get(key(number)) is not None for number in range(3)] == [True, True, False]
    assert caplog.text.count("from now on the least recently used leaves first") == 1
    check_books(host, [*slots[:2], *filling, *taken])
    host.unpin(pin)
