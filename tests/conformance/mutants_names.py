"""Backends that break the profile core: names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_mutant import CoreMutant, Proceed

from kvstore_sdk.backend import (
    Deadline,
)

# 9: names.


class NamesMutant(CoreMutant):
    """Calls records something else."""

    def named(self, name: str) -> str:
        raise NotImplementedError

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op in ("exists", "delete"):
            return proceed([self.named(name) for name in items])
        return proceed([replace(item, name=self.named(item.name)) for item in items] if op in ("put", "get") else items)


class FoldsCase(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.lower()


class CutsNames(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name[:200]


class FlattensFolders(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.replace("/", "_")


class ReadsNumbers(NamesMutant):
    """A column that takes what looks like a number for one."""

    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        try:
            return f"{float(name):g}"
        except ValueError:
            return name


class DropsTheExtension(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.removesuffix(".tmp")


MUTANTS = (
    FoldsCase,
    CutsNames,
    FlattensFolders,
    ReadsNumbers,
    DropsTheExtension,
)
