"""Keys that end inside a chunk, which vLLM makes for Mamba states (`align`, one block a chunk)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat

__all__ = ["PartialTails", "refuse_unmarked_tails"]


class PartialTails:
    """Tells them from keys of whole chunks. They are neither looked up nor stored."""

    def __init__(self, known: compat.SpecFacts) -> None:
        self._chunk_tokens = {group: tokens * known.blocks_per_chunk for group, tokens, _ in known.groups}
        self.possible = compat.HAS_KEY_POSITIONS and set(self._chunk_tokens.values()) != {known.hash_tokens}
        """Where a hash covers a whole chunk no key can end inside one, and nobody has to look."""

    def is_one(self, key: bytes, request: Any) -> bool:
        """Whether the key ends inside a chunk."""
        position = compat.key_position(request, key) if self.possible else None
        if position is None:
            return False
        tokens = self._chunk_tokens.get(int.from_bytes(key[-4:], "big"))
        return tokens is not None and position % tokens != 0


def refuse_unmarked_tails(where: str, known: compat.SpecFacts, facts: Mapping[str, Any]) -> None:
    """Refuse an engine that makes such keys and does not say which they are.

    Raises:
        ConfigError: this is one.
    """
    if compat.PARTIAL_TAILS_UNMARKED and facts["mamba_align"] and known.blocks_per_chunk == 1:
        raise ConfigError(where, "blocks_per_chunk", "1 with mamba_cache_mode align can end this vLLM in an assertion; use 2, or vLLM 0.31")
