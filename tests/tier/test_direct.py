"""The direct way: nothing is copied, and a row that a call may still touch is held, and released exactly once."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
from record_rows import ROW_BYTES, RecordRows
from tier_bench import FAST, LIMIT_S, PAYLOAD_BYTES, SLOT_BYTES, Engine, Shop, identity, key, keys
from tier_faults import faulty, only

from kvstore_sdk.backend import Backend, Buffer, ConfigError, Get, Mode, Put, Region
from kvstore_sdk.identity import fresh_epoch
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, InDoubt, Raise, RecordingBackend, WrongBytes
from kvstore_sdk.tier import RecordMemory, Tier, TierSettings
from kvstore_sdk.tier import direct as direct_module
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture
def way() -> str:
    return "direct"


class Watched(BackendWrapper):
    """Keeps the buffers of every put and get of a record, and when regions were made known and given up."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.buffers: dict[str, list[Buffer]] = {"put": [], "get": []}
        self.modes: list[Mode] = []
        self.regions: list[tuple[str, Region]] = []

    def around(self, op, items, deadline, proceed):  # type: ignore[no-untyped-def]
        for item in items:
            if isinstance(item, (Put, Get)) and not item.name.endswith("manifest.json"):
                self.buffers[op] += item.parts if isinstance(item, Put) else item.into
                self.modes += [item.mode] if isinstance(item, Put) else []
        return super().around(op, items, deadline, proceed)

    def register_region(self, region: Region) -> None:
        self.regions.append(("register", region))

    def unregister_region(self, region: Region) -> None:
        self.regions.append(("unregister", region))


def places(buffers: list[Buffer], memory: RecordRows) -> set[tuple[int, int]]:
    """(offset, length) of buffers that all lie in the memory's own region."""
    assert all(buffer.region is memory.region for buffer in buffers)
    return {(buffer.offset, buffer.length) for buffer in buffers}


# Nothing is copied.


def test_a_backend_reads_and_writes_the_rows_themselves(new_engine: NewEngine) -> None:
    backend = Watched(open_memory(""))
    engine = new_engine(backend)
    memory = engine.memory
    some = [key(number, group=number % 2) for number in range(6)]
    assert engine.store(some).success
    assert engine.load(some, rows=range(10, 16)).success
    assert places(backend.buffers["put"], memory) == {(memory.record(row).offset, memory.record(row).length) for row in range(6)}
    assert places(backend.buffers["get"], memory) == {(memory.record(row).offset, memory.record(row).length) for row in range(10, 16)}
    assert all(memory.holds(10 + place, one) for place, one in enumerate(some))
    assert engine.total("store_bytes") == engine.total("load_bytes") == sum(PAYLOAD_BYTES[number % 2] for number in range(6))


