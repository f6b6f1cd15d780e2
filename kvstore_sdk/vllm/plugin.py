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

        # A name that is taken is left to whoever has it; registering it again would raise. Where the registry is called otherwise by now,
        # registering tells the same.
        if "kvstore" not in getattr(SecondaryTierFactory, "_registry", ()):
            SecondaryTierFactory.register_tier("kvstore", "kvstore_sdk.vllm.tier", "KVStoreTier")
    except ImportError as cause:
        logger.debug("kvstore: this vLLM has no tiers, so none is registered (%s)", cause)
    except Exception as cause:  # noqa: BLE001  vLLM calls its plugins without a guard: this would end every engine on the machine
        logger.warning(
            "kvstore: the tier type kvstore is not registered with this vLLM (%s: %s); a tier's entry finds it with "
            '"module_path": "kvstore_sdk.vllm"',
            type(cause).__name__,
            cause,
        )
