"""The adapter to vLLM 0.24 to 0.33, with two ways in: storage tiers below vLLM's own host tier, or below the SDK's.

`kv_connector_extra_config` names two things in here: the spec (`"spec_name": "KVStoreTieringSpec"` or `"KVStoreOffloadingSpec"`,
`"spec_module_path": "kvstore_sdk.vllm"`) and the tier type (`"type": "kvstore"`, `"module_path": "kvstore_sdk.vllm"`). They are imported
when they are first asked for: vLLM loads this package in every one of its processes, also in those that never move a byte.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVStoreOffloadingSpec", "KVStoreTier", "KVStoreTieringSpec", "kvstore"]

_HOMES = {
    "KVStoreOffloadingSpec": ("kvstore_sdk.vllm.offloading.spec", "KVStoreOffloadingSpec"),
    "KVStoreTier": ("kvstore_sdk.vllm.tier", "KVStoreTier"),
    "KVStoreTieringSpec": ("kvstore_sdk.vllm.spec", "KVStoreTieringSpec"),
    # vLLM looks a tier up by its type: `getattr(module, "kvstore")`.
    "kvstore": ("kvstore_sdk.vllm.tier", "KVStoreTier"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        specs = ", ".join(found for found in __all__ if found.endswith("Spec"))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; as spec_name there are {specs}", name=name)
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
