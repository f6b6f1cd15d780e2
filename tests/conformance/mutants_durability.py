"""Backends that break the profile durability: right as long as nobody is killed."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from core_mutant import Proceed, bytes_of, with_record
from mutant import FsMutant, MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    ConfigError,
    Deadline,
    DeniedError,
    Durability,
    ListEntry,
    ListPage,
    Mode,
    Put,
    PutResult,
    PutStatus,
    Usage,
)

_opened: Counter[str] = Counter()
_writing: defaultdict[str, list[tuple[threading.Thread, threading.Event]]] = defaultdict(list)
_cleaned: set[str] = set()

WRITE_S = 10.0
LARGE_BYTES, LARGE_S = 4 << 20, 0.3
"""Records of so many bytes are put where processes are killed in the middle: for so long, so that few kills miss it on a busy machine."""


class DurabilityMutant(FsMutant):
    """Puts pass through one method, one at a time."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [self.one_put(put, proceed) for put in items] if op == "put" else proceed(items)

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        return self.passed_on(put, proceed)

    def in_the_middle(self, put: Put) -> None:
        """Of a put that is to be killed there."""
        time.sleep(LARGE_S if put.size_bytes >= LARGE_BYTES else 0.0)

    def passed_on(self, put: Put, proceed: Proceed) -> PutResult:
        result: PutResult = proceed([put])[0]
        return result

    @property
    def root(self) -> str:
        found: str = self.inner._root
        return found

    def path(self, name: str) -> str:
        """Of a record, with its folders made."""
        path = f"{self.root}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def is_there(self, put: Put) -> bool:
        return os.path.isfile(f"{self.root}/{put.name}")


# 1: what was STORED.


class SavesWhenItIsClosed(MemoryMutant):
    """Records live in memory while the location is open, and in a file when it is not."""

    breaks = "KV-DUR-01"

    def __init__(self, inner: Backend, file: Path) -> None:
        super().__init__(inner)
        self._file = file

    @classmethod
    def open(cls, location: str) -> Self:
        opened = cls(cls.good(location), Path(f"{location}.saved"))
        if not _opened[location] and opened._file.exists():
            saved = json.loads(opened._file.read_text())
            opened._shelf.records = {name: bytes.fromhex(record) for name, record in saved.items()}
            opened._shelf.used_bytes = sum(map(len, opened._shelf.records.values()))
        _opened[location] += 1
        return opened

    @property
    def _shelf(self) -> Any:
        return self.inner._shelf

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, durability=Durability.PROCESS_CRASH)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close" and not self.inner._closed:
            self._file.write_text(json.dumps({name: record.hex() for name, record in self._shelf.records.items()}))
            _opened[str(self._file).removesuffix(".saved")] -= 1
        return proceed(items)


class AnswersBeforeItHasWritten(DurabilityMutant):
    """Writes when somebody asks for something in this process, or when nobody has for a while."""

    breaks = "KV-DUR-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        while _writing[self.root]:
            thread, asked = _writing[self.root].pop()
            asked.set()
            thread.join()
        return super().around(op, items, deadline, proceed)

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.mode is Mode.CREATE and self.is_there(put):
            return PutResult(PutStatus.EXISTS)
        mine = with_record(put, bytes_of(put))

        asked = threading.Event()

        def write() -> None:
            asked.wait(WRITE_S)
            self.inner.put([mine], Deadline.after(10.0))
            mine.parts[0].region.close()

        thread = threading.Thread(target=write, name="writes-behind", daemon=True)
        thread.start()
        _writing[self.root].append((thread, asked))
        return PutResult(PutStatus.STORED)


# 2: what was being created.


