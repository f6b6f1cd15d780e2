"""From a checked entry to an open Tier, the same for both ways into vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NamedTuple, cast

from kvstore_sdk.backend import Backend, Capabilities, Durability
from kvstore_sdk.backend.options import parse_options
from kvstore_sdk.backend.registry import backend_options, open_backend
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.tier import EngineMemory, RecordMemory, Tier
from kvstore_sdk.tier.fit import fit
from kvstore_sdk.vllm.options import TierOptions

__all__ = ["NOBODY_READS", "OpenTier", "fit_unopened", "open_tier"]

NOBODY_READS = "; nobody reads them again once it has ended, and the store keeps them: remove %s then, or set may_store to false"


class OpenTier(NamedTuple):
    """A Tier, and whether what it stores outlives this process."""

    tier: Tier
    outlives_us: bool


def open_tier(
    where: str, options: TierOptions, identity: KVIdentity, memory: EngineMemory | RecordMemory, *, name: str, events: bool
) -> OpenTier:
    """Open the backend and build its Tier.

    Args:
        where: For errors.
        options: Of the entry.
        identity: Of the chunks.
        memory: What they come from and go to.
        name: For threads, logs and metrics.
        events: Collect events.

    Raises:
        ConfigError: the configuration does not fit the chunks, or the backend says that it is wrong.
        BackendError: the store could not be opened.
    """
    fit_unopened(where, options, identity)
    backend = open_backend(options.backend, options.backend_options, location=options.location)
    try:
        tier = Tier(
            backend,
            memory,
            identity=identity,
            settings=options.settings,
            name=name,
            may_store=options.adapter.may_store,
            events=events,
        )
    except BaseException:
        backend.close()
        raise
    return OpenTier(tier, backend.capabilities.durability is not Durability.NONE)


def fit_unopened(where: str, options: TierOptions, identity: KVIdentity) -> None:
    """Find out before the store is opened, and its folder made, what can be told without it: whether the chunks fit what was configured.

    A backend may have narrower limits of its own, which only the open one tells.

    Raises:
        ConfigError: they do not fit.
    """
    name, limit = "max_record_bytes", sys.maxsize
    schema = backend_options(options.backend)
    if name in options.backend_options:
        limit = parse_options(where, {name: schema[name]}, {name: options.backend_options[name]})[name]
    unopened = SimpleNamespace(capabilities=Capabilities(max_record_bytes=limit))
    fit(where, cast(Backend, unopened), identity, options.settings)
