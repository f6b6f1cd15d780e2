"""To see again what a check saw, without pytest: `store = Store("acme_store:open_store")`, then the lines of the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kvstore_sdk.backend import Mode
from kvstore_sdk_conformance import store
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.target import Target

__all__ = ["Mode", "Record", "Store"]


class Store(store.Store):
    """A fresh location of a target, as the checks have it; removed with `discard()`."""

    def __init__(self, target: str, options: Mapping[str, str] | None = None, *, location: str | None = None) -> None:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        super().__init__(Target(target, options or {}, location, (os.getcwd(),)), "replay")
