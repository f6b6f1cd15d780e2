"""What the backend is asked about, and who waits for the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_sdk.keys import GROUP_BYTES

if TYPE_CHECKING:
    from kvstore_sdk.tier.hints import Asker

__all__ = ["Probe"]


class Probe:
    """Keys that one request asked for between two steps.

    One object for all of them, as the engine's own thread pays for each that is made. It belongs to that thread; others read it, and set
    `answered`.

    Attributes:
        table: Which probe is open for a key; this one, while it is open for it.
        keys: In the order in which they were asked for. None is added any more when it has been sent.
        key_bytes: How long the first of them is.
        group: What it ends with. A key of the same group and length needs no look at whether there can be such a chunk.
        asked_s: When the first of them was.
        request_id: Waits for all of them. None when it ended before they were sent, and when nobody waits.
        asker: The request, if it has a hint; it alone waits then.
        others: Who else waits, by key.
        overruled: Whether a key is there, where that became known otherwise after the question: it stands, whatever a late answer says.
        over: Keys that nobody waits for any more: the backend need not be asked about them.
        trial: It is to find out whether the store works again.
        answered: Of a trial, whether the backend answered it; None before. False also when it was dropped unasked.
    """

    __slots__ = (
        "answered",
        "asked_s",
        "asker",
        "group",
        "key_bytes",
        "keys",
        "others",
        "over",
        "overruled",
        "request_id",
        "table",
        "trial",
    )

    def __init__(
        self,
        table: dict[bytes, Probe],
        key: bytes,
        asked_s: float,
        request_id: str | None = None,
        asker: Asker | None = None,
        *,
        trial: bool = False,
    ) -> None:
        self.table = table
        self.keys = [key]
        self.key_bytes = len(key)
        self.group = key[-GROUP_BYTES:]
        self.asked_s = asked_s
        self.request_id = request_id
        self.asker = asker
        self.others: dict[bytes, set[str]] = {}
        self.overruled: dict[bytes, bool] = {}
        self.over: set[bytes] = set()
        self.trial = trial
        self.answered: bool | None = None

    @classmethod
    def of(cls, key: bytes, *others: bytes, asked_s: float, trial: bool = False) -> Probe:
        """One whose answers nobody waits for."""
        probe = cls({}, key, asked_s, trial=trial)
        probe.keys += others
        return probe

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a key of it."""
        return len(self.over) < len(self.keys)
