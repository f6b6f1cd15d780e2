"""Stores are pruned, repaired and copied while engines store and load: no wrong byte, no lost good record but what was asked for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from damage import Tree, chunk_key, fill, identity_of, record_of
from places import Place

from kvstore_sdk.backend import Deadline, Get, GetStatus, Mode, Region
from kvstore_sdk.format import record_bytes, verify
from kvstore_sdk.keys import ChunkKey, manifest_name
from kvstore_sdk.tools.copy import Copy, Outcome
from kvstore_sdk.tools.prune import Prune, Rule
from kvstore_sdk.tools.repair import Outcome as Mend
from kvstore_sdk.tools.repair import Repair
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.writing import Writer

RETRY = Retry(timeout_s=30.0)
PAYLOAD = 3000
IDENTITY = identity_of("acme/one", (PAYLOAD,))
KEYS = [chunk_key(IDENTITY, number) for number in range(60)]
LIMIT_S = 60.0


class Engine:
    """Stores and loads the keys in an order of its own, on two threads, until it is told to end. A record that it finds bad it replaces."""

    def __init__(self, place: Place) -> None:
        self._backend = place.open()
        self._over = threading.Event()
        self.loads = self.stores = 0
        self.wrong: list[str] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(work,), name="engine") for work in (self._store, self._load)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[random.Random], None]) -> None:
        try:
            work(random.Random(7))
        except BaseException as error:  # noqa: BLE001  # shown by the test
            self.errors.append(error)

    def _store(self, chance: random.Random) -> None:
        writer = Writer(self._backend, RETRY)
        while not self._over.is_set():
            key = chance.choice(KEYS)
            writer.write(key.name, record_of(key, PAYLOAD), chance.choice(list(Mode)))
            self.stores += 1
        writer.close()

    def _load(self, chance: random.Random) -> None:
        region = Region(record_bytes(PAYLOAD))
        writer = Writer(self._backend, RETRY)
        buffer = region.buffer(0, record_bytes(PAYLOAD))
        while not self._over.is_set():
            key = chance.choice(KEYS)
            [result] = self._backend.get([Get(key.name, (buffer,))], Deadline.after(30.0))
            bad = result.status is GetStatus.WRONG_SIZE
            if result.status is GetStatus.FOUND:
                bad = verify(buffer.view, key, IDENTITY.layout, PAYLOAD) is not None
                self.loads += not bad
            elif result.status is not GetStatus.MISSING and not bad:
                self.wrong.append(f"{key.name}: {result.status}")
            if bad:
                writer.write(key.name, record_of(key, PAYLOAD), Mode.REPLACE)
        writer.close()
        region.close()

    def wait_for(self, loads: int, stores: int) -> None:
        """Until it has done so much more than now."""
        loads, stores = self.loads + loads, self.stores + stores
        end_s = time.monotonic() + LIMIT_S
        while (self.loads < loads or self.stores < stores) and not self.errors and time.monotonic() < end_s:
            time.sleep(0.002)
        assert self.errors or (self.loads >= loads and self.stores >= stores), "the engine does not get on"

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        self._backend.close()
        assert not self.errors, self.errors
        assert not self.wrong, self.wrong


@contextmanager
def engine_on(place: Place) -> Iterator[Engine]:
    engine = Engine(place)
    try:
        engine.wait_for(5, 5)
        yield engine
    finally:
        engine.end()


@pytest.fixture
def backend(place: Place) -> Iterator[Any]:
    fill(place.tree, ("acme/one",), chunks=len(KEYS), payloads=(PAYLOAD,))
    made = place.open()
    yield made
    made.close()


def spoil(tree: Tree, key: ChunkKey) -> None:
    record = bytearray(record_of(key, PAYLOAD))
    record[-1] ^= 1
    tree.write(key.name, bytes(record))


def is_good(tree: Tree, key: ChunkKey) -> bool:
    return tree.read(key.name) == record_of(key, PAYLOAD)


def test_repair_under_load_leaves_good_records_only(place: Place, backend: Any) -> None:
    """The engine mends some before the second look; those must be found good and kept."""
    with engine_on(place) as engine:
        for round_ in range(3):
            spoiled = KEYS[round_ * 7 : round_ * 7 + 7]
            for key in spoiled:
                spoil(place.tree, key)
            found = {item.name: item.outcome for item in Repair(backend, RETRY, threads=2)}
            assert set(found.values()) <= {Mend.REMOVED, Mend.RECOVERED, Mend.GONE}
            assert set(found) <= {key.name for key in KEYS}
            engine.wait_for(5, 5)
    assert all(is_good(place.tree, key) for key in KEYS if key.name in place.tree.names())
    assert manifest_name(IDENTITY.namespace) in place.tree.names()


def test_prune_under_load_removes_and_the_engine_goes_on(place: Place, backend: Any) -> None:
    with engine_on(place) as engine:
        for to_bytes in (200_000, 100_000, 0):
            removed = list(Prune(backend, Rule(to_bytes=to_bytes), RETRY, dry_run=False))
            assert all(item.error is None for item in removed)
            engine.wait_for(0, 20)
        engine.wait_for(5, 5)
    # What the engine stored since is there, and good.
    there = [key for key in KEYS if key.name in place.tree.names()]
    assert there
    assert all(is_good(place.tree, key) for key in there)


def test_copy_under_load_brings_whole_records_over(place: Place, backend: Any, make_folder: Callable[[], Place]) -> None:
    destination = make_folder()
    with engine_on(place), engine_on(destination):
        for _ in range(3):
            second = destination.open()
            try:
                outcomes = {item.outcome for item in Copy(backend, second, RETRY, threads=2, check=True)}
            finally:
                second.close()
            assert outcomes <= {Outcome.COPIED, Outcome.THERE}
    assert {name for name in destination.tree.names() if "-g" in name} == {key.name for key in KEYS}
    assert all(is_good(destination.tree, key) for key in KEYS)
