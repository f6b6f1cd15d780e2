"""Every record of a store, one after another, in memory for one page."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore_sdk.backend import Backend, BreachError, Deadline, ListEntry, ListPage, SupportsList, TimedOutError, UnsupportedError
from kvstore_sdk.tools.retry import Retry

__all__ = ["walk"]

_PAGE = 1000
_FAR_S = 1e13
"""No time of a record: some 300,000 years from 1970."""
_EMPTY_PAGES = 10_000
"""One after another; a store may have that many objects which are no records, but not a listing without an end."""


def walk(backend: Backend, prefix: str = "", retry: Retry | None = None, page: int = _PAGE) -> Iterator[ListEntry]:
    """Records whose name starts with `prefix`, in the order of the store.

    What is there during the whole walk comes exactly once; what comes or goes meanwhile may come or not. Pages that fail are asked for
    again. Memory is that of one page, however many records there are.

    Args:
        backend: Open.
        prefix: Text that may end anywhere in a name.
        retry: How patient to be with each page.
        page: Most entries of a page.

    Raises:
        UnsupportedError: the backend does not list; nothing was asked yet.
        BackendError: a page could not be had, or broke the contract.
    """
    if not isinstance(backend, SupportsList):
        raise UnsupportedError(f"list: {type(backend).__name__} does not list what it holds (SupportsList), and this needs a listing")
    return _pages(backend, prefix, retry or Retry(), page)


def _pages(backend: SupportsList, prefix: str, retry: Retry, limit: int) -> Iterator[ListEntry]:
    cursor: str | None = None
    empty = 0
    while True:
        found, limit = _page(backend, prefix, retry, cursor, limit)
        yield from found.entries
        empty = 0 if found.entries else empty + 1
        if found.cursor is None:
            return
        if found.cursor == cursor or empty >= _EMPTY_PAGES:
            raise BreachError(f"list {prefix!r} after {cursor!r}: the listing does not get on; that is for the backend's vendor to fix")
        cursor = found.cursor


def _page(backend: SupportsList, prefix: str, retry: Retry, cursor: str | None, limit: int) -> tuple[ListPage, int]:
    """The page after `cursor`, and how many entries the next one should have."""
    doing = f"list {prefix!r}" + (f" after {cursor!r}" if cursor else "")

    def attempt(deadline: Deadline) -> ListPage:
        nonlocal limit
        try:
            return _checked(doing, backend.list(prefix, deadline, cursor, limit))
        except TimedOutError:
            # What a page takes depends on its length.
            limit = max(1, limit // 4)
            raise

    return retry.call(doing, attempt), limit


def _checked(doing: str, page: object) -> ListPage:
    if not isinstance(page, ListPage) or not isinstance(page.cursor, str | None) or not all(map(_is_entry, page.entries)):
        raise BreachError(f"{doing}: answered what is no ListPage of ListEntry; that is for the backend's vendor to fix")
    return page


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, ListEntry)
        and isinstance(entry.name, str)
        and type(entry.size_bytes) is int
        and entry.size_bytes >= 0
        and (entry.modified_s is None or (isinstance(entry.modified_s, int | float) and abs(entry.modified_s) < _FAR_S))
    )
