"""Peers whose records were corrupt when they came."""

from __future__ import annotations

import logging
import time

from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.peer import Peer

__all__ = ["Suspects"]

logger = logging.getLogger(__name__)

SUSPECT_S = 600.0
"""As long as no other corrupt record comes. Memory that is bad stays so; a record that was bad once may have been so for any reason."""
_MOST = 1024
"""Addresses that are remembered."""


class Suspects:
    """Who is asked after all others: for what nobody else has a peer with bad memory is better than none. Belongs to the loop."""

    def __init__(self) -> None:
        self._until_s: dict[Address, float] = {}
        self._notices = Notices()

    def note(self, peer: Peer) -> None:
        """A record from it was corrupt."""
        peer.hit_s = 0.0
        self._until_s.pop(peer.address, None)
        while len(self._until_s) >= _MOST:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[peer.address] = time.monotonic() + SUSPECT_S
        if (unsaid := self._notices.due(peer.address)) is not None:
            text = "p2p peer %s: gave a record that is corrupt: others are asked first for %.0f s%s"
            logger.warning(text, peer.address, SUSPECT_S, Notices.more(unsaid))

    def __contains__(self, peer: Peer) -> bool:
        return self._until_s.get(peer.address, 0.0) > time.monotonic()
