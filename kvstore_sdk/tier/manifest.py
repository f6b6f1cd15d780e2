"""The manifest of a namespace: written with its first record, and again when it is missing or wrong."""

from __future__ import annotations

from kvstore_sdk.backend import Buffer, Deadline, Get, GetStatus, Mode, Put, PutStatus
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.tier.calls import Calls

__all__ = ["ensure_manifest"]


def ensure_manifest(calls: Calls, namespace: str, manifest: bytes, buffer: Buffer, deadline: Deadline) -> str:
    """See that the backend holds `manifest`, going through `buffer`, which is as long.

    It informs people and tools; no record is believed or refused because of it.

    Returns:
        `same`, `written` (it was missing), `rewritten` (another one, or a torn one, was there) or `failed`.
    """
    if len(manifest) > calls.capabilities.max_record_bytes:
        return "failed"
    name = manifest_name(namespace)
    found = calls.get([Get(name, (buffer,))], deadline)[0]
    if found.status is GetStatus.FOUND and buffer.view == manifest:
        return "same"
    if found.status is GetStatus.IN_DOUBT:
        # The buffer may still be written into: not ours to fill.
        return "failed"
    missing = found.status is GetStatus.MISSING
    buffer.view[:] = manifest
    put = calls.put([Put(name, (buffer,), Mode.CREATE if missing else Mode.REPLACE)], deadline)[0]
    if put.status is PutStatus.STORED:
        return "written" if missing else "rewritten"
    return "same" if put.status is PutStatus.EXISTS else "failed"
