"""Profile tier: the SDK's Tier over the backend. What an engine asks of a store comes from here, in its orders and from its threads."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from kvstore_sdk.backend import ConfigError, GetStatus
from kvstore_sdk.format import HEADER_BYTES, record_bytes
from kvstore_sdk.keys import GROUP_BYTES, ChunkKey
from kvstore_sdk.testing import Fault, FaultyBackend
from kvstore_sdk.tier import Lookup, TierSettings
from kvstore_sdk.tier.fit import fit
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import ConformanceFailure, require, show
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.tier_driver import TRIES, Borrowed, Engine, identity, overwrite, payload_sizes, read
from kvstore_sdk_conformance.tier_faults import FIRST_SCRIPT, Faults, tell
from kvstore_sdk_conformance.view import VISIBLE_S, View

SDK_LOG = logging.getLogger("kvstore_sdk")
SHA256_BYTES = 32
CHUNKS = 6
"""Of each group: so few that a store of 100 ms a call and one call at a time is done within seconds."""

SCRIPTS, JOBS, FAULT_S = 20, 10, 5.0
"""Scripts of faults, jobs under each, and after how many seconds no more are begun."""
ALL_KINDS, LATEST_S = 10, 40.0
"""Scripts in which every kind of fault comes up, and how long a store, or a machine, that is slow gets to come so far."""
OPEN_JOBS = 6
RECOVERY_S = 15.0
JOB_S = 20.0
"""For the end of jobs and late calls, beside their own time-outs."""

CLOSE_S, GRACE_S = 1.0, 5.0
"""What the Tier has for its end, and what a busy machine may add."""
HALF_S = 2.0
"""For half of the jobs that the Tier is closed with to be done: a slow store is closed in the first ones."""


@proves("KV-TIER-01")
def test_a_tier_can_use_what_is_declared(store: Store, view: View) -> None:
    sizes = payload_sizes(view.capabilities)
    try:
        fits = fit("tier", view.backend, identity(sizes), TierSettings())
    except ConfigError as error:
        raise ConformanceFailure("capabilities that the SDK's Tier can use", error.problem) from error
    declared = view.capabilities.max_name_bytes
    expected = "max_name_bytes of at least 115: chunks are named after their SHA-256"
    require(fits.max_key_bytes >= SHA256_BYTES + GROUP_BYTES, expected, f"max_name_bytes={declared}")
    with Engine(view, sizes, "tier-a") as engine:
        engine.step()


@proves("KV-TIER-02")
def test_chunks_of_one_tier_are_loaded_by_another(store: Store, view: View) -> None:
    sizes = payload_sizes(view.capabilities)
    longest = fit("tier", view.backend, identity(sizes), TierSettings()).max_key_bytes - GROUP_BYTES
    # As engines hash: SHA-256, xxHash, and as long as it may be.
    keys = [key for length in (SHA256_BYTES, 16, longest) for key in draw_keys(store.random, sizes, CHUNKS // 3, length)]
    store.calls.append(f"# a Tier stores {len(keys)} chunks of {len(sizes)} groups")
    visible_s = 0.0 if view.capabilities.read_after_write else VISIBLE_S
    with Engine(view, sizes, "tier-a") as first:
        first.store(keys)
        store.calls.append("# another Tier, over another view, loads them; then the first one does")
        with Engine(store.open(), sizes, "tier-b") as second:
            for engine in (second, first):
                left = engine.load(keys, visible_s)
                require(not left, f"each of {len(keys)} chunks to be found and loaded", f"{len(left)} that are not", note=engine.counted())
    if view.capabilities.shared:
        store.calls.append("# a Tier in another process loads them")
        left, counted = store.child().ask("load_chunks", keys=[key.hex() for key in keys], visible_s=visible_s)
        require(not left, "each chunk to be found and loaded by a Tier in another process", f"{len(left)} that are not", note=counted)


@proves("KV-TIER-03")
def test_faults_around_the_backend_cost_failed_jobs_and_no_wrong_byte(store: Store, view: View, run: Run) -> None:
    sizes = payload_sizes(view.capabilities, largest=70_000)
    keys = draw_keys(store.random, sizes, 8)
    # A store that is slow by itself gets more time, so that its own pace is not taken for a fault.
    paces_s = []
    for _ in range(3):
        began_s = time.monotonic()
        view.store((store.name(), Record(view.fit(4096), 1)))
        paces_s.append(time.monotonic() - began_s)
    timeout_s = 0.25 + 20 * min(paces_s)
    began_s = time.monotonic()
    faults = Faults(store.random, hang_s=1.2 * timeout_s)
    # What the SDK logs of faults that are there on purpose would hide what it says of the backend.
    level = SDK_LOG.level
    SDK_LOG.setLevel(logging.CRITICAL)
    try:
        for number in range(SCRIPTS):
            if time.monotonic() - began_s < (FAULT_S if number >= ALL_KINDS else LATEST_S):
                _run_under_faults(view, keys, store.random, faults.script(), timeout_s, f"seed {run.seed}, script {number}")
    finally:
        SDK_LOG.setLevel(level)
    # A few chunks for each Tier: one that finds most of what it reads corrupt stops reading, as it may be its own memory.
    for start in range(0, len(keys), 4):
        with Engine(view, sizes, "tier-b") as engine:
            _check_recovered(engine, keys[start : start + 4])


@proves("KV-TIER-04")
def test_a_record_that_went_bad_is_a_miss_and_is_repaired(store: Store, view: View) -> None:
    sizes = payload_sizes(view.capabilities)
    # With REPLACE alone first, then also with delete, where there is one.
    for deletes in (False, True):
        keys = draw_keys(store.random, sizes, -(-24 // len(sizes)))
        with Engine(view, sizes, "tier-a", backend=Borrowed(view, deletes=deletes)) as engine:
            _check_repair(store, view, engine, keys, "with delete" if deletes else "without delete")


@proves("KV-TIER-05")
def test_a_tier_with_jobs_under_way_closes_in_time(store: Store, view: View) -> None:
    sizes = payload_sizes(view.capabilities)
    # Of the largest group alone: calls that take their time.
    keys = draw_keys(store.random, sizes, 64)[len(sizes) - 1 :: len(sizes)]
    known, new = keys[:8], keys[8:]
    # Another view: this one is closed with the Tier.
    lent = Borrowed(store.open(), names=view.names, closes=True)
    engine = Engine(view, sizes, "tier-a", backend=lent, close_timeout_s=CLOSE_S, batch_records=1)
    engine.store(known)
    for key in new:
        engine.submit([key], load=False)
    engine.submit(known, load=True)
    jobs, until_s = len(engine.open), time.monotonic() + HALF_S
    while len(engine.open) > jobs // 2 and time.monotonic() < until_s:
        engine.step()
        time.sleep(0.0005)
    store.calls.append(f"# the Tier closes, with {len(engine.open)} jobs under way")
    began_s = time.monotonic()
    engine.close()
    took_s = time.monotonic() - began_s
    require(took_s <= CLOSE_S + GRACE_S, f"a Tier that closes within {CLOSE_S:g} s", f"{took_s:.1f} s", note=engine.counted())
    engine.finish(GRACE_S)
    until_s = time.monotonic() + GRACE_S
    while (running := [thread.name for thread in threading.enumerate() if thread.name.startswith(f"{engine.name}-")]) and (
        time.monotonic() < until_s
    ):
        time.sleep(0.01)
    require(not running, "every call of the Tier to end after close", f"{len(running)} that go on", note=engine.counted())
    # What was stored on the way is whole: this looks at every byte that it loads.
    with Engine(view, sizes, "tier-b") as other:
        other.load(keys)


def draw_keys(source: random.Random, sizes: Sequence[int], count: int, hash_bytes: int = SHA256_BYTES) -> list[bytes]:
    """The engine's keys of so many new chunks of each group: chain hash, then the group."""
    return [source.randbytes(hash_bytes) + group.to_bytes(GROUP_BYTES, "big") for _ in range(count) for group in range(len(sizes))]


