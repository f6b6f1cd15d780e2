"""More requests than host memory has slots for, and tiers slower than they ask: everybody ends, running stores first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.host import Slot
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, WrongBytes
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


class Request:
    """A synthetic request: looks up its chain until nothing is pending, loads its hits, computes and stores the rest, one chunk a step."""

    def __init__(self, stand: Stand, number: int, chain: list[bytes]) -> None:
        self.stand = stand
        self.id = f"synthetic-{number}"
        self.chain = chain
        self.refused = self.longest_refusal = 0
        self.hits = 0
        self._life = self._run()

    def step(self) -> bool:
        """Go one step on. False: it is over."""
        return next(self._life, None) is not None

    def _run(self) -> Iterator[bool]:
        store = self.stand.store
        while True:
            # As the engine does: every key again in every step, from the head to the first miss.
            answers = []
            for one in self.chain:
                answers.append(store.lookup(self.id, one))
                if answers[-1] is Lookup.MISS:
                    answers.pop()
                    break
            if Lookup.PENDING not in answers:
                break
            yield True
        self.hits = len(answers)
        if answers:
            slots = store.begin_load(self.id, self.chain[: self.hits])
            yield True
            assert all(self.stand.is_right(slot, one) for slot, one in zip(slots, self.chain, strict=False)), "a hit had wrong bytes"
            store.end_load(self.id, self.chain[: self.hits])
        for one in self.chain[self.hits :]:
            self.refused = 0
            while (slots_or_none := store.begin_store(self.id, [one])) is None:
                self.refused += 1
                self.longest_refusal = max(self.longest_refusal, self.refused)
                yield True
            self.stand.write(slots_or_none)
            yield True
            store.end_store([one])
        store.end_request(self.id)


def run(stand: Stand, requests: list[Request], *, running: int, limit_s: float = 60.0) -> int:
    """All requests to their ends; `running` of them may be computing at once. Returns the steps."""
    waiting, steps = list(requests), 0
    going: list[Request] = []
    end_s = time.monotonic() + limit_s
    while waiting or going:
        while waiting and len(going) < running:
            going.append(waiting.pop(0))
        stand.store.poll()
        going = [request for request in going if request.step()]
        stand.store.flush()
        steps += 1
        assert time.monotonic() < end_s, f"{len(waiting) + len(going)} requests are not done after {limit_s} s"
        time.sleep(0.0002)
    return steps


def chains(count: int, rng: random.Random, longest: int) -> list[list[bytes]]:
    """Chains of which many begin alike."""
    found = []
    for _ in range(count):
        family, length, shared = rng.randrange(12), rng.randint(1, longest), rng.randint(0, longest)
        own = rng.randrange(1 << 30)
        found.append([key(1000 * family + place if place < shared else own + place) for place in range(length)])
    return found


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_two_hundred_requests_on_eight_slots_all_end(policy: str, new_stand: NewStand) -> None:
    """LIV-09, LIV-21, CAP-09: no deadlock, no wrong byte, running stores get in, and nothing is left behind."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("get", Hang(0.002)), Fault("put", Hang(0.003)), Fault("exists", Hang(0.001))])
    # Retried and repaired now and then, too.
    backend.arm(Fault("get", WrongBytes(), probability=0.05))
    stand = new_stand(backend, slots=8, policy=policy, lookup_timeout_s=0.3, cascade_fraction=0.5, tier_settings={"breaker_failures": 1000})
    # What a few requests stored at leisure, two hundred want at once, and store more.
    families = chains(40, random.Random(7), 6)
    run(stand, [Request(stand, number, chain) for number, chain in enumerate(families)], running=2)
    requests = [Request(stand, 1000 + number, chain) for number, chain in enumerate([*families, *chains(160, random.Random(7), 6)])]
    run(stand, requests, running=200)
    stand.settle()
    assert stand.is_at_rest()
    assert not stand.store._lookups.requests
    assert len(stand.store._holds) == len(stand.store._promotions) == 0
    assert stand.total("hits", "below") > 10
    # Two hundred take turns for eight slots, and each store takes two steps.
    assert max(request.longest_refusal for request in requests) < 1000


def test_a_prefix_larger_than_host_memory_ends_in_a_load_of_its_head(new_stand: NewStand) -> None:
    """No livelock, where its promotions would evict one another; and no wait for room that only its own end would make."""
    stand = new_stand(slots=8, lookup_timeout_s=600.0)
    chain = keys(30)
    for start in range(0, 30, 4):
        stand.put(chain[start : start + 4])
        stand.settle()
    stand.evict_all()
    assert stand.hits(chain) == 6
    assert stand.total("no_room", "lookup") == 24
    assert stand.is_at_rest()


