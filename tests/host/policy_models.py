"""What the policies are held against: ARC and LRU written another way, and the benchmark with its traces."""

from __future__ import annotations

import importlib.util
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


traces = _load("eviction_traces")
_load("harness")
benchmark = _load("eviction")


class PaperARC:
    """ARC(c) as figure 4 of Megiddo and Modha (FAST 2003) has it: plain lists, the least recent first, case by case. No pins, no chains."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> tuple[bool, list[bytes]]:
        """Whether it was a hit, and which pages left the cache."""
        before = set(self.t1 + self.t2)
        hit = x in before
        if hit:  # Case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:  # Case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # Case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # Case IV
            l1 = len(self.t1) + len(self.b1)
            total = l1 + len(self.t2) + len(self.b2)
            if l1 == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)
        return hit, sorted(before - set(self.t1 + self.t2))

    def replace(self, x: bytes) -> None:
        size = len(self.t1)
        if size >= 1 and ((x in self.b2 and size == self.p) or size > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


class PlainLRU:
    """An OrderedDict of the keys that have a place, the least recent first, searched from its cold end for each victim."""

    def __init__(self) -> None:
        self.places: OrderedDict[bytes, None] = OrderedDict()
        self.resident: set[bytes] = set()
        self.pinned: set[bytes] = set()

    def insert(self, key: bytes) -> None:
        self.resident.add(key)
        self.pinned.add(key)

    def used(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.resident:
                self.places[key] = None
                self.places.move_to_end(key)

    def pin(self, key: bytes) -> None:
        self.pinned.add(key)

    def unpin(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.pinned.discard(key)
            self.places.setdefault(key)

    def victim(self, protected: set[bytes]) -> bytes | None:
        for key in list(self.places):
            if key in self.pinned:
                continue
            if key not in protected:
                return key
            self.places.move_to_end(key)
        return None

    def remove(self, key: bytes) -> None:
        self.resident.remove(key)
        self.pinned.discard(key)
        self.places.pop(key, None)

    def clear(self) -> None:
        for part in (self.places, self.resident, self.pinned):
            part.clear()
