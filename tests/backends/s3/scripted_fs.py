"""A file system of fsspec that fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fsspec.asyn import AsyncFileSystem

__all__ = ["ScriptedFileSystem", "Store"]


@dataclass
class Store:
    """What file systems hold, are told to fail at, and were asked."""

    objects: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None
    faults: list[tuple[str, BaseException | Callable[[], Coroutine[Any, Any, None]]]] = field(default_factory=list)
    ranges: list[tuple[int | None, int | None]] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    made: list[ScriptedFileSystem] = field(default_factory=list)
    ended: list[ScriptedFileSystem] = field(default_factory=list)
    calls: int = 0
    now: int = 0
    peak: int = 0

    async def take(self, verb: str) -> None:
        self.calls += 1
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(0)
            if self.faults and self.faults[0][0] == verb:
                _, fault = self.faults.pop(0)
                if isinstance(fault, BaseException):
                    raise fault
                await fault()
        finally:
            self.now -= 1

    async def end(self, fs: ScriptedFileSystem) -> None:
        self.ended.append(fs)


class ScriptedFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Objects in a dictionary that all of its instances share. `faults` says what becomes of the next calls of a verb."""

    protocol = "scripted"

    def __init__(self, *, store: Store, **options: Any) -> None:
        super().__init__(**options)
        self.shared = store
        self.options = options
        store.made.append(self)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        await self.shared.take("info")
        if path not in self.shared.objects:
            if any(key.startswith(f"{path}/") for key in self.shared.objects):
                return {"name": path, "type": "directory", "size": 0}
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.shared.objects[path])}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        await self.shared.take("cat")
        self.shared.ranges.append((start, end))
        if path not in self.shared.objects:
            raise FileNotFoundError(path)
        return self.shared.objects[path][start:end][: self.shared.cut]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        await self.shared.take("pipe")
        if mode == "create" and path in self.shared.objects:
            raise FileExistsError(path)
        self.shared.objects[path] = value

    async def _rm_file(self, path: str, **_: Any) -> None:
        await self.shared.take("rm")
        if self.shared.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        await self.shared.take("ls")
        self.shared.listed.append(path)
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.shared.objects.items():
            if key.startswith(f"{path}/"):
                head, slash, _ = key[len(path) + 1 :].partition("/")
                kind = {"type": "directory", "size": 0} if slash else {"type": "file", "size": len(value), "mtime": 7.0}
                found[f"{path}/{head}{slash}"] = {"name": f"{path}/{head}", **kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())
