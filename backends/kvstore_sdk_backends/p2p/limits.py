"""What a node does for its peers at most, so that none of them costs it, or the others, more than that."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the owner's half of a node.

    Attributes:
        max_sessions: Peers served at a time. When all are taken, one that has been idle for `idle_s` makes room for a new one.
        idle_s: How long a session has asked for nothing, and holds nothing, before it may have to make room.
        lease_s: How long a record that a look-up found is kept for the peer that asked.
        max_leased_bytes: Of all leases together. Who holds most of it gives up its oldest for the others.
        max_leases: Records of all leases together, likewise.
        max_wait_s: The longest a look-up waits for its records.
        max_waits: Look-ups of all sessions that wait; `session_waits` those of one. One too many is answered at once.
        max_wait_names: Names in all look-ups that wait, and `session_wait_names`, likewise.
        wait_poll_s: How often the records that are waited for are looked at.
        session_fetches: Fetches of one session that run or are queued, and `session_items`, their items. One too many answers BUSY.
        session_bytes: Records of one session that are on their way at a time; a larger one goes alone.
        session_calls: Calls of one session that occupy a thread at a time.
        loan_s: How long a fetch waits for a record that is there while all that may be lent is lent; then it answers BUSY.
        max_fetch_s: The longest a fetch may take, whatever its asker says.
        bad_frames: So many frames of one session that are no message end it.
        fence_after_s: After a session ended, how long its transfers may stay unfinished before the data plane is restarted under them.
        close_s: The longest that closing takes.
    """

    max_sessions: int = 64
    idle_s: float = 5.0
    lease_s: float = 10.0
    max_leased_bytes: int = 4 << 30
    max_leases: int = 16_384
    max_wait_s: float = 600.0
    max_waits: int = 1024
    session_waits: int = 256
    max_wait_names: int = 65_536
    session_wait_names: int = 16_384
    wait_poll_s: float = 0.003
    session_fetches: int = 256
    session_items: int = 16_384
    session_bytes: int = 128 << 20
    session_calls: int = 2
    loan_s: float = 2.0
    max_fetch_s: float = 60.0
    bad_frames: int = 8
    fence_after_s: float = 10.0
    close_s: float = 2.0
