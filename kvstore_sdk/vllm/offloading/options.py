"""What an operator may write for `KVStoreOffloadingSpec`, all checked before anything opens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_sdk.backend.options import Bounds, OptionInfo, options_of, parse_options
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.store import StoreSettings
from kvstore_sdk.vllm.options import (
    LORA_DIGESTS,
    PER_TIER,
    AdapterOptions,
    HostOptions,
    TierOptions,
    parse_adapter_options,
    parse_tier_options,
    refuse_unknown,
)
from kvstore_sdk.vllm.top_keys import check_top_keys, options_of_entries

__all__ = ["NamedTier", "OffloadingOptions", "named_for_operators", "parse_offloading_options"]

logger = logging.getLogger(__name__)

_TYPE = "kvstore"
_MOST_BYTES = 1 << 62
"""More than any machine has, and still a length of a file."""
_SIZE = {"host_bytes": OptionInfo("host_bytes", int, None, Bounds(ge=1, le=_MOST_BYTES), "")}
_VLLMS_OWN = {
    "cache_policy_module_path": "eviction_policy names a policy as module:factory",
    "canonical_layout": "leave it out, the layout is portable wherever that is certified",
    "store_threshold": "leave it out, or choose eviction_policy arc for prompts that come once",
    "backpressure": "leave it out, stores that a tier cannot take are shed",
}
"""Keys that would be believed to do something -> what to do instead."""

_NAMES = {"size_bytes": "cpu_bytes_to_use", "policy": "eviction_policy", "reserve_bytes": "reserve_bytes"}
"""A field of host memory -> the key that an operator writes."""


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier's entry. `name` is its place, counted from 1, and its type: `1:kvstore`, as vLLM numbers tiers."""

    name: str
    options: TierOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingOptions:
    """The whole configuration, checked. Its `repr` shows nothing that may hold a secret.

    Attributes:
        host_bytes: Of the shared region.
        policy: Of eviction from host memory: a name, or `module:factory`.
        host: Of the host tier.
        store: Of the tiered store.
        adapter: What decides the identity, for all tiers.
        tiers: In the order in which they are asked. May be empty: host memory alone.
    """

    host_bytes: int
    policy: str
    host: HostOptions
    store: StoreSettings
    adapter: AdapterOptions = field(repr=False)
    tiers: tuple[NamedTier, ...]

    def of_replica(self, where: str, index: int) -> OffloadingOptions:
        """The same for one of several data parallel replicas. Raises ConfigError as `TierOptions.of_replica` does."""
        tiers = (NamedTier(tier.name, tier.options.of_replica(f"{where} tier {tier.name!r}", index)) for tier in self.tiers)
        return replace(self, tiers=tuple(tiers))


def parse_offloading_options(where: str, extra: Mapping[str, Any]) -> OffloadingOptions:
    """Sort out and check `kv_connector_extra_config`.

    Raises:
        ConfigError: something is unknown, missing, wrong, or differs between tiers that must agree.
    """
    check_top_keys(where, extra, has_table=True)
    common = extra.get("kvstore", {})
    if not isinstance(common, Mapping):
        raise ConfigError(where, "kvstore", f"must be a table of options, not of type {type(common).__name__}")
    ours = {name for name in options_of(AdapterOptions) if name not in PER_TIER} | {LORA_DIGESTS}
    host, store = options_of(HostOptions), options_of(StoreSettings)
    elsewhere = dict.fromkeys(options_of_entries(extra), "stands in each entry of secondary_tiers, not in the table kvstore")
    refuse_unknown(f"{where} table 'kvstore'", (*ours, *host, *store), common, elsewhere)
    shared = {name: common[name] for name in common if name in ours}
    tiers = tuple(_tiers(where, extra, shared, ours))
    adapter = tiers[0].options.adapter if tiers else parse_adapter_options(where, shared)
    for tier in tiers[1:]:
        for name in sorted(ours):
            if getattr(tier.options.adapter, name) != getattr(adapter, name):
                problem = f"differs between {tiers[0].name} and {tier.name}, which hold the same chunks: give it once, in the table kvstore"
                raise ConfigError(where, name, problem)
    return OffloadingOptions(
        host_bytes=_host_bytes(where, extra.get("cpu_bytes_to_use")),
        policy=_policy(where, extra),
        host=HostOptions(**parse_options(where, host, {name: common[name] for name in common if name in host})),
        store=StoreSettings(**parse_options(where, store, {name: common[name] for name in common if name in store})),
        adapter=adapter,
        tiers=tiers,
    )


@contextlib.contextmanager
def named_for_operators(where: str) -> Iterator[None]:
    """Give what host memory itself refuses the names by which an operator knows it."""
    try:
        yield
    except ConfigError as error:
        if (name := _NAMES.get(error.field)) is None:
            raise
        problem = f"{error.where}: {error.problem}" if error.field == "policy" else error.problem
        raise ConfigError(where, name, problem) from error


def _tiers(where: str, extra: Mapping[str, Any], shared: Mapping[str, Any], ours: set[str]) -> list[NamedTier]:
    entries = extra.get("secondary_tiers") or ()
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(where, "secondary_tiers", "must be a list of tables")
    found = []
    for place, entry in enumerate(entries, 1):
        if entry.get("type") != _TYPE:
            problem = f"tier {place} is of type {entry.get('type')!r}, here only {_TYPE!r} can be used; vLLM's own need KVStoreTieringSpec"
            raise ConfigError(where, "secondary_tiers", problem)
        for name in shared:
            if name in entry and entry[name] != shared[name]:
                raise ConfigError(where, name, f"differs between the table kvstore and tier {place}; leave one out")
        name = f"{place}:{_TYPE}"
        found.append(NamedTier(name, parse_tier_options(f"{where} tier {name!r}", {**shared, **entry})))
    places: dict[tuple[str, str | None], str] = {}
    for tier in found:
        first = places.setdefault((tier.options.backend, tier.options.location), tier.name)
        # Memory without a name is a new place each time.
        if first != tier.name and tier.options.backend not in ("memory", "memory:"):
            logger.warning("%s: tiers %s and %s are one and the same place: every chunk is put there twice", where, first, tier.name)
    return found


def _host_bytes(where: str, given: object) -> int:
    if given is None:
        raise ConfigError(where, "cpu_bytes_to_use", "is missing; it is the size of host memory for the whole engine, such as 8589934592")
    try:
        size: int = parse_options(where, _SIZE, {"host_bytes": given})["host_bytes"]
    except ConfigError as error:
        raise ConfigError(where, "cpu_bytes_to_use", error.problem) from None
    return size


def _policy(where: str, extra: Mapping[str, Any]) -> str:
    policy = extra.get("eviction_policy", "lru")
    if not isinstance(policy, str):
        raise ConfigError(where, "eviction_policy", f"is not a string but of type {type(policy).__name__}")
    for name, instead in _VLLMS_OWN.items():
        if extra.get(name):
            raise ConfigError(where, name, f"is of vLLM's own host tier, and without effect here: {instead}")
    return policy
