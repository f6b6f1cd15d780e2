"""The direct way: nothing is copied, and a row that a call may still touch is held, and released exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from record_rows import ROW_BYTES, RecordRows, Watched, places
from tier_bench import FAST, PAYLOAD_BYTES, Engine, Shop, identity, key, keys
from tier_faults import faulty, only

from kvstore_sdk.backend import Buffer, ConfigError, Mode, Region
from kvstore_sdk.identity import fresh_epoch
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, RecordingBackend, WrongBytes
from kvstore_sdk.tier import RecordMemory, Tier, TierSettings
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture
def way() -> str:
    return "direct"


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
