"""What a store does that nobody set up: its defaults, whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from store_bench import Stand, key, keys

from kvstore_sdk.store import StoreSettings
from kvstore_sdk.tier import TierSettings
from kvstore_sdk_backends.fs import open_fs

NewStand = Callable[..., Stand]


def test_what_was_stored_once_comes_back_from_disk(tmp_path: Path, new_stand: NewStand) -> None:
    """CFG-05: no chunk has to be asked for several times before the disk is used."""
    stand = new_stand(
        open_fs(str(tmp_path / "kv")), tier_settings=dataclasses.asdict(TierSettings()), **dataclasses.asdict(StoreSettings())
    )
    stand.put(keys(4))
    stand.settle()
    stand.evict_all()
    assert stand.hits(keys(4)) == 4
    assert stand.total("hits", "below") == 4
    assert stand.hits([key(99)]) == 0