def test_a_store_larger_than_host_memory_stores_its_head(new_stand: NewStand) -> None:
    stand = new_stand({}, slots=8)
    slots = stand.put(keys(30))
    assert slots is not None
    assert [slot is not None for slot in slots] == [True] * 8 + [False] * 22
    assert stand.total("unfit_stores") == 22
    assert stand.hits(keys(30)) == 6


def test_a_store_larger_than_the_reserve_stores_its_head_though_hits_wait(new_stand: NewStand) -> None:
    """LIV-21: the engine asks for more each time that it is refused, so that waiting would never end."""
    stand = new_stand({}, slots=8)
    stand.put(keys(6))
    look_up = stand.request()
    assert stand.ask(keys(6), look_up) == [Lookup.HIT] * 6
    slots = stand.put(keys(5, 200))
    assert slots is not None
    assert [slot is not None for slot in slots] == [True] * 2 + [False] * 3
    assert stand.total("unfit_stores") == 3
    stand.load(look_up, keys(6))


def test_a_store_within_the_reserve_is_never_cut(new_stand: NewStand) -> None:
    """It is asked again instead, until a running transfer ends."""
    stand = new_stand({}, slots=8)
    first = stand.store.begin_store("first", keys(7))
    assert first is not None
    assert stand.store.begin_store("second", keys(2, 50)) is None
    stand.store.end_store(keys(7))
    assert stand.put(keys(2, 50)) is not None
    assert not stand.total("unfit_stores")


def test_hits_that_are_kept_too_long_are_given_up_for_a_whole_step(new_stand: NewStand) -> None:
    """An engine looks up before it stores: a request that holds again at once would leave no moment for a store."""
    stand = new_stand({}, slots=8)
    stand.put(keys(6))
    waiting = stand.request()
    assert stand.ask(keys(6), waiting) == [Lookup.HIT] * 6
    stand.set_timeouts(hold_timeout_s=0.0)
    time.sleep(0.01)
    stand.store.flush()
    stand.set_timeouts(hold_timeout_s=LIMIT_S)
    assert [stand.store.lookup(waiting, one) for one in keys(6)] == [Lookup.PENDING] * 6
    assert stand.pinned() == 0
    stand.store.flush()
    assert [stand.store.lookup(waiting, one) for one in keys(6)] == [Lookup.HIT] * 6


def test_promotions_of_queued_requests_leave_room_for_a_running_store(new_stand: NewStand) -> None:
    """CAP-09: fifty queued look-ups that hit a slow tier, and one store."""
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend, slots=8, tier_settings={"load_timeout_s": LIMIT_S})
    for start in range(0, 50, 4):
        stand.put(keys(4, start))
        stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", Hang()))
    queued = [stand.request() for _ in range(50)]
    stand.wait(lambda: [stand.store.lookup(name, key(number)) for number, name in enumerate(queued)] and backend.hanging)
    stand.step()
    running = stand.request()
    for number in range(20):
        # Each is there before the next: what a store needs is never more than the reserve.
        assert stand.put([key(1000 + number)], running) is not None
    assert stand.store.metrics.gauge_value("open_promotions") == 1
    backend.heal()


@pytest.mark.parametrize("hangs", [("get",), ("get", "put")])
def test_a_tier_that_hangs_turns_no_chunk_of_host_memory_into_a_miss(hangs: tuple[str, ...], new_stand: NewStand) -> None:
    """LIV-09: what it is to bring waits for it within a share, and the rest of the room is for hits."""
    backend = FaultyBackend(Wide(open_memory(""), 8))
    stand = new_stand(
        backend, slots=64, cascade_fraction=0.5, lookup_timeout_s=10 * LIMIT_S, tier_settings={"load_timeout_s": 10 * LIMIT_S}
    )
    for start in range(0, 64, 16):
        stand.put(keys(16, 1000 + start))
        stand.settle()
    stand.evict_all()
    stand.put(keys(8))
    stand.settle()
    for operation in hangs:
        backend.arm(Fault(operation, Hang()))
    if "put" in hangs:
        for start in range(0, 32, 4):
            stand.put(keys(4, 2000 + start))
    queued = {stand.request(): keys(16, 1000 + start) for start in range(0, 64, 16)}

    def promotions() -> float:
        for name, chain in queued.items():
            for one in chain:
                stand.store.lookup(name, one)
        return stand.store.metrics.gauge_value("open_promotions")

    stand.wait(lambda: promotions() == 8, "its share")
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        assert promotions() == 8
        stand.step()
    assert stand.hits(keys(8)) == 8
    backend.heal()