def test_what_is_stored_is_the_record_of_the_row_byte_for_byte(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.store(keys(3))
    assert [Shop(engine.backend).record(one) for one in keys(3)] == [engine.memory.sealed(one) for one in keys(3)]


def test_both_ways_share_a_store(new_engine: NewEngine) -> None:
    """A record is the same bytes, whichever way it came."""
    backend = open_memory("")
    direct = new_engine(backend)
    staged = Engine(backend)
    direct.store(keys(3))
    staged.store(keys(3, start=3))
    assert staged.load(keys(3)).success
    assert direct.load(keys(3, start=3)).success
    assert all(staged.memory.holds(row, key(row)) and direct.memory.holds(row, key(row + 3)) for row in range(3))
    staged.close()


def test_the_regions_are_announced_before_the_first_call_and_given_up_after_the_last(new_engine: NewEngine) -> None:
    backend = Watched(open_memory(""))
    recording = RecordingBackend(backend)
    engine = new_engine(recording)
    known = [region for what, region in backend.regions if what == "register"]
    assert engine.memory.region in known
    engine.store(keys(3))
    engine.load(keys(3))
    engine.tier.close()
    assert not engine.tier.touches_memory
    assert not recording.breaches
    assert [region for what, region in backend.regions if what == "unregister"] == known
    assert len(engine.memory.region.view) > 0, "the memory is its owner's, who unmaps it"


def test_a_backend_that_refuses_a_region_is_told_of_none(new_engine: NewEngine) -> None:
    class Picky(Watched):
        def register_region(self, region: Region) -> None:
            if self.regions:
                raise ConfigError("picky", "region", "one is enough")
            super().register_region(region)

    backend = Picky(open_memory(""))
    memory = RecordRows(4)
    with pytest.raises(ConfigError, match="one is enough"):
        Tier(backend, memory, identity=identity(), settings=TierSettings(**FAST))
    assert backend.regions == [("register", memory.region), ("unregister", memory.region)]


def test_a_memory_is_a_record_memory_by_what_it_has(new_engine: NewEngine) -> None:
    assert isinstance(RecordRows(1), RecordMemory)
    staged = Engine(open_memory(""))
    assert not isinstance(staged.memory, RecordMemory)
    staged.close()


# Rows that are no place of the record.


def test_a_row_without_the_sealed_record_is_not_stored_under_its_key(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Never another chunk's bytes under a key, nor what nobody sealed; the others of the batch go on."""
    backend = Watched(open_memory(""))
    engine = new_engine(backend, io_threads=1)
    memory = engine.memory
    for row in range(5):
        memory.write(row, key(row))
    memory.write(0, key(50))
    memory.paint(1)
    memory.view(2)[100] ^= 1
    memory.identity = identity(layout="other-layout")
    memory.write(3, key(3))
    result = engine.result(engine.submit_store(keys(5), range(5), generation=None))
    assert (result.done, result.failed, result.held) == ((key(4),), tuple(keys(4)), ())
    assert engine.total("stores", "refused") == 4
    assert engine.total("breaker_opened") == 0
    assert not any(Shop(backend).has(one) for one in keys(4))
    assert caplog.text.count("it is not stored") == 4
    # And no row is lost by it.
    assert engine.store(keys(4, start=60), rows=range(4)).success


def test_a_record_of_the_namespace_before_a_reset_is_not_stored_after_it(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.memory.write(0, key(0))
    engine.tier.reset()
    assert engine.result(engine.submit_store([key(0)], [0], generation=None)).failed == (key(0),)
    assert engine.store([key(0)]).success


class Odd(RecordRows):
    """Says odd things about a row."""

    def __init__(self, say: Callable[[RecordRows], Buffer]) -> None:
        super().__init__(8)
        self.say = say

    def record(self, row: int) -> Buffer:
        return self.say(self) if row == 1 else super().record(row)


def no_such_row(memory: RecordRows) -> Buffer:
    raise KeyError("row 1")


@pytest.mark.parametrize(
    ("say", "result"),
    [
        (no_such_row, "failed"),
        (lambda memory: memory.region.buffer(4096 + 512, 12288), "refused"),
        (lambda memory: memory.region.buffer(4096, 8192), "refused"),
        (lambda memory: Buffer(Region(12288), 0, 12288), "refused"),
    ],
    ids=["none", "not on a page", "of another length", "of another region"],
)
def test_a_row_that_is_no_place_for_the_record_fails_alone(say: Callable[[RecordRows], Buffer], result: str, new_engine: NewEngine) -> None:
    backend = Watched(open_memory(""))
    engine = new_engine(backend, memory=Odd(say), io_threads=1)
    Engine.store(writer := Engine(backend), keys(3))
    writer.memory.paint(0)
    for kind, submit in (("stores", engine.tier.submit_store), ("loads", engine.tier.submit_load)):
        for row in (0, 2):
            engine.memory.write(row, key(row))
        engine.tier._table.clear()
        submit(job := 100 + len(kind), keys(3), range(3))
        ended = engine.result(job)
        assert (ended.done, ended.failed, ended.held) == ((key(0), key(2)), (key(1),), ())
        assert engine.total(kind, result) == 1
    places(backend.buffers["get"], engine.memory)
    writer.close()


# Rows that are held.


@pytest.mark.parametrize("after", [False, True])
def test_a_load_that_hangs_ends_in_time_and_its_rows_are_released_once_when_the_call_returns(after: bool, new_engine: NewEngine) -> None:
    backend = faulty(calls=64)
    engine = new_engine(backend, load_timeout_s=0.2, batch_records=1)
    engine.store(keys(8))
    hang = Fault("get", Hang(after=after), names=only(1, 2))
    backend.arm(hang)
    result = engine.result(engine.submit_load(keys(4), rows=range(10, 14)))
    assert (result.failed, result.held) == ((key(1), key(2)), (11, 12))
    assert result.elapsed_s < 2.0
    assert engine.memory.holds(10, key(0))
    assert engine.memory.holds(13, key(3))
    if not after:
        assert engine.memory.is_painted(11)
        assert engine.memory.is_painted(12)
    engine.wait(lambda: engine.tier.metrics.gauge_value("quarantined_bytes") == 2 * SLOT_BYTES)
    # Nobody else may load into them, and everything else goes on.
    assert engine.load([key(5)], rows=[11]).failed == (key(5),)
    assert engine.total("loads", "refused") == 1
    assert engine.load([key(6)], rows=[20]).success
    engine.steps(0.05)
    assert engine.held == {11: 1, 12: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {11: 0, 12: 0}
    # The late call wrote what it was asked for, before that, and nothing after it.
    for row in (11, 12):
        engine.memory.paint(row, 0xEE)
    engine.steps(0.05)
    assert all(engine.memory.is_painted(row, 0xEE) for row in (11, 12))
    assert engine.load([key(5)], rows=[11]).success


def test_a_store_that_hangs_holds_its_row_for_reading_only(new_engine: NewEngine) -> None:
    """It stores what was submitted, as the row does not change while it is held; other stores may read the row too."""
    backend = faulty(Fault("put", Hang(), names=only(0), times=1), calls=64)
    engine = new_engine(backend, store_timeout_s=0.2)
    result = engine.store([key(0)], rows=[7])
    assert (result.failed, result.held) == ((key(0),), (7,))
    engine.tier.submit_load(99, [key(0)], [7])
    assert engine.result(99).failed == (key(0),)
    again = engine.result(engine.submit_store([key(0)], [7], generation=None))
    assert (again.done, again.held) == ((key(0),), ())
    assert engine.held == {7: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert Shop(backend).record(key(0)) == engine.memory.sealed(key(0))


def test_a_row_that_is_held_twice_is_released_twice(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Hang(), names=only(0)), calls=64)
    engine = new_engine(backend, store_timeout_s=0.2)
    jobs = [engine.submit_store([key(0)], [3]), engine.submit_store([key(0)], [3], generation=None)]
    assert backend.wait_hanging(2)
    assert [engine.result(job).held for job in jobs] == [(3,), (3,)]
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {3: 0}


def test_a_row_is_released_after_its_result_and_not_before(new_engine: NewEngine) -> None:
    """The call may come back between the end of the job and the engine's next poll: then the row was never held, or is released later."""
    backend = faulty()
    engine = new_engine(backend, load_timeout_s=0.1)
    engine.store(keys(1))
    backend.arm(Fault("get", Hang(), names=only(0), times=1))
    engine.submit_load(keys(1), rows=[4])
    assert backend.wait_hanging()
    time.sleep(0.2)
    engine.tier._desk.expire(time.monotonic())
    assert engine.tier.take_released() == []
    backend.release()
    end_s = time.monotonic() + LIMIT_S
    while not engine.tier._work.is_untouched:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert engine.tier.take_released() == []
    [result] = engine.tier.poll()
    assert (result.failed, result.held) == ((key(0),), ())
    assert engine.tier.take_released() == []


@pytest.mark.parametrize("operation", ["get", "put"])
def test_rows_in_doubt_are_held_until_they_are_settled(operation: str, new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, breaker_failures=100)
    engine.store(keys(4))
    backend.arm(Fault(operation, InDoubt(), names=only(1, 21)))
    some, submit = (keys(4), engine.submit_load) if operation == "get" else (keys(4, start=20), engine.submit_store)
    result = engine.result(submit(some, range(10, 14)))
    assert (result.failed, result.held) == ((some[1],), (11,))
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == SLOT_BYTES
    engine.steps(0.2)
    assert engine.held == {11: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {11: 0}
    assert not recording.breaches
    if operation == "put":
        assert Shop(backend).record(some[1]) == engine.memory.sealed(some[1])


def test_rows_held_count_against_what_may_be_held_and_open_the_breakers(new_engine: NewEngine) -> None:
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1, load_timeout_s=0.1, breaker_failures=100, max_quarantined_bytes=3 * SLOT_BYTES)
    engine.store(keys(8))
    backend.arm(Fault("get", Hang()))
    jobs = [engine.submit_load([key(number)], rows=[20 + number]) for number in range(4)]
    assert all(engine.result(job).held for job in jobs)
    engine.wait(lambda: engine.tier.metrics.gauge_value("breaker_open", "read") == 1)
    assert engine.load([key(6)], rows=[30]).held == ()
    backend.heal()
    engine.wait(engine.in_rest)
    engine.wait(lambda: engine.finds(key(0)))


def test_a_bad_record_is_looked_at_only_while_its_row_is_ours(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends while a row is verified holds it: what the engine writes there next is not taken for what was stored."""
    engine = new_engine(load_timeout_s=0.1)
    engine.store(keys(1))
    real = direct_module.verify

    def slow(*args):  # type: ignore[no-untyped-def]
        time.sleep(0.4)
        return real(*args)

    monkeypatch.setattr(direct_module, "verify", slow)
    result = engine.load(keys(1), rows=[5])
    assert result.held == (5,)
    engine.wait(engine.in_rest)
    assert engine.memory.holds(5, key(0))
    assert engine.total("corrupt") == 0


# Several tiers, and their end.


def test_several_tiers_store_the_same_rows_at_once(new_engine: NewEngine) -> None:
    memory = RecordRows(16)
    slow = [faulty(Fault("put", Hang(0.01))) for _ in range(3)]
    engines = [new_engine(backend, memory=memory, batch_records=2) for backend in slow]
    for row in range(12):
        memory.write(row, key(row))
    jobs = [engine.submit_store(keys(12), range(12), generation=None) for engine in engines]
    for engine, job in zip(engines, jobs, strict=True):
        assert engine.result(job).success
        assert all(Shop(engine.backend).record(one) == memory.sealed(one) for one in keys(12))
    assert all(memory.holds(row, key(row)) for row in range(12))


def test_tiers_that_are_reset_with_one_epoch_share_the_new_namespace(new_engine: NewEngine) -> None:
    backend = open_memory("")
    one, other = new_engine(backend), new_engine(backend)
    one.store(keys(2))
    assert other.finds(key(0))
    epoch = fresh_epoch()
    for engine in (one, other):
        engine.tier.reset(epoch=epoch)
    assert one.tier.identity.namespace == other.tier.identity.namespace != identity().namespace
    assert not other.finds(key(0))
    assert one.store(keys(1)).success
    assert other.finds(key(0))
    assert other.load(keys(1)).success
    one.tier.reset("w1", epoch)
    assert (one.tier.identity.weights, one.tier.identity.epoch) == ("w1", epoch)


def test_an_epoch_that_is_none_is_refused_and_changes_nothing(new_engine: NewEngine) -> None:
    engine = new_engine()
    job = engine.submit_store(keys(1))
    with pytest.raises(ConfigError, match="epoch"):
        engine.tier.reset(epoch="7")
    assert engine.tier.identity == identity()
    assert engine.result(job).success


def test_close_during_calls_that_hang_holds_their_rows_and_leaves_the_memory_mapped(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Watched(faulty(calls=64))
    faults = backend.inner
    assert isinstance(faults, FaultyBackend)
    engine = new_engine(backend, close_timeout_s=0.4, load_timeout_s=LIMIT_S, batch_records=1)
    engine.store(keys(3))
    faults.arm(Fault("get", Hang(after=True), names=only(1)), Fault("close", Hang()))
    job = engine.submit_load(keys(3), rows=range(10, 13))
    assert faults.wait_hanging()
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < 0.4 + 0.5
    assert "the memory of records stays mapped" in caplog.text
    assert engine.result(job).held == (11,)
    assert engine.tier.touches_memory
    assert ("unregister", engine.memory.region) not in backend.regions
    assert engine.tier.take_released() == []
    faults.heal()
    # Who still asks hears of it, though the tier is closed.
    engine.wait(lambda: not engine.held.total())
    assert engine.tier.touches_memory, "the backend was never told that the region is given up"


def test_a_region_that_is_in_doubt_for_ever_is_not_unmapped_when_its_owner_forgets_it(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0), Fault("settle", Raise(RuntimeError)))
    engine = Engine(backend, memory=RecordRows(8), close_timeout_s=0.3)
    engine.store(keys(1))
    backend.arm(Fault("get", InDoubt()))
    assert engine.load(keys(1)).held == (0,)
    region = weakref.ref(engine.memory.region)
    engine.tier.close()
    assert engine.tier.take_released() == []
    del engine
    assert region() is not None
    backend.heal()


# Corruption, in place.


def test_a_bad_record_is_read_again_in_place_and_then_repaired(new_engine: NewEngine) -> None:
    backend = FaultyBackend(Watched(open_memory("")))
    watched = backend.inner
    assert isinstance(watched, Watched)
    engine = new_engine(backend)
    engine.store(keys(2))
    backend.arm(Fault("get", WrongBytes(offset=4100), names=only(0), times=1))
    assert engine.load(keys(1), rows=[9]).success
    assert engine.memory.holds(9, key(0))
    assert engine.total("unstable_reads") == 1
    Shop(watched.inner).replace(key(0), bytes(ROW_BYTES))
    assert engine.load(keys(1), rows=[9]).failed == (key(0),)
    assert engine.store(keys(1)).success
    assert watched.modes[-1] is Mode.REPLACE
    assert engine.load(keys(1), rows=[9]).success


def test_a_store_on_disk_is_read_straight_into_the_row(new_engine: NewEngine, tmp_path: object) -> None:
    backend = Watched(open_fs(f"{tmp_path}/kv"))
    engine = new_engine(backend)
    engine.store(keys(5))
    other = new_engine(backend)
    assert other.load(keys(5)).success
    assert all(other.memory.holds(row, key(row)) for row in range(5))
    assert len(places(backend.buffers["get"], other.memory)) == 5
