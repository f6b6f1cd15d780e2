"""Any sequence of operations, against a dictionary that shares no code with a backend."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore_sdk.backend import Deadline, DeleteStatus, Get, GetStatus, InvalidError, Mode, Put, PutStatus, Region
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

# `b` and `b-c` and `b/c` sort in another order as text than as paths. No name is another's folder: a filesystem cannot have both.
NAMES = st.sampled_from(["a", "b-c", "b/c", "b/c.d", "b.e", "v1/n/00/00ab-g0", "v1/n/00/00ab-g1", "v1/n/01/01ab-g0", "v1/n/manifest.json"])
SIZES = st.sampled_from([0, 1, 4095, 4096, 8192, 10000])
PREFIXES = st.sampled_from(["", "a", "b", "b/", "b/c", "v1/n/0", "v1/n/00/", "v1/n/00/00ab-g1", "x", ".", "../"])

_locations = itertools.count()

# Thousands of small steps: not where other work keeps the disk busy.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def later() -> Deadline:
    return Deadline.after(30.0)


class StoreMachine(RuleBasedStateMachine):
    """A store in two views of one location, and what it should hold."""

    def open(self) -> Any:
        raise AssertionError("each store opens itself")

    @initialize()
    def start(self) -> None:
        self.region = Region(32768)
        self.model: dict[str, bytes] = {}
        self.planted: set[str] = set()
        self.backends = [self.open(), self.open()]

    def teardown(self) -> None:
        for backend in self.backends:
            backend.close()
        self.region.close()

    @rule(
        view=st.integers(0, 1), name=NAMES, size=SIZES, value=st.integers(0, 255), mode=st.sampled_from(Mode), shift=st.sampled_from([0, 1])
    )
    def put(self, view: int, name: str, size: int, value: int, mode: Mode, shift: int) -> None:
        part = self.region.buffer(shift, size)
        part.view[:] = bytes([value]) * size
        [result] = self.backends[view].put([Put(name, (part,), mode)], later())
        if mode is Mode.CREATE and name in self.model:
            assert result.status is PutStatus.EXISTS
        else:
            assert result.status is PutStatus.STORED
            self.model[name] = bytes([value]) * size
            self.planted.discard(name)
        part.view[:] = b"\xff" * size

    @rule(view=st.integers(0, 1), name=NAMES, size=SIZES, cut=st.integers(0, 10000))
    def get(self, view: int, name: str, size: int, cut: int) -> None:
        cut = min(cut, size)
        parts = (self.region.buffer(0, cut), self.region.buffer(16384, size - cut))
        [result] = self.backends[view].get([Get(name, parts)], later())
        record = self.model.get(name)
        if name in self.planted:
            assert result.status is GetStatus.FAILED
            assert isinstance(result.error, InvalidError)
        elif record is None:
            assert result.status is GetStatus.MISSING
        elif len(record) != size:
            assert (result.status, result.size_bytes, result.asked_bytes) == (GetStatus.WRONG_SIZE, len(record), size)
        else:
            assert result.status is GetStatus.FOUND
            assert bytes(parts[0].view) + bytes(parts[1].view) == record

    @rule(view=st.integers(0, 1), name=NAMES)
    def delete(self, view: int, name: str) -> None:
        [result] = self.backends[view].delete([name], later())
        assert result is (DeleteStatus.DELETED if self.model.pop(name, None) is not None else DeleteStatus.ABSENT)

    @rule(view=st.integers(0, 1), names=st.lists(NAMES, max_size=5))
    def exists(self, view: int, names: list[str]) -> None:
        assert self.backends[view].exists(names, later()) == [name in self.model for name in names]

    @rule(view=st.integers(0, 1), prefix=PREFIXES, limit=st.integers(1, 4))
    def list(self, view: int, prefix: str, limit: int) -> None:
        found, cursor = [], None
        for _ in range(len(self.model) + 1):
            page = self.backends[view].list(prefix, later(), cursor, limit)
            found += [(entry.name, entry.size_bytes) for entry in page.entries]
            cursor = page.cursor
            if cursor is None:
                break
        assert cursor is None
        assert sorted(found) == sorted((name, len(record)) for name, record in self.model.items() if name.startswith(prefix))

    @rule(view=st.integers(0, 1))
    def reopen(self, view: int) -> None:
        self.backends[view].close()
        self.backends[view] = self.open()

    @invariant()
    def usage_is_the_sum(self) -> None:
        usage = self.backends[0].usage(later())
        assert (usage.records, usage.used_bytes) == (len(self.model), sum(map(len, self.model.values())))


class MemoryMachine(StoreMachine):
    @initialize()
    def start(self) -> None:
        self.location = f"model-{next(_locations)}"
        super().start()

    def open(self) -> Any:
        return open_memory(self.location)


class FsMachine(StoreMachine):
    """Also what only a folder can suffer."""

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvstore-model-", dir=MEMORY))
        super().start()

    def open(self) -> Any:
        return open_fs(str(self.root))

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.root)

    @rule(view=st.integers(0, 1))
    def sweep(self, view: int) -> None:
        assert self.backends[view].sweep() == 0

    @rule(name=NAMES)
    def a_record_vanishes(self, name: str) -> None:
        if self.model.pop(name, None) is not None:
            (self.root / name).unlink()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def a_folder_takes_a_records_place(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        (self.root / name).unlink()
        (self.root / name).mkdir()
        del self.model[name]
        self.planted.add(name)

    @rule()
    def somebody_tidies_up(self) -> None:
        """Empty folders, and the folder of temporary files with all that is in it, while no put runs."""
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and ".kvstore" not in path.parts and not any(path.iterdir()):
                path.rmdir()
        self.planted.clear()
        shutil.rmtree(self.root / ".kvstore/tmp", ignore_errors=True)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30)
TestFs = FsMachine.TestCase
TestFs.settings = settings(max_examples=60, stateful_step_count=30)
