"""What the backends that are wrong on purpose have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from kvstore_sdk.backend import Backend
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

__all__ = ["FsMutant", "MemoryMutant", "Mutant"]


class Mutant(BackendWrapper):
    """A good backend with one fault, named after it.

    Attributes:
        breaks: The requirement that has to fail.
        profiles: What the suite is run with: its own profile, and those it builds on.
    """

    breaks: ClassVar[str]
    profiles: ClassVar[Sequence[str]] = ()

    @classmethod
    def open(cls, location: str) -> Self:
        """The factory: `module:Class.open`."""
        return cls(cls.good(location))

    @staticmethod
    def good(location: str) -> Backend:
        raise NotImplementedError


class MemoryMutant(Mutant):
    """Over `memory`: quick; for what one process can show."""

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory(location.strip("/"))


class FsMutant(Mutant):
    """Over `fs`: for what takes several processes, or a crash."""

    @staticmethod
    def good(location: str) -> Backend:
        return open_fs(location)


def flipped(record: bytes, at: int = 0) -> bytes:
    """The record with one bit inverted."""
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
