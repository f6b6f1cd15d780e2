"""The keys of `kv_connector_extra_config` itself. vLLM ignores what it does not know: an option in the wrong place would do nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from kvstore_sdk.backend.options import nearest_name, options_of
from kvstore_sdk.backend.registry import backend_options, registered_backends
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.store import StoreSettings
from kvstore_sdk.tier import TierSettings
from kvstore_sdk.vllm.options import LORA_DIGESTS, PER_TIER, AdapterOptions, HostOptions

__all__ = ["TABLE", "check_top_keys", "options_of_entries"]

logger = logging.getLogger(__name__)

TABLE = "kvstore"
"""The key of `KVStoreOffloadingSpec` whose value is a table of options for all tiers."""

_VLLMS = frozenset(
    {
        "backpressure",
        "block_size",
        "blocks_per_chunk",
        "cache_policy_module_path",
        "canonical_layout",
        "cpu_bytes_to_use",
        "eviction_policy",
        "max_tracker_size",
        "offload_prompt_only",
        "secondary_tiers",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "store_threshold",
        "sync_load_budget_bytes",
        "tier_poll_interval_s",
    }
)
"""What vLLM 0.24 to 0.33 reads there."""

_IN_ENTRIES = "each entry of secondary_tiers"


def options_of_entries(extra: Mapping[str, Any]) -> set[str]:
    """What can stand in a tier's entry only: options of the tier, of the backends in use, and those that each tier has for itself."""
    entries = extra.get("secondary_tiers")
    names = {"type", "module_path", "backend", "location", *PER_TIER, *options_of(TierSettings)}
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        backend = entry.get("backend") if isinstance(entry, Mapping) else None
        # Others would have to be imported, which is done when their entry is checked.
        if isinstance(backend, str) and backend.partition(":")[0] in registered_backends():
            names |= set(backend_options(backend))
    return names


def check_top_keys(where: str, extra: Mapping[str, Any], *, has_table: bool) -> None:
    """Refuse what would be believed to do something and does nothing; warn once of what nobody here knows.

    Args:
        where: Name of the spec, for errors.
        extra: `kv_connector_extra_config`.
        has_table: Whether the spec takes the table `kvstore`.

    Raises:
        ConfigError: a key is an option that belongs elsewhere, or is all but the name of one that is known.
    """
    if not has_table and extra.get(TABLE):
        raise ConfigError(where, TABLE, _instead_of_table(extra))
    homes = _homes(extra, has_table)
    known = _VLLMS | {TABLE}
    for name in extra:
        if name in known:
            continue
        if name in homes:
            raise ConfigError(where, name, f"without effect at this place, it belongs in {homes[name]}")
        if name == "policy":
            raise ConfigError(where, name, "without effect: the key is eviction_policy")
        if near := nearest_name(name, known | set(homes)):
            belongs = f", in {homes[near]}" if near in homes else ""
            raise ConfigError(where, name, f"unknown key; did you mean {near}{belongs}?")
        _warn_once(where, name)


def _homes(extra: Mapping[str, Any], has_table: bool) -> dict[str, str]:
    """By name of an option, where it belongs."""
    entries, shared = options_of_entries(extra), {LORA_DIGESTS, *options_of(AdapterOptions)} - set(PER_TIER)
    tables = set(options_of(HostOptions) | options_of(StoreSettings))
    if not has_table:
        homes = dict.fromkeys(tables, "the table kvstore of KVStoreOffloadingSpec; this spec has no such option")
        return homes | dict.fromkeys(entries | shared, _IN_ENTRIES)
    homes = dict.fromkeys(entries, _IN_ENTRIES) | dict.fromkeys(tables | shared, "the table kvstore")
    return homes | dict.fromkeys(tables & entries, "the table kvstore for the store, and in each entry of secondary_tiers for its tier")


def _instead_of_table(extra: Mapping[str, Any]) -> str:
    """What to do with the table where there is none."""
    names = [str(name) for name in extra[TABLE]] if isinstance(extra[TABLE], Mapping) else []
    fit = options_of_entries(extra) | {LORA_DIGESTS, *options_of(AdapterOptions)}
    moved, rest = [name for name in names if name in fit], [name for name in names if name not in fit]
    advice = [f"put {', '.join(moved)} into {_IN_ENTRIES}"] if moved else []
    if rest:
        advice.append(f"leave out {', '.join(rest)}")
    return "is a table of KVStoreOffloadingSpec, and without effect here: " + ("; ".join(advice) or "leave it out")


@functools.cache
def _warn_once(where: str, name: str) -> None:
    logger.warning("%s: kv_connector_extra_config has the key %s, which neither vLLM nor kvstore-sdk knows; it is ignored", where, name)
