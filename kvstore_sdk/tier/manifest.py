"""The manifest of a namespace: written with its first record, and again when it is missing or wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore_sdk.backend import Buffer, Deadline, Get, GetResult, GetStatus, Mode, Put, PutResult, PutStatus, Ticket
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.calls import Asking, Calls
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.records import Records

__all__ = ["Manifests", "ensure_manifest"]

_TIMEOUT_S = 5.0
_AGAIN_S = 60.0
"""After a failure; what made it fail is likely to last."""


class Manifests:
    """Writes the manifest of each namespace once, after its first record; after a failure again, but not at once. Thread-safe."""

    def __init__(self, calls: Calls, records: Records, metrics: TierMetrics, identity_of: Callable[[], KVIdentity]) -> None:
        """`identity_of` gives the identity that the tier has now."""
        self._calls = calls
        self._records = records
        self._metrics = metrics
        self._identity_of = identity_of
        self._lock = threading.Lock()
        # When each namespace may be seen to again.
        self._again_s: dict[str, float] = {}

    def after_store(self, batch: Batch, slot: int) -> Asking[Ticket | None]:
        """A record of this batch was stored. See to the manifest, through a slot of the batch that is free until the batch ends.

        Returns:
            The ticket of a call that is in doubt: then the slot is not free.
        """
        namespace = batch.namespace
        with self._lock:
            if time.monotonic() < self._again_s.get(namespace, 0.0):
                return None
            # Nobody else while we are at it; and nobody ever, unless it fails.
            self._again_s[namespace] = float("inf")
        identity = self._identity_of()
        if identity.namespace != namespace:
            return None
        manifest = identity.manifest()
        result, ticket = "failed", None
        if (buffer := self._records.borrow(slot, len(manifest))) is not None:
            batch.deadline_s = time.monotonic() + _TIMEOUT_S
            result, ticket = yield from ensure_manifest(self._calls, namespace, manifest, buffer, Deadline(batch.deadline_s))
            if ticket is None:
                self._records.give_back()
        self._metrics.count("manifests", result)
        if result == "failed":
            self._again_s[namespace] = time.monotonic() + _AGAIN_S
        return ticket


def ensure_manifest(calls: Calls, namespace: str, manifest: bytes, buffer: Buffer, deadline: Deadline) -> Asking[tuple[str, Ticket | None]]:
    """See that the backend holds `manifest`, going through `buffer`, which is as long.

    It informs people and tools; no record is believed or refused because of it.

    Returns:
        `same`, `written` (it was missing), `rewritten` (another one, or a torn one, was there) or `failed`; and the ticket of a call that
        is in doubt: then the buffer is not free.
    """
    if len(manifest) > calls.capabilities.max_record_bytes:
        return "failed", None
    name = manifest_name(namespace)
    got: list[GetResult] = yield calls.get([Get(name, (buffer,))], deadline)
    found = got[0]
    if found.status is GetStatus.FOUND and buffer.view == manifest:
        return "same", None
    if found.status is GetStatus.IN_DOUBT:
        # The buffer may still be written into: not ours to fill.
        return "failed", found.ticket
    missing = found.status is GetStatus.MISSING
    buffer.view[:] = manifest
    stored: list[PutResult] = yield calls.put([Put(name, (buffer,), Mode.CREATE if missing else Mode.REPLACE)], deadline)
    put = stored[0]
    if put.status is PutStatus.STORED:
        return "written" if missing else "rewritten", None
    if put.status is PutStatus.IN_DOUBT:
        return "failed", put.ticket
    return "same" if put.status is PutStatus.EXISTS else "failed", None