def _run_under_faults(
    view: View, keys: Sequence[bytes], source: random.Random, script: Sequence[Fault], timeout_s: float, where: str
) -> None:
    """Let a Tier do some jobs under a script of faults. Every chunk that is loaded is looked at."""
    faulty = FaultyBackend(Borrowed(view), [*FIRST_SCRIPT, *script], seed=source.randrange(1 << 32))
    limit_s = JOB_S + 10 * timeout_s
    limits = dict.fromkeys(("lookup_timeout_s", "load_timeout_s", "store_timeout_s"), timeout_s)
    sizes = payload_sizes(view.capabilities, largest=70_000)
    engine = Engine(view, sizes, "tier-a", backend=faulty, retry_base_s=0.002, close_timeout_s=CLOSE_S, **limits)
    try:
        for _ in range(JOBS):
            engine.wait(lambda: len(engine.open) < OPEN_JOBS, "the end of a job", limit_s)
            engine.submit(source.sample(keys, source.randrange(1, 7)), load=source.random() < 0.5)
        engine.find(source.sample(keys, 6))
        engine.finish(limit_s)
        require(_end_faults(faulty), "late operations to end", f"some that did not, {JOB_S:g} s later", breaks="KV-LIVE-03")
        _check_counted(engine)
    except ConformanceFailure as failure:
        failure.add_note(f"{where}: {tell(script)}")
        raise
    finally:
        # Before the Tier gives its memory back: what comes late still uses it.
        _end_faults(faulty)
        engine.close()


