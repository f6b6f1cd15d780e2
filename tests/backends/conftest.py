"""Memory to store from and load into, and stores to do it with."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Buffer, Deadline, Get, GetResult, Mode, Put, PutResult, Region
from kvstore_sdk_backends.fs import FsBackend, open_fs

sys.path.insert(0, str(Path(__file__).parent / "s3"))

from s3_server import S3Server

LIMIT_S = 30.0


class Desk:
    """One-line puts and gets. Each buffer is used once, begins at a page unless `shift` moves it, and is then forgotten."""

    def __init__(self, size_bytes: int = 32 << 20) -> None:
        self.region = Region(size_bytes)
        self._at = 0

    def buffers(self, sizes: Sequence[int], shift: int = 0) -> tuple[Buffer, ...]:
        made = []
        for size in sizes:
            made.append(self.region.buffer(self._at + shift, size))
            self._at += -(-(shift + size) // 4096) * 4096
        return tuple(made)

    def put_item(self, name: str, record: bytes, mode: Mode = Mode.CREATE, cuts: Sequence[int] = (), shift: int = 0) -> Put:
        """A put of `record` in as many parts as there are `cuts`, and one."""
        ends = [*cuts, len(record)]
        parts = self.buffers([end - start for start, end in itertools.pairwise([0, *ends])], shift)
        start = 0
        for part in parts:
            part.view[:] = record[start : start + part.length]
            start += part.length
        return Put(name, parts, mode)

    def get_item(self, name: str, *sizes: int, shift: int = 0) -> Get:
        """A get into buffers of these sizes, which hold something else before."""
        parts = self.buffers(sizes, shift)
        for part in parts:
            part.view[:] = b"\xee" * part.length
        return Get(name, parts)

    def put(self, backend: Any, name: str, record: bytes, mode: Mode = Mode.CREATE, **how: Any) -> PutResult:
        [result] = backend.put([self.put_item(name, record, mode, **how)], Deadline.after(LIMIT_S))
        assert isinstance(result, PutResult)
        return result

    def get(self, backend: Any, name: str, *sizes: int, **how: Any) -> tuple[GetResult, bytes]:
        item = self.get_item(name, *sizes, **how)
        [result] = backend.get([item], Deadline.after(LIMIT_S))
        assert isinstance(result, GetResult)
        return result, b"".join(part.view for part in item.into)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.region.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_folder(folder: Path) -> Iterator[Callable[..., FsBackend]]:
    """Opens the folder, or another one; whatever is opened is closed at the end."""
    opened: list[FsBackend] = []

    def open_it(where: Path | str = folder, **options: Any) -> FsBackend:
        opened.append(open_fs(str(where), **options))
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()


@pytest.fixture
def store(open_folder: Callable[..., FsBackend]) -> FsBackend:
    return open_folder()


@pytest.fixture
def left_behind(folder: Path) -> Callable[[], list[str]]:
    """All temporary files that lie in the folder now."""

    def found() -> list[str]:
        return sorted(name for _, _, files in os.walk(folder / ".kvstore/tmp") for name in files if not name.endswith(".lock"))

    return found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()
