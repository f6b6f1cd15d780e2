"""What vLLM's plugin loader calls in each of its processes: makes the tier type known."""

from __future__ import annotations

import logging

__all__ = ["register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the tier type `kvstore`. Opens nothing, imports no backend, may be called any number of times.

    Raises nothing: this runs in every vLLM on the machine, also in those that do not use the SDK or are too old for it.
    """
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as cause:
        logger.debug("kvstore: this vLLM has no tiers, so none is registered (%s)", cause)
        return
    # The registry is private, and registering a name twice raises; a name that is taken is left to whoever has it.
    if "kvstore" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("kvstore", "kvstore_sdk.vllm.tier", "KVStoreTier")
