"""Random lives of a store against a model that only knows what was promised: what was stored, told and taken, and nothing of how."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_bench import Stand, Wide, key

from kvstore_sdk.host import Slot
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, InDoubt, Raise, WrongBytes
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

SLOTS, RESERVE = 8, 2
CHUNKS = strategies.integers(0, 5)
REQUESTS = strategies.integers(0, 2)
LENGTHS = strategies.integers(1, 4)
FAULTS: list[Any] = [
    lambda: Fault("get", WrongBytes(), probability=0.5),
    lambda: Fault("get", Raise(RuntimeError), probability=0.5),
    lambda: Fault("put", Raise(SystemExit), probability=0.5),
    lambda: Fault("exists", Raise(OSError), probability=0.5),
    lambda: Fault("get", InDoubt(0.002), probability=0.5),
    lambda: Fault("put", InDoubt(0.002), probability=0.5),
    lambda: Fault("*", Hang(0.001), probability=0.5),
]


class StoreLife(RuleBasedStateMachine):
    """Requests come and go on eight slots and two tiers, of which one or both go wrong."""

    def __init__(self) -> None:
        super().__init__()
        in_doubt = Fault("put", InDoubt(), times=0)
        self.faulty = [FaultyBackend(Wide(open_memory("")), [in_doubt], seed=number) for number in range(2)]
        self.stand = Stand(
            {"first": self.faulty[0], "second": self.faulty[1]},
            slots=SLOTS,
            reserve=RESERVE,
            cascade_fraction=0.5,
            tier_settings={"retries": 0, "breaker_failures": 1000, "load_timeout_s": 5.0},
        )
        # What was completely stored since the last reset.
        self.stored: set[bytes] = set()
        self.told: dict[str, dict[bytes, Lookup]] = {}
        self.held: dict[str, set[bytes]] = {}
        self.loads: list[tuple[str, list[bytes], list[Slot]]] = []
        self.filling: dict[bytes, Slot] = {}
        self.lives = [0] * 4
        # Requests that were open at a reset and did not start over.
        self.stale: set[str] = set()

    def name(self, number: int) -> str:
        name = f"request-{number}.{self.lives[number]}"
        if name not in self.told:
            self.stand.store.begin_request(name)
            self.told[name], self.held[name] = {}, set()
        return name

    def taken(self) -> int:
        """Slots that transfers of the engine have now."""
        return len(self.filling) + len({slot.number for _, _, slots in self.loads for slot in slots})

    # Look-ups.

    @rule(number=REQUESTS, start=CHUNKS, length=LENGTHS)
    def look_up(self, number: int, start: int, length: int) -> None:
        name = self.name(number)
        for place in range(start, start + length):
            self.look_up_one(name, key(place))
        self.stand.step()

    def look_up_one(self, name: str, one: bytes) -> None:
        answer = self.stand.store.lookup(name, one)
        before = self.told[name].get(one)
        assert before is not Lookup.MISS or answer is Lookup.MISS, "a miss did not hold"
        assert one not in self.held[name] or answer is Lookup.HIT, "a hit did not hold"
        if answer is Lookup.HIT:
            assert one in self.stored, "a hit for what was never stored"
            self.held[name].add(one)
        self.told[name][one] = answer

    @rule(number=REQUESTS, start=CHUNKS, length=LENGTHS)
    def live(self, number: int, start: int, length: int) -> None:
        """Look up until nothing is pending, and begin to load what is there."""
        self.look_up(number, start, length)
        name = self.name(number)
        pending = [one for one, answer in self.told[name].items() if answer is Lookup.PENDING]

        def answered() -> bool:
            for one in pending:
                if self.told[name][one] is Lookup.PENDING:
                    self.look_up_one(name, one)
            # What the engine itself is storing, and room that others hold, come with other rules, or with time.
            return not self.stand.store.busy or all(self.told[name][one] is not Lookup.PENDING for one in pending)

        self.stand.wait(answered, "an answer")
        self.begin_load(number)

    @rule(number=REQUESTS, start=CHUNKS, length=LENGTHS, rest=strategies.booleans())
    def put(self, number: int, start: int, length: int, rest: bool) -> None:
        """A store from its beginning to its end, in every tier if `rest`."""
        self.begin_store(number, start, length)
        self.end_store(3)
        if rest:
            self.stand.settle()

    @rule()
    def squeeze(self) -> None:
        """Everything goes from host memory that may, as if much was stored."""
        self.stand.squeeze()

    @rule(number=REQUESTS, end=strategies.booleans())
    def let_go(self, number: int, end: bool) -> None:
        name = self.name(number)
        if end:
            self.stand.store.end_request(name)
            self.lives[number] += 1
            del self.told[name], self.held[name]
        else:
            self.stand.store.let_go([name])
            self.held[name].clear()
            self.told[name] = {one: answer for one, answer in self.told[name].items() if answer is Lookup.MISS}

    @rule(number=REQUESTS)
    def restart(self, number: int) -> None:
        name = self.name(number)
        self.stand.store.restart_request(name)
        self.stale.discard(name)
        self.held[name].clear()
        self.told[name].clear()

    # Transfers.

    @rule(number=REQUESTS, start=CHUNKS, length=LENGTHS)
    def begin_store(self, number: int, start: int, length: int) -> None:
        name = self.name(number)
        chain = [key(place) for place in range(start, start + length)]
        crowded = self.taken() + length > RESERVE
        slots = self.stand.store.begin_store(name, chain)
        if slots is None:
            assert crowded, "a running store found no room in its reserve"
            return
        assert name not in self.stale or slots == [None] * length, "what was computed before a reset is stored"
        self.stand.write(slots)
        for one, slot in zip(chain, slots, strict=True):
            if slot is not None:
                assert slot.key == one
                assert one not in self.filling, "two stores write one chunk"
                self.filling[one] = slot

    @rule(lacking=strategies.integers(0, 3))
    def end_store(self, lacking: int) -> None:
        chain, self.filling = self.filling, {}
        incomplete = [one for place, one in enumerate(chain) if place == lacking]
        assert all(self.stand.is_right(slot, one) for one, slot in chain.items()), "somebody wrote where the engine writes"
        self.stand.store.end_store(list(chain), incomplete)
        self.stored.update(one for one in chain if one not in incomplete)

    @rule(number=REQUESTS)
    def begin_load(self, number: int) -> None:
        name = self.name(number)
        chain = sorted(self.held[name])
        slots = self.stand.store.begin_load(name, chain)
        self.loads.append((name, chain, slots))
        self.held[name].clear()
        self.told[name] = {one: answer for one, answer in self.told[name].items() if answer is Lookup.MISS}

    @rule(which=strategies.integers(0, 5), twice=strategies.booleans())
    def end_load(self, which: int, twice: bool) -> None:
        if not self.loads:
            return
        name, chain, slots = self.loads.pop(which % len(self.loads))
        assert all(self.stand.is_right(slot, one) for slot, one in zip(slots, chain, strict=True)), "a load had wrong bytes"
        self.stand.store.end_load(name, chain)
        if twice and not any(name == other for other, _, _ in self.loads):
            self.stand.store.end_load(name, chain)

    # What happens to the store.

    @rule()
    def step(self) -> None:
        self.stand.step()

    @rule()
    def rest(self) -> None:
        self.stand.settle()

    @rule(place=strategies.integers(0, 1), fault=strategies.sampled_from(FAULTS))
    def go_wrong(self, place: int, fault: Any) -> None:
        self.faulty[place].arm(fault())

    @rule(place=strategies.integers(0, 1))
    def heal(self, place: int) -> None:
        self.faulty[place].heal()

    @rule()
    def reset(self) -> None:
        self.stand.store.reset()
        self.stand.generation += 1
        self.stored.clear()
        self.loads.clear()
        self.filling.clear()
        self.stale.update(self.told)
        for name in self.told:
            self.held[name].clear()
            self.told[name] = dict.fromkeys(self.told[name], Lookup.MISS)

    @rule(seed=strategies.integers(0, 1000))
    def drive_out(self, seed: int) -> None:
        """Other requests' stores, while there is room for them."""
        for number in random.Random(seed).sample(range(100, 200), 4):
            if self.taken() < RESERVE:
                slots = self.stand.put([key(number)])
                assert slots is not None, "a running store found no room in its reserve"
                self.stored.add(key(number))

    # What always holds.

    @invariant()
    def memory_is_constant(self) -> None:
        stats = self.stand.host.stats()
        assert stats.used_bytes <= stats.capacity_bytes
        assert stats.background_bytes <= stats.capacity_bytes - stats.reserve_bytes
        assert stats.double_releases == 0
        assert len(self.stand.store._holds) <= 4

    @invariant()
    def hits_are_right_where_they_lie(self) -> None:
        for chunks in self.held.values():
            for one in chunks:
                slot = self.stand.host.get(one)
                assert slot is not None, "a hit left"
                assert self.stand.is_right(slot, one), "a hit has wrong bytes"

    def teardown(self) -> None:
        try:
            for backend in self.faulty:
                backend.heal()
            self.end_store(3)
            while self.loads:
                self.end_load(0, False)
            for name in list(self.told):
                self.stand.store.end_request(name)
            self.stand.settle()
            self.stand.wait(self.stand.is_at_rest, "every slot")
            assert self.stand.total("faults") == 0
            assert self.stand.put([key(1000 + number) for number in range(SLOTS)]) is not None
        finally:
            self.stand.close()


TestStoreLife = StoreLife.TestCase
TestStoreLife.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