def _end_faults(faulty: FaultyBackend) -> bool:
    """No faults any more, and no late act. Returns whether that is so.

    More than once: a call that hung until now may still put something off.
    """
    faulty.heal()
    time.sleep(0.02)
    until_s = time.monotonic() + JOB_S
    while time.monotonic() < until_s:
        faulty.heal()
        if faulty.wait_late(0.25):
            return True
    return False


def _check_recovered(engine: Engine, keys: Sequence[bytes]) -> None:
    """Without faults every chunk can be stored and loaded again."""
    left = list(keys)
    until_s = time.monotonic() + RECOVERY_S
    while left and time.monotonic() < until_s:
        engine.run(left, load=False)
        left = engine.load(left)
    expected = f"every chunk to be stored and loaded within {RECOVERY_S:g} s of the last fault"
    require(not left, expected, f"{len(left)} of {len(keys)} that are not", note=engine.counted())


def _check_counted(engine: Engine) -> None:
    """What was counted is what was asked, and nothing is held any more."""
    metrics, asked = engine.tier.metrics, engine.submitted
    counted = {name: int(metrics.total(name)) for name in ("loads", "stores", "lookups")}
    wanted = {name: asked[name] for name in counted}
    require(counted == wanted, f"{wanted} counted, as asked", counted, note=engine.counted())
    engine.wait(lambda: not metrics.gauge_value("quarantined_bytes"), "the return of every call that was late", JOB_S)
    held = {name: metrics.gauge_value(name) for name in ("open_jobs", "queued_store_bytes")}
    require(not any(held.values()), "nothing open and nothing queued in the end", held, note=engine.counted())


def _check_repair(store: Store, view: View, engine: Engine, keys: Sequence[bytes], where: str) -> None:
    """Damage some of these chunks. They are misses, and come back with the next store."""
    engine.store(keys)
    # One of the largest always: what a backend does to save work, it does for those.
    largest = store.random.choice(keys[len(engine.memory.sizes) - 1 :: len(engine.memory.sizes)])
    bad = [largest, *store.random.sample([key for key in keys if key != largest], 3)]
    for key, kind in zip(bad, (_flip_a_payload_bit, _flip_a_payload_bit, _zeros, _cut), strict=True):
        _damage(view, key, engine.memory.sizes, kind)
    _check_misses(view, engine, keys, bad)
    engine.store(keys)
    left = engine.load(keys, 0.0 if view.capabilities.read_after_write else VISIBLE_S)
    note = f"{where}; {engine.counted()}"
    require(not left, "bad records to be good again after the next store", f"{len(left)} that are not", note=note)


def _check_misses(view: View, engine: Engine, keys: Sequence[bytes], bad: Sequence[bytes]) -> None:
    """Load these chunks; the bad ones are not loaded, and not found any more."""
    if not view.capabilities.read_after_write:
        # It may still give the good ones.
        engine.run(keys, load=True)
        return
    answers: list[Lookup] = []
    for _ in range(TRIES):
        done = set(engine.run(keys, load=True).done)
        loaded = [key for key in bad if key in done]
        require(not loaded, "no load of a record whose bytes went bad", f"{len(loaded)} that were loaded", note=engine.counted())
        answers = engine.find(bad)
        # A load that failed for another reason says nothing of the record.
        if answers == [Lookup.MISS] * len(bad):
            return
    raise ConformanceFailure("a miss for each record that went bad", show(answers), note=engine.counted())


def _damage(view: View, key: bytes, sizes: Sequence[int], how: Callable[[bytes], bytes]) -> None:
    """Put a bad record in the place of a good one, past the Tier."""
    size = sizes[int.from_bytes(key[-GROUP_BYTES:], "big")]
    name = ChunkKey.from_engine(identity(sizes).namespace, key).name
    got = read(view, name, record_bytes(size))
    require(got.result.status is GetStatus.FOUND, f"FOUND for {name}, which a Tier stored", got.result, breaks="KV-TIER-02")
    overwrite(view, name, how(got.bytes), str(how.__doc__))


def _flip_a_payload_bit(record: bytes) -> bytes:
    """has one other bit in its payload, and the header page and length of the record before it"""
    at = HEADER_BYTES + 17
    return record[:at] + bytes([record[at] ^ 0x10]) + record[at + 1 :]


def _zeros(record: bytes) -> bytes:
    """holds zeros, as a file may after a power cut"""
    return bytes(len(record))


def _cut(record: bytes) -> bytes:
    """ends after its header page"""
    return record[:HEADER_BYTES]