def test_a_prefix_larger_than_the_share_of_its_tier_is_loaded_as_long_as_the_tier_brings_chunks(new_stand: NewStand) -> None:
    """Longer than a look-up waits for a tier that brings nothing."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("get", Hang(0.75))])
    stand = new_stand(backend, slots=16, lookup_timeout_s=3.0, tier_settings={"batch_records": 1})
    for start in (0, 6):
        stand.put(keys(6, start))
        stand.settle()
    stand.evict_all()
    assert stand.hits(keys(12)) == 12
    assert not stand.total("no_room", "lookup")
    assert stand.is_at_rest()


def test_hits_that_wait_leave_room_for_a_running_store(new_stand: NewStand) -> None:
    stand = new_stand({}, slots=8)
    stand.put(keys(8))
    queued = [stand.request() for _ in range(8)]
    held = [stand.store.lookup(name, key(number)) for number, name in enumerate(queued)]
    assert held == [Lookup.HIT] * 6 + [Lookup.PENDING] * 2
    stand.step()
    assert stand.put([key(100)]) is not None
    assert all(stand.store.lookup(name, key(number)) is Lookup.HIT for number, name in enumerate(queued[:6]))


def scattered(stand: Stand) -> list[bytes]:
    """Fill host memory with small chunks. Returns one of each slab."""
    count = stand.host.could_admit(keys(100_000))
    for start in range(0, count, 8):
        assert stand.put(keys(min(8, count - start), start)) is not None
    slots = [stand.host.get(one) for one in keys(count)]
    return [slot.key for slot in {slot.slab: slot for slot in slots if slot is not None}.values()]


def test_hits_that_wait_in_every_slab_make_way_for_a_store_of_another_size(new_stand: NewStand) -> None:
    """CAP-09: few as they are. Who held them is told so in the same step, and may have those that are left in the next."""
    stand = new_stand({}, slots=10, sizes=(60, 60_000))
    held = scattered(stand)
    waiting, other = stand.request(), stand.request()
    assert stand.ask(held[1:], waiting) == [Lookup.HIT] * (len(held) - 1)
    assert stand.ask(held[:1], other) == [Lookup.HIT]
    assert stand.put([key(1, group=1)]) is not None
    assert stand.store.lookup(waiting, held[-1]) is Lookup.PENDING
    assert stand.total("expired_holds") == 1
    # The one whose hits were not in the way keeps them.
    assert stand.store.lookup(other, held[0]) is Lookup.HIT
    stand.load(other, held[:1])
    stand.step()
    assert stand.ask(held[1:], waiting).count(Lookup.HIT) == len(held) - 2
    stand.store.end_request(waiting)
    assert stand.is_at_rest()


def test_hits_that_are_not_in_the_way_of_a_store_are_kept(new_stand: NewStand) -> None:
    """Running loads keep the slabs: taking back what waits would be of no use."""
    stand = new_stand({}, slots=10, sizes=(60, 60_000))
    one_each = scattered(stand)
    loading, waiting = stand.request(), stand.request()
    assert stand.ask(one_each, waiting) == [Lookup.HIT] * len(one_each)
    stand.store.begin_load(loading, one_each)
    for _ in range(3):
        assert stand.store.begin_store("running", [key(1, group=1)]) is None
        assert [stand.store.lookup(waiting, one) for one in one_each] == [Lookup.HIT] * len(one_each)
        stand.step()
    stand.store.end_load(loading, one_each)
    stand.wait(lambda: stand.store.begin_store("running", [key(1, group=1)]) is not None)
    assert stand.total("expired_holds") == 1
    stand.store.end_store([key(1, group=1)], incomplete=[key(1, group=1)])
    stand.store.end_request(waiting)
    assert stand.is_at_rest()


def test_a_key_that_finds_no_room_is_pending_and_then_a_counted_miss(new_stand: NewStand) -> None:
    """CAP-10: never a bare MISS for what a tier has."""
    stand = new_stand(slots=8)
    stand.put([key(50)])
    stand.settle()
    stand.evict_all()
    stand.put(keys(8))
    stand.settle()
    loader = stand.request()
    assert stand.ask(keys(6), loader) == [Lookup.HIT] * 6
    stand.store.begin_load(loader, keys(6))
    fills = stand.store.begin_store(loader, keys(2, 20))
    assert fills is not None
    late = stand.request()
    assert stand.store.lookup(late, key(50)) is Lookup.PENDING
    stand.wait(lambda: len(stand.store._promotions._queue))
    stand.set_timeouts(lookup_timeout_s=0.1)
    assert stand.ask([key(50)], late) == [Lookup.MISS]
    stand.set_timeouts(lookup_timeout_s=LIMIT_S)
    assert stand.total("no_room", "lookup") == 1
    # And once there is room it is found.
    stand.store.end_load(loader, keys(6))
    stand.store.end_store(keys(2, 20), incomplete=keys(2, 20))
    assert stand.hits([key(50)]) == 1


def test_a_request_that_holds_something_does_not_wait_for_room(new_stand: NewStand) -> None:
    """Two requests that each hold what the other waits for would wait for ever."""
    stand = new_stand(slots=8, lookup_timeout_s=600.0)
    for start in (0, 100):
        stand.put(keys(6, start))
        stand.settle()
        stand.evict_all()
    first, second = stand.request(), stand.request()
    # Half of each is there: each holds three, which is all that may be held, and wants three more.
    stand.put([*keys(3), *keys(3, 100)])
    stand.settle()
    answers: dict[str, list[Lookup]] = {}

    def settled() -> bool:
        for name, chain in ((first, keys(6)), (second, keys(6, 100))):
            answers[name] = [stand.store.lookup(name, one) for one in chain]
        return not any(Lookup.PENDING in told for told in answers.values())

    stand.wait(settled)
    assert answers == {name: [Lookup.HIT] * 3 + [Lookup.MISS] * 3 for name in (first, second)}
    stand.load(first, keys(3))
    stand.load(second, keys(3, 100))


def test_a_tier_that_hangs_keeps_its_share_of_host_memory_and_no_more(new_stand: NewStand) -> None:
    """LIV-08, LIV-09: what it does not take is shed and counted, and the other tier is served as before."""
    slow = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(
        {"slow": slow, "fast": open_memory("")}, slots=16, cascade_fraction=0.5, tier_settings={"store_timeout_s": 10 * LIMIT_S}
    )
    for number in range(40):
        assert stand.put([key(number)]) is not None
        stand.wait(lambda number=number: stand.has("fast", key(number)))
    stand.wait(lambda: stand.total("cascades", "fast", "stored") == 40)
    assert stand.pinned() == 4
    slow.heal()
    assert stand.store.drain()
    # Of forty that came, sixteen are in host memory when their turn comes.
    assert stand.total("cascades", "slow", "stored") == 16
    assert stand.total("cascades", "slow", "shed") == 24
    assert stand.is_at_rest()


def test_stores_in_a_loop_are_taken_in_at_once_and_bounded(new_stand: NewStand) -> None:
    """LIV-08: a thousand stores over a backend that takes its time; the queue stays within its share, drops are counted."""
    backend = FaultyBackend(Wide(open_memory(""), 1), [Fault("put", Hang(0.01))])
    stand = new_stand(backend, slots=16, cascade_fraction=0.25)
    for number in range(1000):
        assert stand.put([key(number)]) is not None
        assert stand.store.metrics.gauge_value("cascade_bytes") <= 2 * 0.25 * 16 * stand.record_bytes
        stand.store.poll()
    stand.settle()
    by_result = {result: stand.total("cascades", "below", result) for result in ("stored", "shed", "failed")}
    assert sum(by_result.values()) == 1000
    assert by_result["stored"] > 0
    assert by_result["shed"] > 0
    assert stand.is_at_rest()


def test_many_threads_may_drive_one_store(new_stand: NewStand) -> None:
    """Thread-safe: each has chains of its own and shares others; nobody meets an exception or a wrong byte."""
    stand = new_stand(slots=32, lookup_timeout_s=0.3)
    failures: list[BaseException] = []
    over = threading.Event()

    def drive(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn, chain in enumerate(chains(25, rng, 5)):
                request = Request(stand, 1000 * number + turn, chain)
                while request.step():
                    stand.store.poll()
                    stand.store.flush()
                    if over.is_set():
                        return
        except BaseException as error:  # noqa: BLE001  whatever a thread meets is the test's to see
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT_S)
    over.set()
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    stand.settle()
    assert stand.is_at_rest()


def test_stores_of_two_requests_share_what_is_there(new_stand: NewStand) -> None:
    """RACE-04: one slot is written by one store alone."""
    stand = new_stand({})
    first = stand.store.begin_store(stand.request(), keys(4))
    second = stand.store.begin_store(stand.request(), keys(6))
    assert first is not None
    assert second is not None
    slots: list[Slot | None] = [*first, *second]
    taken = [slot.number for slot in slots if slot is not None]
    assert len(taken) == len(set(taken)) == 6
