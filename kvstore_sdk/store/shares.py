"""How much host memory each tier may keep in use for what leaves it."""

from __future__ import annotations

__all__ = ["Shares"]


class Shares:
    """One share for each tier, so that one that hangs does not stop the others. Used under the store's lock.

    What a tier stores counts, what calls that outlived their jobs hold, and what others read through it.

    Attributes:
        max_bytes: Of all of them together.
        share_bytes: Of each.
        used_bytes: By the tier's place in the list.
    """

    def __init__(self, max_bytes: int, tiers: int) -> None:
        self.max_bytes = max_bytes
        self.share_bytes = max_bytes // max(1, tiers)
        self.used_bytes = [0] * tiers

    def has_room(self, place: int, size_bytes: int) -> bool:
        """Whether so much more fits. Where nothing is in use anything does: a record may be larger than a share."""
        return not self.used_bytes[place] or self.used_bytes[place] + size_bytes <= self.share_bytes

    def use(self, place: int, size_bytes: int) -> None:
        """So much more is in use; or less, if it is negative."""
        self.used_bytes[place] += size_bytes
