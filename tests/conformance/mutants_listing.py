"""Backends that break the profile listing."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_mutant import Proceed
from meeting import Meeting
from mutant import MemoryMutant

from kvstore_sdk.backend import Deadline, ListEntry, ListPage, PutResult, PutStatus

ALL = 1_000_000

_running: defaultdict[int, dict[str, int]] = defaultdict(dict)
_failed: defaultdict[int, dict[str, int]] = defaultdict(dict)
_everywhere: dict[str, int] = {}
_ages: defaultdict[int, dict[str, int]] = defaultdict(dict)
_lock = threading.Lock()


class ListingMutant(Meeting, MemoryMutant):
    """One method to override: a page."""

    def _list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        with self.place.call("list", [prefix]):
            return self.page(prefix, cursor, limit)

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        found: ListPage = self.inner.list(prefix, Deadline.after(10.0), cursor, limit)
        return found

    @property
    def shelf(self) -> int:
        """Of all views of this location the same."""
        return id(self.inner._shelf)


def _with_more(page: ListPage, more: dict[str, int], prefix: str) -> ListPage:
    """The last page with some more entries."""
    if page.cursor is not None:
        return page
    return replace(page, entries=[*page.entries, *(ListEntry(name, size) for name, size in more.items() if name.startswith(prefix))])


class StopsWhereAPageIsFull(ListingMutant):
    breaks = "KV-LIST-01"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        page = super().page(prefix, cursor, limit)
        return replace(page, cursor=None) if limit == 7 else page


class ListsWhatIsAllocated(ListingMutant):
    breaks = "KV-LIST-01"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        page = super().page(prefix, cursor, limit)
        return replace(page, entries=[ListEntry(entry.name, -(-entry.size_bytes // 512) * 512) for entry in page.entries])


class BeginsAPageWithTheLastOfThePageBefore(ListingMutant):
    breaks = "KV-LIST-01"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        if cursor is None or limit < 3:
            return super().page(prefix, cursor, limit)
        page = super().page(prefix, cursor, limit - 1)
        size = len(self.inner._shelf.records.get(cursor, b"x"))
        return replace(page, entries=[ListEntry(cursor, size), *page.entries])


class ListsOtherLocationsToo(ListingMutant):
    breaks = "KV-LIST-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put":
            for put in items:
                _everywhere[f"{put.name}-{self.shelf}"] = put.size_bytes
        return proceed(items)

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        others = {name: size for name, size in _everywhere.items() if not name.endswith(f"-{self.shelf}")}
        page = super().page(prefix, cursor, limit)
        return _with_more(page, dict(list(others.items())[: limit - len(page.entries)]), prefix)


class TakesThePrefixForAFolder(ListingMutant):
    breaks = "KV-LIST-02"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        page = super().page(prefix, cursor, limit)
        folder = f"{prefix.rstrip('/')}/"
        inside = [entry for entry in page.entries if not prefix or entry.name == prefix or entry.name.startswith(folder)]
        return replace(page, entries=inside)


class FoldsTheCaseOfAPrefix(ListingMutant):
    breaks = "KV-LIST-02"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        every = super().page("", None, ALL).entries
        found = [entry for entry in every if entry.name.lower().startswith(prefix.lower()) and entry.name > (cursor or "")]
        return ListPage(found[:limit], found[limit - 1].name if len(found) > limit else None)


class IgnoresThePrefix(ListingMutant):
    breaks = "KV-LIST-02"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        return super().page("", cursor, limit)


class IgnoresTheLimit(ListingMutant):
    breaks = "KV-LIST-03"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        return super().page(prefix, cursor, ALL)


class BeginsAgainAtTheEnd(ListingMutant):
    breaks = "KV-LIST-03"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        page = super().page(prefix, cursor, limit)
        return replace(page, cursor=page.cursor or "")


class CountsHowFarItCame(ListingMutant):
    """The cursor is a number of records: what goes before it moves all others."""

    breaks = "KV-LIST-04"

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        every = super().page(prefix, None, ALL).entries
        start = int(cursor or 0)
        return ListPage(every[start : start + limit], str(start + limit) if len(every) > start + limit else None)


class ListsByAge(ListingMutant):
    """A record that is replaced is young again, and comes a second time."""

    breaks = "KV-LIST-04"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "put":
            with _lock:
                for put, result in zip(items, results, strict=True):
                    if result.status is PutStatus.STORED:
                        _ages[self.shelf][put.name] = 1 + max(_ages[self.shelf].values(), default=0)
        return results

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        ages = _ages[self.shelf]
        every = sorted(super().page(prefix, None, ALL).entries, key=lambda entry: ages[entry.name])
        found = [entry for entry in every if ages[entry.name] > int(cursor or 0)]
        return ListPage(found[:limit], str(ages[found[limit - 1].name]) if len(found) > limit else None)


class ListsRunningPuts(ListingMutant):
    breaks = "KV-LIST-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put" or max(put.size_bytes for put in items) < 65536:
            return proceed(items)
        running = _running[self.shelf]
        running |= {self.temporary_name(put.name): put.size_bytes // 2 for put in items}
        self.place.wait_for("put", "list", "", 0.02)
        results = proceed(items)
        for put in items:
            running.pop(self.temporary_name(put.name), None)
        return results

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        running = {name: size for name, size in _running[self.shelf].items() if name not in self.inner._shelf.records}
        return _with_more(super().page(prefix, cursor, limit), running, prefix)

    def temporary_name(self, name: str) -> str:
        return name


class ListsTemporaryNames(ListsRunningPuts):
    def temporary_name(self, name: str) -> str:
        return f"{name}.tmp"


class ListsWhatItCouldNotFinish(ListingMutant):
    breaks = "KV-LIST-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and deadline is not None and deadline.expired:
            _failed[self.shelf].update({f"{put.name}.part": 4096 for put in items})
            return [PutResult(PutStatus.TIMED_OUT) for _ in items]
        return proceed(items)

    def page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        return _with_more(super().page(prefix, cursor, limit), _failed[self.shelf], prefix)


MUTANTS = (
    StopsWhereAPageIsFull,
    ListsWhatIsAllocated,
    BeginsAPageWithTheLastOfThePageBefore,
    ListsOtherLocationsToo,
    TakesThePrefixForAFolder,
    FoldsTheCaseOfAPrefix,
    IgnoresThePrefix,
    IgnoresTheLimit,
    BeginsAgainAtTheEnd,
    CountsHowFarItCame,
    ListsByAge,
    ListsRunningPuts,
    ListsTemporaryNames,
    ListsWhatItCouldNotFinish,
)