class WritesInPlace(DurabilityMutant):
    breaks = "KV-DUR-02"
    mode = Mode.CREATE
    pieces = 16
    whole_length_first = False

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.mode is not self.mode or (put.mode is Mode.CREATE and self.is_there(put)):
            return self.passed_on(put, proceed)
        record = bytes_of(put)
        step = max(1, len(record) // self.pieces)
        with open(self.path(put.name), "wb", buffering=0) as target:
            if self.whole_length_first:
                target.truncate(len(record))
            for start in range(0, len(record), step):
                target.write(record[start : start + step])
                if start == step * (self.pieces // 2):
                    self.in_the_middle(put)
        return PutResult(PutStatus.STORED)


class ReservesTheLengthFirst(WritesInPlace):
    """A part of a record that has the right size."""

    whole_length_first = True


# 3: what was being replaced.


class ReplacesInPlace(WritesInPlace):
    breaks = "KV-DUR-03"
    mode = Mode.REPLACE


class RemovesBeforeItReplaces(DurabilityMutant):
    breaks = "KV-DUR-03"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.mode is Mode.REPLACE and self.is_there(put):
            os.unlink(f"{self.root}/{put.name}")
            self.in_the_middle(put)
        return self.passed_on(put, proceed)


# 4: what others can do.


class LocksNamesInFiles(DurabilityMutant):
    breaks = "KV-DUR-04"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        os.makedirs(f"{self.root}.locks", exist_ok=True)
        lock = f"{self.root}.locks/{put.name.replace('/', '!')}"
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return PutResult.failed(DeniedError(f"put {put.name}: another process holds {lock}"))
        try:
            self.in_the_middle(put)
            return self.passed_on(put, proceed)
        finally:
            os.unlink(lock)


class LocksTheLocationInAFile(DurabilityMutant):
    breaks = "KV-DUR-04"

    @classmethod
    def open(cls, location: str) -> Self:
        if not _opened[location]:
            try:
                os.close(os.open(f"{location}.pid", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                raise ConfigError("backend", "location", f"{location} is in use; remove {location}.pid if it is not") from None
        _opened[location] += 1
        return cls(cls.good(location))

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, shared=False)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close" and not self.inner._closed:
            _opened[self.root] -= 1
            if not _opened[self.root]:
                os.unlink(f"{self.root}.pid")
        return super().around(op, items, deadline, proceed)


# 5: what is there after an orderly end.


class CleansUpWhenItsProcessEnds(DurabilityMutant):
    breaks = "KV-DUR-05"

    @classmethod
    def open(cls, location: str) -> Self:
        if location not in _cleaned:
            _cleaned.add(location)
            atexit.register(shutil.rmtree, location, ignore_errors=True)
        return cls(cls.good(location))


# 6: what is left of the killed, and listed.


class KeepsTemporaryFiles(DurabilityMutant):
    """They are removed by whoever made them, and by nobody else."""

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        os.makedirs(f"{self.root}.temp", exist_ok=True)
        temp = Path(f"{self.root}.temp/{put.name.replace('/', '!')}")
        temp.write_bytes(bytes(put.size_bytes // 2))
        try:
            self.in_the_middle(put)
            return self.passed_on(put, proceed)
        finally:
            temp.unlink()

    def left(self) -> list[ListEntry]:
        folder = Path(f"{self.root}.temp")
        return [ListEntry(f"temp/{file.name}", file.stat().st_size) for file in folder.iterdir()] if folder.exists() else []


class ListsTemporaryFiles(KeepsTemporaryFiles):
    breaks = "KV-DUR-06"

    def _list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        page: ListPage = self.inner.list(prefix, deadline, cursor, limit)
        left = [] if page.cursor else [entry for entry in self.left() if entry.name.startswith(prefix)]
        return replace(page, entries=[*page.entries, *left])


# 7: and counted.


class CountsTemporaryFiles(KeepsTemporaryFiles):
    breaks = "KV-DUR-07"

    def _usage(self, deadline: Deadline) -> Usage:
        usage: Usage = self.inner.usage(deadline)
        return replace(usage, records=usage.records + len(self.left()))


class CountsBytesOfTemporaryFiles(KeepsTemporaryFiles):
    breaks = "KV-DUR-07"

    def _usage(self, deadline: Deadline) -> Usage:
        usage: Usage = self.inner.usage(deadline)
        return replace(usage, used_bytes=usage.used_bytes + 2 * sum(entry.size_bytes for entry in self.left()))


MUTANTS = (
    SavesWhenItIsClosed,
    AnswersBeforeItHasWritten,
    WritesInPlace,
    ReservesTheLengthFirst,
    ReplacesInPlace,
    RemovesBeforeItReplaces,
    LocksNamesInFiles,
    LocksTheLocationInAFile,
    CleansUpWhenItsProcessEnds,
    ListsTemporaryFiles,
    CountsTemporaryFiles,
    CountsBytesOfTemporaryFiles,
)
