"""What a second store holds of what a first one lists, without asking for each name."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore_sdk.backend import Backend, ListEntry, SupportsList
from kvstore_sdk.tools.facts import Kind, named
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["UNKNOWN", "beside"]

UNKNOWN = -1
"""In the place of a size: the listings do not say."""


def beside(entries: Iterator[ListEntry], other: Backend, prefix: str, retry: Retry) -> Iterator[tuple[ListEntry, int | None]]:
    """Each of `entries` with the size of what `other` lists under its name: None if nothing, UNKNOWN if that cannot be told.

    Both listings are walked at once, in memory for a page of each. That needs stores which list records in the order of names, as most
    do; from the first one on that is out of order, of either store, all is UNKNOWN. So it is for names of nothing that the SDK stores. None
    may be wrong: before it was out of order, or because of what happened since.

    Raises:
        BackendError: a listing failed.
    """
    names = _Names(walk(other, prefix, retry) if isinstance(other, SupportsList) else None)
    last = ""
    for entry in entries:
        if _is_ours(entry):
            if entry.name <= last:
                names.give_up()
            last = entry.name
        yield entry, names.size_of(entry.name) if _is_ours(entry) else UNKNOWN


def _is_ours(entry: ListEntry) -> bool:
    """Others are no business of ours, and stores differ in their order: some sort by segments, some by characters."""
    return named(entry.name).kind is not Kind.FOREIGN


class _Names:
    """A listing that is asked for names in their order."""

    def __init__(self, entries: Iterator[ListEntry] | None) -> None:
        self._entries = entries
        self._next: ListEntry | None = None
        self._advance()

    def give_up(self) -> None:
        """From now on nothing is known."""
        self._entries = self._next = None

    def size_of(self, name: str) -> int | None:
        while self._next is not None and self._next.name < name:
            self._advance()
        if self._entries is None:
            return UNKNOWN
        return self._next.size_bytes if self._next is not None and self._next.name == name else None

    def _advance(self) -> None:
        last, self._next = self._next, next(filter(_is_ours, self._entries), None) if self._entries is not None else None
        if last is not None and self._next is not None and self._next.name <= last.name:
            self.give_up()
