"""Which vLLM the adapter is made for."""

from __future__ import annotations

import re

import vllm
from vllm.v1.kv_offload.tiering import base as tiering

from kvstore_sdk.errors import ConfigError

__all__ = [
    "MAX_VERSION",
    "MIN_VERSION",
    "check_version",
]

MIN_VERSION = (0, 24)
MAX_VERSION = (0, 33)

_WHERE = "kvstore tier"


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def check_version() -> None:
    """Refuse a vLLM that this adapter was not tested with.

    A build from source that calls itself 0.0 or `dev` is told by its features alone.

    Raises:
        ConfigError: the version is out of range, or the tier interface is older than 0.24's.
    """
    wanted = f"needs vLLM {MIN_VERSION[0]}.{MIN_VERSION[1]} to {MAX_VERSION[0]}.{MAX_VERSION[1]}"
    version = _version(vllm.__version__)
    if version is not None and version > (0, 0) and not MIN_VERSION <= version <= MAX_VERSION:
        raise ConfigError(_WHERE, "vllm", f"version {vllm.__version__} is outside the tested range: {wanted}")
    # Before 0.24 a reset of the cache never reached a tier: what was computed with old weights would be served.
    if "drain_jobs" not in tiering.SecondaryTierManager.__abstractmethods__:
        raise ConfigError(_WHERE, "vllm", f"version {vllm.__version__} cannot reset a tier: {wanted}")
