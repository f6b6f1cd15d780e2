"""Whether what lies under a name is what the name says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore_sdk.backend import Backend, ListEntry
from kvstore_sdk.errors import BackendError, text_of
from kvstore_sdk.format import Flaw
from kvstore_sdk.keys import ChunkKey, manifest_name
from kvstore_sdk.tools.facts import Kind, Manifest, flaw_of, named, size_flaw
from kvstore_sdk.tools.reading import Reader, Sized, read_manifest
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["Checker", "Finding", "Verdict"]

_NAMESPACES = 256
"""Whose manifests are remembered; records come in the order of their namespaces from most stores."""


class Verdict(Enum):
    """What came of a check.

    Attributes:
        FINE: A record, or a manifest, that is what its name says.
        UNPROVEN: A record that holds together, in its right place; but its namespace has no manifest to compare layout and length with.
        CORRUPT: The name is a record's, the bytes are not; `flaw` says what is wrong.
        BAD_MANIFEST: The name is a manifest's, the bytes are not. An engine writes it again.
        FOREIGN: The name is none that this SDK gives.
        GONE: It was removed since it was listed.
        UNREADABLE: It could not be read, as the store was opened or at all, so nothing is known of it.
    """

    FINE = "fine"
    UNPROVEN = "unproven"
    CORRUPT = "corrupt"
    BAD_MANIFEST = "bad_manifest"
    FOREIGN = "foreign"
    GONE = "gone"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found under one name.

    Attributes:
        name: As listed.
        kind: What the name is of.
        size_bytes: When it was looked at.
        verdict: What came of it.
        flaw: Comes with CORRUPT.
        problem: Why it is not fine, as one clause; it may repeat bytes of the store.
        read_bytes: How much of it was read.
        error: Why it is UNREADABLE, where the store said so.
    """

    name: str
    kind: Kind
    size_bytes: int
    verdict: Verdict
    flaw: Flaw | None = None
    problem: str = ""
    read_bytes: int = 0
    error: BackendError | None = None


class Checker:
    """Checks one entry of a listing after another, by reading all of it. For one thread; whoever made it closes it.

    Attributes:
        record: The bytes of what was checked last if it was FINE or UNPROVEN, until the next check; else None.
    """

    def __init__(self, backend: Backend, retry: Retry) -> None:
        self._backend = backend
        self._retry = retry
        self._reader = Reader(backend, retry)
        self._manifests: dict[str, Manifest | str | None] = {}
        self.record: memoryview | None = None

    def check(self, entry: ListEntry) -> Finding:
        """Say what lies there. Raises nothing that a store does."""
        self.record = None
        what = named(entry.name)
        if what.key is not None:
            return self._record(entry, what.key)
        if what.kind is Kind.MANIFEST:
            return self._manifest(entry, what.namespace)
        return Finding(entry.name, Kind.FOREIGN, entry.size_bytes, Verdict.FOREIGN, problem="is no name that the SDK gives")

    def manifest(self, namespace: str) -> Manifest | str | None:
        """The manifest of a namespace; in one clause why it is none; None: there is none. Remembered."""
        if namespace not in self._manifests:
            if len(self._manifests) >= _NAMESPACES:
                del self._manifests[next(iter(self._manifests))]
            self._manifests[namespace] = self._find_manifest(namespace)
        return self._manifests[namespace]

    def close(self) -> None:
        """Give its memory back."""
        self.record = None
        self._reader.close()

    def _find_manifest(self, namespace: str) -> Manifest | str | None:
        name = manifest_name(namespace)
        try:
            for entry in walk(self._backend, name, self._retry, page=2):
                if entry.name == name:
                    return read_manifest(self._reader, name, namespace, entry.size_bytes)
        except BackendError as error:
            return f"could not be read ({text_of(error)})"
        return None

    def _manifest(self, entry: ListEntry, namespace: str) -> Finding:
        name, size_bytes = entry.name, entry.size_bytes
        try:
            found = read_manifest(self._reader, name, namespace, size_bytes)
        except BackendError as error:
            return Finding(name, Kind.MANIFEST, size_bytes, Verdict.UNREADABLE, problem=text_of(error), error=error)
        if found is None:
            return Finding(name, Kind.MANIFEST, size_bytes, Verdict.GONE)
        if isinstance(found, str):
            return Finding(name, Kind.MANIFEST, size_bytes, Verdict.BAD_MANIFEST, problem=found, read_bytes=size_bytes)
        return Finding(name, Kind.MANIFEST, size_bytes, Verdict.FINE, read_bytes=size_bytes)

    def _record(self, entry: ListEntry, key: ChunkKey) -> Finding:
        found = self.manifest(key.namespace)
        manifest = found if isinstance(found, Manifest) else None
        name, size_bytes = entry.name, entry.size_bytes
        # Twice at most: it may have been replaced since it was listed.
        for last in (False, True):
            if (flaw := size_flaw(size_bytes, key, manifest)) is not None:
                return Finding(name, Kind.RECORD, size_bytes, Verdict.CORRUPT, flaw, f"has {size_bytes} bytes")
            if size_bytes > (most := self._backend.capabilities.max_record_bytes):
                # An engine with a larger option stored it, and reads it.
                problem = f"has {size_bytes} bytes, more than the {most} that this store was opened for (max_record_bytes)"
                return Finding(name, Kind.RECORD, size_bytes, Verdict.UNREADABLE, problem=problem)
            try:
                record = self._reader.read(name, size_bytes)
                if isinstance(record, Sized) and not last:
                    size_bytes = self._size_now(name) if record.size_bytes is None else record.size_bytes
                    if size_bytes < 0:
                        record = None
            except BackendError as error:
                return Finding(name, Kind.RECORD, size_bytes, Verdict.UNREADABLE, problem=text_of(error), error=error)
            if record is None:
                return Finding(name, Kind.RECORD, entry.size_bytes, Verdict.GONE)
            if isinstance(record, memoryview):
                return self._judged(name, record, key, manifest)
        return Finding(name, Kind.RECORD, size_bytes, Verdict.UNREADABLE, problem="changes its size while it is read")

    def _size_now(self, name: str) -> int:
        """As a listing says; -1: it is gone."""
        return next((entry.size_bytes for entry in walk(self._backend, name, self._retry, page=2) if entry.name == name), -1)

    def _judged(self, name: str, record: memoryview, key: ChunkKey, manifest: Manifest | None) -> Finding:
        flaw, size_bytes = flaw_of(record, key, manifest), len(record)
        if flaw is not None:
            return Finding(name, Kind.RECORD, size_bytes, Verdict.CORRUPT, flaw, _WORDS[flaw], size_bytes)
        self.record = record
        if manifest is not None:
            return Finding(name, Kind.RECORD, size_bytes, Verdict.FINE, read_bytes=size_bytes)
        return Finding(name, Kind.RECORD, size_bytes, Verdict.UNPROVEN, problem="its namespace has no manifest", read_bytes=size_bytes)


_WORDS = {
    Flaw.HEADER: "has no header: zeros, garbage, a flipped bit, or another version of the format",
    Flaw.NAMESPACE: "is a record of another namespace",
    Flaw.KEY: "is a record of another chunk",
    Flaw.LAYOUT: "has its bytes in another order than its namespace says",
    Flaw.LENGTH: "has a payload of another length",
    Flaw.PAYLOAD: "has a payload that does not match its checksum",
}
