"""Batches of records in one call of `records.c`, if this installation has it: the interpreter's lock is free for all of the call.

It does the common case. What it leaves undone the backend does in Python, item by item, which is all there is where the package was built
without a compiler. Both answer the same; `KVSTORE_FS_NATIVE=0` in the environment leaves it out.
"""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

from kvstore_sdk.backend import Buffer, Get, Mode, Put, Region, is_valid_name
from kvstore_sdk_backends.fs.folder import MAX_NAME_BYTES
from kvstore_sdk_backends.fs.io import CHUNK_BYTES, IOV_MAX

__all__ = ["DONE", "EXISTS", "LIBRARY", "MISSING", "UNDONE", "WRITTEN", "NativeRecords", "load"]

_log = logging.getLogger("kvstore_sdk_backends.fs")

UNDONE, DONE, MISSING, EXISTS, WRITTEN = range(5)
"""Answers, as in `records.c`. WRITTEN: the temporary file holds the whole record, and making it visible is left."""

# The underscore: to Python anything that ends so is a module.
LIBRARY = Path(__file__).with_name("_librecords.so")
_ABI = 1
_FOREVER_S = 9e9  # of a 64-bit number of nanoseconds


def load() -> ctypes.CDLL | None:
    """The library, or None: it was not built, is another version's, or not for this machine."""
    if os.environ.get("KVSTORE_FS_NATIVE") == "0":
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if (abi := library.kvstore_fs_abi()) != _ABI:
            raise OSError(f"it speaks version {abi}, wanted {_ABI}")
        pointer = ctypes.c_void_p
        bounds = (ctypes.c_uint32, ctypes.c_int32, ctypes.c_int64, pointer, pointer)
        library.kvstore_fs_get.argtypes = [ctypes.c_char_p, pointer, pointer, *bounds]
        library.kvstore_fs_put.argtypes = [ctypes.c_char_p, pointer, pointer, ctypes.c_char_p, *bounds]
        library.kvstore_fs_get.restype = library.kvstore_fs_put.restype = None
    except (OSError, AttributeError) as cause:
        _log.debug("records are moved by Python alone: %s", cause)
        return None
    return library


class NativeRecords:
    """Moves the records of one folder. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, root: str) -> None:
        self._library = library
        self._root = root
        self._stop = ctypes.c_int32(0)
        self._stop_at = ctypes.addressof(self._stop)

    def stop(self) -> None:
        """Let calls that run begin no further record."""
        self._stop.value = 1

    def get(self, gets: Sequence[Get], direct: bool, at_s: float) -> bytes:
        """Read records until `at_s`. One answer each: DONE, MISSING or UNDONE."""
        calls = _Batch(CHUNK_BYTES)
        root = self._root
        paths = [f"{root}/{get.name}" for get in gets if calls.take(get.name, get.into)]
        answers = ctypes.create_string_buffer(len(paths))
        self._library.kvstore_fs_get(*calls.arguments(paths), len(paths), direct, _ns(at_s), self._stop_at, answers)
        return calls.spread(answers.raw)

    def put(self, puts: Sequence[Put], temps: Sequence[str], most_bytes: int, direct: bool, at_s: float) -> bytes:
        """Store records of at most `most_bytes` until `at_s`, by way of files that are not there yet, one for each.

        Returns:
            One answer each: DONE, EXISTS, WRITTEN or UNDONE. Of WRITTEN alone the temporary file is there.
        """
        calls = _Batch(min(most_bytes, CHUNK_BYTES))
        root = self._root
        paths: list[str] = []
        create = bytearray()
        for put, temp in zip(puts, temps, strict=True):
            if calls.take(put.name, put.parts):
                paths += (f"{root}/{put.name}", temp)
                create.append(put.mode is Mode.CREATE)
        answers = ctypes.create_string_buffer(len(create))
        names, items, parts = calls.arguments(paths)
        flags = bytes(create)
        self._library.kvstore_fs_put(names, items, parts, flags, len(flags), direct, _ns(at_s), self._stop_at, answers)
        return calls.spread(answers.raw)


class _Batch:
    """What one call is about. While it lives, all the memory it names stays mapped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._items = array("Q")
        self._parts = array("Q")
        self._taken = bytearray()
        self._region: Region | None = None
        self._mapped: list[memoryview] = []

    def take(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Whether an item is one for `records.c`. No name, size or address that was not looked at here gets there.

        Raises:
            ValueError: a region is closed.
        """
        fits = 0 < len(parts) < IOV_MAX and is_valid_name(name, MAX_NAME_BYTES)
        found = self._parts
        before = len(found)
        size = 0
        if fits:
            for part in parts:
                region, offset, length = part.region, part.offset, part.length
                if region is not self._region:
                    # A view keeps the memory mapped when somebody closes the region meanwhile.
                    self._mapped.append(region.view[:])
                    self._region = region
                if offset < 0 or length < 0 or offset + length > region.size_bytes:
                    fits = False
                    break
                found.append(region.address + offset)
                found.append(length)
                size += length
            if not fits or not 0 < size <= self._most_bytes:
                fits = False
                del found[before:]
        self._taken.append(fits)
        if fits:
            self._items.append(before >> 1)
            self._items.append(len(parts))
        return fits

    def arguments(self, paths: Sequence[str]) -> tuple[bytes, int, int]:
        """The first three: names, items and parts. To be called when all are taken."""
        return os.fsencode("\0".join(paths)), self._items.buffer_info()[0], self._parts.buffer_info()[0]

    def spread(self, answers: bytes) -> bytes:
        """The answers of those that were taken, and UNDONE for the others between them."""
        if len(answers) == len(self._taken):
            return answers
        left = iter(answers)
        return bytes(next(left) if taken else UNDONE for taken in self._taken)


def _ns(at_s: float) -> int:
    return int(max(-_FOREVER_S, min(at_s, _FOREVER_S)) * 1e9)
