"""Every job is reported once, and every row that it held is released once, whatever the engine and the backend do; rows are right or
untouched; nothing is lost."""

from __future__ import annotations

import functools
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from record_rows import RecordRows
from tier_bench import LIMIT_S, SLOT_BYTES, Engine, Memory, key

from kvstore_sdk.backend import Capabilities, GetResult, GetStatus, NoSpaceError, PutResult, PutStatus, UnavailableError
from kvstore_sdk.testing import (
    BackendWrapper,
    Fault,
    FaultyBackend,
    Hang,
    InDoubt,
    Raise,
    RecordingBackend,
    Return,
    ReturnLate,
    Say,
    WrongBytes,
    WrongSize,
)
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

FAULTS: list[tuple[str, object]] = [
    ("*", Raise(RuntimeError)),
    ("put", Raise(UnavailableError, after=True)),
    ("*", Hang(0.004)),
    ("*", Hang()),
    ("get", Hang(after=True)),
    ("*", ReturnLate(0.12)),
    ("*", Return(lambda _: None)),
    ("*", Return(lambda results: results[:-1])),
    ("put", Say(PutResult(PutStatus.TIMED_OUT))),
    ("put", Say(PutResult(PutStatus.UNKNOWN), after=True)),
    ("put", Say(PutResult.failed(NoSpaceError("full")))),
    ("get", Say(GetResult(GetStatus.TIMED_OUT))),
    ("get", Say(GetResult(GetStatus.FOUND))),
    ("get", Say(GetResult(GetStatus.MISSING))),
    ("get", WrongBytes()),
    ("put", WrongBytes(offset=5000)),
    ("get", WrongSize(-7)),
    ("get", InDoubt(0.01)),
    ("put", InDoubt(0.01)),
    ("put", InDoubt()),
]


def may_break(memory: type[Any]) -> list[str]:
    """Operations whose answers may be no answers. Into rows not `get` and `put`: tickets would be lost with them, and rows for good."""
    return ["exists", "put", "get", "settle"] if memory is Memory else ["exists", "settle"]


SOME_KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=6)


class Submitted(NamedTuple):
    load: bool
    keys: list[bytes]
    rows: list[int]
    generation: int


class Wide(BackendWrapper):
    """More calls at a time than the tier has threads, so that hung ones are stood in for."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=64, max_concurrency=12)


class Ledger:
    """An engine that keeps book of every job and every row."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: dict[int, Submitted] = {}
        self.seen: set[int] = set()
        self.free = list(range(engine.memory.rows))
        self.held: list[int] = []
        self.painted: dict[int, int] = {}
        self.generation = 0
        self.submitted = {True: 0, False: 0}

    def take_rows(self, count: int) -> list[int]:
        rows = [self.free.pop() for _ in range(min(count, len(self.free)))]
        for row in rows:
            self.painted.pop(row, None)
        return rows

    def store(self, some: list[bytes]) -> None:
        rows = self.take_rows(len(some))
        job = self.engine.submit_store(some[: len(rows)], rows, self.generation)
        self.note(job, Submitted(False, some[: len(rows)], rows, self.generation))

    def load(self, some: list[bytes]) -> None:
        rows = self.take_rows(len(some))
        job = self.engine.submit_load(some[: len(rows)], rows)
        self.note(job, Submitted(True, some[: len(rows)], rows, self.generation))

    def note(self, job: int, submitted: Submitted) -> None:
        self.jobs[job] = submitted
        self.submitted[submitted.load] += len(submitted.keys)

    def step(self) -> None:
        """Take what ended, and check it. Then the rows that are not held are the engine's own, and are used for something else."""
        self.engine.step()
        over = [row for row in self.held if not self.engine.held[row]]
        self.held = [row for row in self.held if self.engine.held[row]]
        for job in self.engine.results.keys() - self.seen:
            self.seen.add(job)
            result, submitted = self.engine.results[job], self.jobs[job]
            assert sorted((*result.done, *result.failed, *result.skipped)) == sorted(submitted.keys)
            assert set(result.held) <= set(submitted.rows)
            assert isinstance(self.engine.memory, RecordRows) or not result.held
            done = set(result.done) - set(result.failed)
            for one, row in zip(submitted.keys, submitted.rows, strict=True):
                assert not (one in done and row in result.held), "only what failed is held"
                if submitted.load and one in done:
                    assert self.engine.memory.holds(row, one, submitted.generation), "a load that is done has the right bytes"
            self.held += (row for row in result.held if self.engine.held[row])
            over += (row for row in submitted.rows if row not in self.held)
        for row in over:
            self.painted[row] = random.Random(row + len(self.seen)).randrange(256)
            self.engine.memory.paint(row, self.painted[row])
        self.free += over

    def rows_are_left_alone(self) -> None:
        for row, fill in self.painted.items():
            assert self.engine.memory.is_painted(row, fill), f"row {row} was touched after its job was reported and it was released"

    def finish(self, backend: FaultyBackend, *, closed: bool = False) -> None:
        """Everything that was submitted ends, every slot comes back, and every chunk was counted once."""

        def in_rest() -> bool:
            # Again and again: a call that two faults hit hangs twice.
            backend.heal()
            self.step()
            return not self.engine.tier.busy and self.engine.in_rest()

        def is_over() -> bool:
            backend.heal()
            self.step()
            return not self.engine.tier.busy

        # Who closed gave up what was in doubt then.
        self.engine.wait(is_over if closed else in_rest, "the end of every job, and every slot")
        self.step()
        assert self.engine.results.keys() == self.jobs.keys()
        self.rows_are_left_alone()
        for load, counter in ((True, "loads"), (False, "stores")):
            assert self.engine.total(counter) == self.submitted[load]
        assert self.engine.tier.metrics.gauge_value("queued_store_bytes") == 0
        assert self.engine.tier._work.folded_store_chunks == 0
        assert closed or not self.held
        assert self.engine.tier._desk.rows_in_use == len(self.held)
        assert len(self.free) + len(self.held) == self.engine.memory.rows == len({*self.free, *self.held})
        self.engine.steps(0.01)
        assert len(self.engine.io_threads()) <= 4


