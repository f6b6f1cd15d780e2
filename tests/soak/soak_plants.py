"""What a judge has to find: mistakes that are put into a soak on purpose."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from soak_engine import SoakEngine
from soak_store import SoakStore

from kvstore_sdk.tier import Lookup, Tier

__all__ = ["PLANTS", "plant"]


def _wrong_byte(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    """A byte of a chunk that lies ready in host memory changes."""
    slots = [slot for slot in store.host._slots.values() if slot.state.value == "ready"]
    for slot in slots:
        store.payload(slot)[-1] ^= 0x01


def _leak(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    """Memory is kept: 4 MiB each time."""
    kept.append(os.urandom(1 << 16) * 64)


def _descriptors(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(4))


def _threads(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    for _ in range(4):
        thread = threading.Thread(target=threading.Event().wait, daemon=True, name="planted")
        thread.start()
        kept.append(thread)


def _stuck_job(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    """Tiers lose a result of every poll, from now on."""
    if not kept:
        poll = Tier.poll
        Tier.poll = lambda tier: poll(tier)[1:]  # type: ignore[method-assign]
        kept.append(poll)


def _lost_request(store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    """Look-ups are never answered, from now on."""
    store.store.lookup = lambda request, key: Lookup.PENDING  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[SoakStore, SoakEngine, list[Any]], None]] = {
    "wrong-byte": _wrong_byte,
    "leak": _leak,
    "descriptors": _descriptors,
    "threads": _threads,
    "stuck-job": _stuck_job,
    "lost-request": _lost_request,
}


def plant(name: str, store: SoakStore, engine: SoakEngine, kept: list[Any]) -> None:
    """Do it once more; called four times a second. `kept` keeps what leaks."""
    if name:
        PLANTS[name](store, engine, kept)
