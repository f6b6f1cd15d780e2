"""A backend that goes wrong, for configurations that can only name it: `"backend": "vllm_faulty:open_faulty"`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore_sdk.backend import Backend, open_backend
from kvstore_sdk.testing import Fault, FaultyBackend
from kvstore_sdk_backends.fs import open_fs

SCRIPTS: dict[str, Sequence[Fault]] = {}
"""What goes wrong in the backend that is opened at a location."""

OPENED: dict[str, FaultyBackend] = {}
"""The last backend that was opened at a location."""


def open_faulty(location: str, *, max_record_bytes: int = 1 << 30) -> FaultyBackend:
    """A folder behind a `FaultyBackend` with the script of its location."""
    inner = open_backend("fs", {"max_record_bytes": max_record_bytes}, location=location)
    OPENED[location] = FaultyBackend(inner, SCRIPTS.pop(location, ()))
    return OPENED[location]


def open_as_nobody(location: str) -> Backend:
    """A folder, opened by a user who is not root: root may do anything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        return open_fs(location)
    finally:
        os.seteuid(user)


def set_timeouts(tier: Any, **seconds: float) -> None:
    """Change time-outs of a tier from now on. What ends by its time in a test begins after this, and what must not end so before it: no
    machine is so quick that a tenth of a second is enough for anything."""
    for name, value in seconds.items():
        object.__setattr__(tier._settings, name, value)
    tier._table._timeout_s = tier._settings.lookup_timeout_s


def faulty_entry(folder: Path, *script: Fault, **options: Any) -> dict[str, Any]:
    """A tier's entry for a faulty backend in `folder`."""
    SCRIPTS[str(folder)] = script
    return {"type": "kvstore", "backend": "vllm_faulty:open_faulty", "location": str(folder), **options}