class TierInAnyOrder(RuleBasedStateMachine):
    """An engine that does anything in any order, over a backend that does too."""

    memory: type[Any] = Memory

    @initialize(batch=st.integers(1, 6), slots=st.integers(3, 24), queue=st.sampled_from([3, 1000]), seed=st.integers(0, 99))
    def begin(self, batch: int, slots: int, queue: int, seed: int) -> None:
        self.backend = FaultyBackend(Wide(open_memory("")), [Fault("get", InDoubt(), times=0)], seed=seed)
        self.recording = RecordingBackend(self.backend)
        engine = Engine(
            self.recording,
            memory=self.memory(24),
            batch_records=batch,
            staging_bytes=slots * SLOT_BYTES,
            max_quarantined_bytes=slots * SLOT_BYTES // 2,
            max_queued_store_bytes=queue * 5000,
            load_timeout_s=0.06,
            store_timeout_s=0.06,
            lookup_timeout_s=0.06,
            drain_timeout_s=0.06,
            close_timeout_s=0.3,
            breaker_probe_s=0.02,
        )
        self.closed = False
        self.ledger = Ledger(engine)
        self.tier = engine.tier
        self.asked: dict[tuple[str, bytes], float] = {}

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        try:
            self.ledger.finish(self.backend, closed=self.closed)
            assert self.recording.breaches == []
        finally:
            self.backend.heal()
            self.tier.close()
        for thread in self.ledger.engine.io_threads():
            thread.join(LIMIT_S)
        assert not self.ledger.engine.io_threads()
        assert self.tier.poll() == []

    @rule(numbers=SOME_KEYS, group=st.integers(0, 1))
    def store(self, numbers: list[int], group: int) -> None:
        self.ledger.store([key(number, group) for number in numbers])

    @rule(numbers=SOME_KEYS, group=st.integers(0, 1))
    def load(self, numbers: list[int], group: int) -> None:
        self.ledger.load([key(number, group) for number in numbers])

    @rule(numbers=SOME_KEYS, request=st.sampled_from("rst"))
    def look_up(self, numbers: list[int], request: str) -> None:
        for number in numbers:
            answer = self.tier.lookup(request, key(number))
            since_s = self.asked.setdefault((request, key(number)), time.monotonic())
            if answer is not Lookup.PENDING:
                self.asked[request, key(number)] = time.monotonic()
            assert time.monotonic() - since_s < LIMIT_S

    @rule(request=st.sampled_from("rst"))
    def end_request(self, request: str) -> None:
        self.tier.end_request(request)
        self.asked = {asked: since_s for asked, since_s in self.asked.items() if asked[0] != request}

    @rule(fault=st.sampled_from(FAULTS), times=st.integers(1, 4), skip=st.integers(0, 2))
    def something_goes_wrong(self, fault: tuple[str, object], times: int, skip: int) -> None:
        operation, action = fault
        for one in may_break(self.memory) if isinstance(action, Return) else [operation]:
            self.backend.arm(Fault(one, action, times=times, skip=skip))  # type: ignore[arg-type]

    @rule()
    def heal(self) -> None:
        self.backend.heal()

    @rule()
    def step(self) -> None:
        self.ledger.step()

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.08]))
    def time_passes(self, seconds: float) -> None:
        time.sleep(seconds)
        self.ledger.step()

    @rule()
    def drain(self) -> None:
        self.tier.drain()
        assert not self.tier._desk.has_open
        self.ledger.step()
        assert not self.tier.busy

    @precondition(lambda self: self.ledger.generation < 3)
    @rule()
    def reset(self) -> None:
        self.tier.reset()
        # The engine's weights are others now: equal keys mean other bytes.
        self.ledger.generation += 1
        self.ledger.step()
        assert not self.tier.busy

    @precondition(lambda self: not self.closed and len(self.ledger.jobs) > 10)
    @rule()
    def close(self) -> None:
        self.tier.close()
        self.closed = True
        self.ledger.step()
        assert not self.tier.busy

    @invariant()
    def rows_are_left_alone(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.rows_are_left_alone()


class DirectTierInAnyOrder(TierInAnyOrder):
    """Rows are records, and are held."""

    memory = RecordRows


# Not shrunk: with threads of its own no run is like another.
_SETTINGS = settings(max_examples=25, stateful_step_count=30, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
TestTierInAnyOrder = TierInAnyOrder.TestCase
TestTierInAnyOrder.settings = _SETTINGS
TestDirectTierInAnyOrder = DirectTierInAnyOrder.TestCase
TestDirectTierInAnyOrder.settings = _SETTINGS


@pytest.mark.parametrize("memory", [Memory, RecordRows])
def test_an_engine_that_never_rests_over_a_folder_that_is_never_well(memory: type[Any], tmp_path: Path) -> None:
    """LEAK-03: seconds of everything at once, seeded; afterwards no slot, no job and no row is lost, and the folder is good."""
    draw = random.Random(20)
    backend = FaultyBackend(
        open_fs(str(tmp_path / "kv")),
        [
            Fault("*", Hang(0.002), probability=0.05),
            Fault("*", Raise(UnavailableError), probability=0.04),
            Fault("*", Raise(RuntimeError), probability=0.01),
            Fault("get", WrongBytes(), probability=0.03),
            Fault("put", WrongBytes(offset=6000), probability=0.02),
            Fault("put", Say(PutResult(PutStatus.UNKNOWN), after=True), probability=0.03),
            Fault("get", InDoubt(0.01), probability=0.03),
            Fault("put", InDoubt(0.01), probability=0.02),
            Fault("get", ReturnLate(0.15), probability=0.002),
            *(Fault(operation, Return(lambda results: results[1:]), probability=0.01) for operation in may_break(memory)),
        ],
        seed=7,
    )
    recording = RecordingBackend(backend)
    engine = Engine(
        recording,
        memory=memory(128),
        load_timeout_s=0.3,
        store_timeout_s=0.3,
        lookup_timeout_s=0.3,
        batch_records=4,
        staging_bytes=48 * SLOT_BYTES,
        max_queued_store_bytes=100 * 5000,
        close_timeout_s=LIMIT_S,
        breaker_failures=8,
        breaker_probe_s=0.02,
        hit_ttl_s=0.1,
    )
    ledger = Ledger(engine)

    def all_right(some: list[bytes]) -> bool:
        rows = engine.rows_for(some)
        result = engine.load(some, rows)
        if result.failed:
            # Bad, or too late on a machine that is busy.
            engine.store(list(result.failed))
            return False
        assert all(engine.memory.holds(row, one) for row, one in zip(rows, some, strict=True))
        return True

    hits = misses = 0

    def done_enough() -> bool:
        return hits > 0 and engine.total("loads", "loaded") > 100 and engine.total("stores", "stored") > 20

    try:
        end_s = time.monotonic() + 4.0
        # Longer where the machine is so busy that little was done.
        while time.monotonic() < end_s or (not done_enough() and time.monotonic() < end_s + LIMIT_S):
            some = [key(draw.randrange(200), draw.randrange(2)) for _ in range(draw.randrange(1, 9))]
            kind = draw.random()
            if kind < 0.45:
                ledger.store(some)
            elif kind < 0.9:
                request = engine.request()
                found = []
                for one in some:
                    answer = engine.tier.lookup(request, one)
                    hits += answer is Lookup.HIT
                    misses += answer is Lookup.MISS
                    found += [one] if answer is not Lookup.MISS else []
                ledger.load(found or some)
                engine.tier.end_request(request)
            elif kind < 0.902:
                engine.tier.drain()
            if draw.random() < 0.7:
                ledger.step()
            if len(ledger.free) < 16:
                time.sleep(0.002)
        ledger.finish(backend)
        assert recording.breaches == []
        assert done_enough()
        # What was bad is known as bad or was never read; after a store and a load of everything, everything is right.
        for start in range(0, 200, 50):
            some = [key(number) for number in range(start, start + 50)]
            engine.store(some)
            engine.wait(functools.partial(all_right, some), "chunks that are right")
    finally:
        engine.close()
