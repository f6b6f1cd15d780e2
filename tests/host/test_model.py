"""HostTier against a model that keeps the plainest books there are, under every order of calls."""

from __future__ import annotations

import dataclasses

from host_checks import PAGE, check_books, key, region_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore_sdk.host import HostTier, Pin, Purpose, Slot, SlotState

KEYS = 14
GROUPS = {1: {0: PAGE}, 3: {0: PAGE, 1: 2 * PAGE, 2: 5 * PAGE - 100}}


@dataclasses.dataclass
class Entry:
    """A slot in use, as the model sees it."""

    slot: Slot
    filling: bool = True
    resident: bool = True
    held: bool = False
    promoting: bool = False
    late: bool = False
    pins: list[bool] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.resident and not self.filling and not self.pins

    @property
    def gone(self) -> bool:
        return not (self.resident or self.filling or self.held or self.pins)

    @property
    def background(self) -> bool:
        return self.promoting or any(self.pins)


recent = st.integers(0, 9)


class HostTierModel(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(sorted(GROUPS)), policy=st.sampled_from(["lru", "arc"]), start=st.sampled_from([0, 3 * PAGE]))
    def open(self, groups: int, policy: str, start: int) -> None:
        self.groups = GROUPS[groups]
        self.region = region_of(20 if groups == 3 else 9)
        self.host = HostTier(self.region, self.groups, policy=policy, start=start)
        self.live: dict[int, Entry] = {}
        self.late: set[int] = set()
        # All that were handed out, also those that are out of date.
        self.slots: list[Slot] = []
        self.pins: list[Pin] = []
        self.double = 0
        self.evictions = 0

    def teardown(self) -> None:
        if hasattr(self, "region"):
            self.region.close()

    # --- what a caller does ---

    def some(self, places: list[int]) -> list[Slot]:
        """Slots counted from the newest."""
        return [self.slots[-1 - place % len(self.slots)] for place in places] if self.slots else []

    def chunk(self, number: int) -> bytes:
        return key(number, number % len(self.groups))

    def resident(self) -> dict[bytes, Entry]:
        return {entry.slot.key: entry for entry in self.live.values() if entry.resident}

    @rule(
        numbers=st.lists(st.integers(0, KEYS - 1), max_size=6),
        purpose=st.sampled_from(Purpose),
        protect=st.lists(st.integers(0, KEYS - 1), max_size=4),
    )
    def admit(self, numbers: list[int], purpose: Purpose, protect: list[int]) -> None:
        there = self.resident()
        wanted = [self.chunk(number) for number in numbers]
        new = [chunk for chunk in dict.fromkeys(wanted) if chunk not in there]
        spared = {self.chunk(number) for number in protect} | set(wanted)
        idle = [chunk for chunk, entry in there.items() if entry.idle and chunk not in spared]
        before = self.host.stats()
        room = self.host.background_room_bytes
        taken = self.host.admit(wanted, purpose, {self.chunk(number) for number in protect})
        evicted = self.host.take_evicted()
        self.evictions += len(evicted)
        assert set(evicted) <= set(idle), "what was pinned, being filled or protected was evicted"
        assert len(set(evicted)) == len(evicted)
        if len(self.groups) == 1:
            size = 2 * PAGE
            free = before.free_bytes // size - (len(self.late) if purpose is Purpose.PROMOTION else 0)
            fits = len(new) <= free + len(idle)
            if purpose is Purpose.PROMOTION:
                fits = fits and len(new) * size <= room
            assert (taken is not None) == fits
            assert len(evicted) == (max(0, len(new) - free) if fits else 0), "more went than was needed, or some for nothing"
        elif all(entry.idle for entry in self.live.values()) and not self.late and not protect and purpose is Purpose.STORE:
            assert taken is not None or self.host.could_admit(wanted) < len(wanted) or len(new) < len(wanted)
        if taken is None:
            assert self.host.stats().free_bytes == before.free_bytes
            assert not evicted
            assert new
            return
        assert [slot.key for slot in taken] == new
        for chunk in evicted:
            del self.live[there[chunk].slot.number]
        for slot in taken:
            assert slot.number not in self.live, "a place that is in use was given away"
            late = slot.number in self.late
            assert not (late and purpose is Purpose.PROMOTION), "a transfer that the engine forgot may still write there"
            self.late.discard(slot.number)
            self.live[slot.number] = Entry(slot, promoting=purpose is Purpose.PROMOTION, late=late)
            assert (slot.state, slot.pins, slot.sealed, slot.source) == (SlotState.FILLING, 0, False, "engine")
        self.slots += taken

    def entry(self, slot: Slot) -> Entry | None:
        entry = self.live.get(slot.number)
        return entry if entry is not None and entry.slot is slot else None

    def settle(self, entry: Entry) -> None:
        if entry.gone:
            del self.live[entry.slot.number]
            if entry.late:
                self.late.add(entry.slot.number)

    @rule(places=st.lists(recent, max_size=4))
    def ready(self, places: list[int]) -> None:
        some = self.some(places)
        self.host.ready(some)
        for slot in some:
            if (entry := self.entry(slot)) is not None and entry.filling:
                entry.filling = entry.promoting = entry.late = False
                self.settle(entry)

    @precondition(lambda self: self.slots)
    @rule(place=recent)
    def discard(self, place: int) -> None:
        (slot,) = self.some([place])
        self.host.discard(slot)
        if (entry := self.entry(slot)) is not None and entry.filling:
            entry.filling = entry.resident = entry.promoting = False
            self.settle(entry)

    @precondition(lambda self: self.slots)
    @rule(place=recent)
    def quarantine(self, place: int) -> None:
        (slot,) = self.some([place])
        entry = self.entry(slot)
        if entry is None or (not entry.filling and slot.state is SlotState.READY):
            try:
                self.host.quarantine(slot)
            except ValueError:
                return
            raise AssertionError("what cannot be kept from others was said to be")
        self.host.quarantine(slot)
        if entry.filling:
            entry.filling = entry.resident = False
            entry.held = True

    @precondition(lambda self: self.slots)
    @rule(place=recent)
    def release(self, place: int) -> None:
        (slot,) = self.some([place])
        self.host.release(slot)
        if (entry := self.entry(slot)) is not None and entry.held:
            entry.held = entry.promoting = False
            self.settle(entry)

    @rule(places=st.lists(recent, max_size=4), background=st.booleans())
    def pin(self, places: list[int], background: bool) -> None:
        some = self.some(places)
        entries = [entry for slot in some if (entry := self.entry(slot)) is not None]
        if len(entries) < len(some) or any(slot.state is SlotState.QUARANTINED for slot in some):
            try:
                self.host.pin(some, background)
            except ValueError:
                return
            raise AssertionError("a slot that holds no chunk was pinned")
        room = self.host.background_room_bytes
        pin = self.host.pin(some, background)
        if pin is None:
            assert background
            assert sum(entry.slot.record_bytes for entry in entries if not entry.background) > room
            return
        for entry in entries:
            entry.pins.append(background)
        self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(place=st.integers(0, 5))
    def unpin(self, place: int) -> None:
        """Now and then for the second time."""
        pin = self.pins[-1 - place % len(self.pins)]
        again = pin.released
        assert self.host.unpin(pin) is not again
        if again:
            self.double += 1
            return
        for slot in pin.slots:
            entry = self.entry(slot)
            assert entry is not None, "a pinned slot went away"
            entry.pins.remove(pin.background)
            self.settle(entry)

    @rule(number=st.integers(0, KEYS - 1))
    def remove(self, number: int) -> None:
        entry = self.resident().get(self.chunk(number))
        removed = self.host.remove(self.chunk(number))
        assert removed is (entry is not None and entry.idle)
        if removed:
            assert entry is not None
            assert self.host.take_evicted() == [self.chunk(number)]
            del self.live[entry.slot.number]

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), max_size=8))
    def used(self, numbers: list[int]) -> None:
        self.host.used([self.chunk(number) for number in numbers])

    @rule()
    def reset(self) -> None:
        self.host.reset()
        assert not self.host.take_evicted()
        for entry in list(self.live.values()):
            entry.resident = False
            self.settle(entry)

    @rule(places=st.lists(recent, min_size=1, max_size=3))
    def forget(self, places: list[int]) -> None:
        some = [slot for slot in self.some(places) if (entry := self.entry(slot)) is None or not entry.promoting]
        concerned = [slot for slot in some if slot.state in (SlotState.FILLING, SlotState.READY)]
        self.host.forget(some)
        self.host.take_evicted()
        for slot in concerned:
            if (entry := self.entry(slot)) is not None:
                entry.filling = entry.resident = False
                entry.late = True
                self.settle(entry)

    @precondition(lambda self: not any(entry.pins or entry.held or entry.filling for entry in self.live.values()))
    @rule()
    def everything_is_back(self) -> None:
        """Once nothing is pinned, filled or held, one largest chunk can be stored, and all bytes are free after a reset."""
        self.reset()
        stats = self.host.stats()
        assert stats.free_bytes == stats.capacity_bytes
        assert stats.background_bytes == 0
        if len(self.groups) == 1 or not self.late:
            (slot,) = self.host.admit([key(999, max(self.groups))], Purpose.STORE) or [None]
            assert slot is not None
            self.host.ready([slot])
            self.host.remove(slot.key)
            self.host.take_evicted()
            self.late.discard(slot.number)

    # --- what holds at any time ---

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "host"):
            return
        check_books(self.host, [entry.slot for entry in self.live.values()])
        there = self.resident()
        assert len(self.host) == len(there)
        for number in range(KEYS):
            entry = there.get(self.chunk(number))
            assert self.host.get(self.chunk(number)) is (entry.slot if entry else None)
        for entry in self.live.values():
            assert entry.slot.pins == len(entry.pins)
            assert (entry.slot.state is SlotState.FILLING) is entry.filling
            assert entry.slot.state is not SlotState.FREE
        stats = self.host.stats()
        assert stats.background_bytes <= stats.capacity_bytes - stats.reserve_bytes
        held = sum(entry.slot.record_bytes for entry in self.live.values() if entry.background)
        assert stats.background_bytes == held if held == 0 or len(self.groups) == 1 else stats.background_bytes >= held
        assert stats.double_releases == self.double
        assert stats.engine_only_slots == len(self.late)
        assert sum(group.evictions for group in stats.groups.values()) == self.evictions


HostTierModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestHostTierModel = HostTierModel.TestCase
