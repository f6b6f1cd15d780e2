"""A backend around a backend: every operation passes through one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    Hint,
    ListPage,
    Put,
    PutResult,
    RecordSource,
    Region,
    SupportsCounters,
    SupportsDelete,
    SupportsHints,
    SupportsIdentity,
    SupportsList,
    SupportsRegions,
    SupportsReports,
    SupportsServe,
    SupportsSettle,
    SupportsUsage,
    Ticket,
    Usage,
)

__all__ = ["BackendWrapper", "item_name"]


class BackendWrapper:
    """Passes every operation on to `inner`. A subclass overrides `around` to see or change what passes.

    Optional surfaces (`SupportsDelete` and so on) are offered if, and only if, `inner` offers them.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # Attributes of the instance, not methods: what the class had, every instance would seem to support.
        if isinstance(inner, SupportsDelete):
            self.delete = self._delete
        if isinstance(inner, SupportsList):
            self.list = self._list
        if isinstance(inner, SupportsUsage):
            self.usage = self._usage
        if isinstance(inner, SupportsSettle):
            self.settle = self._settle
        if isinstance(inner, SupportsRegions):
            self.register_region = self._register_region
            self.unregister_region = self._unregister_region
        if isinstance(inner, SupportsCounters):
            # No call to a store: nothing is to be seen or changed in it.
            self.counters = inner.counters
        if isinstance(inner, SupportsServe):
            self.serve = self._serve
        if isinstance(inner, SupportsIdentity):
            self.use_identity = self._use_identity
        if isinstance(inner, SupportsHints):
            self.hint = self._hint
        if isinstance(inner, SupportsReports):
            self.report_corrupt = self._report_corrupt

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`."""
        return self.inner.capabilities

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        """Carry one operation out.

        Args:
            op: Name of the method that was called.
            items: Its items: names, puts, gets or tickets; the prefix of a listing; a region; a source; namespace and layout; nothing for
                `usage` and `close`.
            deadline: As given, None for the methods that take none.
            proceed: Calls the same method of `inner` with other items, or the same.

        Returns:
            What the caller gets: as `inner` would return it.
        """
        return proceed(items)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        result: list[bool | Failure] = self.around("exists", names, deadline, lambda items: self.inner.exists(items, deadline))
        return result

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        result: list[PutResult] = self.around("put", puts, deadline, lambda items: self.inner.put(items, deadline))
        return result

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        result: list[GetResult] = self.around("get", gets, deadline, lambda items: self.inner.get(items, deadline))
        return result

    def close(self) -> None:
        self.around("close", (), None, lambda _: self.inner.close())

    def _delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        inner: Any = self.inner
        result: list[DeleteStatus | Failure] = self.around("delete", names, deadline, lambda items: inner.delete(items, deadline))
        return result

    def _list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        inner: Any = self.inner

        def proceed(items: Sequence[Any]) -> Any:
            return inner.list(items[0], deadline, cursor, limit)

        result: ListPage = self.around("list", (prefix,), deadline, proceed)
        return result

    def _usage(self, deadline: Deadline) -> Usage:
        inner: Any = self.inner
        result: Usage = self.around("usage", (), deadline, lambda _: inner.usage(deadline))
        return result

    def _settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        inner: Any = self.inner
        result: list[bool] = self.around("settle", tickets, deadline, lambda items: inner.settle(items, deadline))
        return result

    def _register_region(self, region: Region) -> None:
        inner: Any = self.inner
        self.around("register_region", (region,), None, lambda items: inner.register_region(items[0]))

    def _unregister_region(self, region: Region) -> None:
        inner: Any = self.inner
        self.around("unregister_region", (region,), None, lambda items: inner.unregister_region(items[0]))

    def _serve(self, source: RecordSource) -> None:
        inner: Any = self.inner
        self.around("serve", (source,), None, lambda items: inner.serve(items[0]))

    def _use_identity(self, namespace: str, layout: str) -> None:
        inner: Any = self.inner
        self.around("use_identity", (namespace, layout), None, lambda items: inner.use_identity(*items))

    def _hint(self, names: Sequence[str], hint: Hint) -> None:
        inner: Any = self.inner
        self.around("hint", names, None, lambda items: inner.hint(items, hint))

    def _report_corrupt(self, names: Sequence[str]) -> None:
        inner: Any = self.inner
        self.around("report_corrupt", names, None, lambda items: inner.report_corrupt(items))


def item_name(item: object) -> str:
    """What an item is called in a log: the name of a record, else its text."""
    return item if isinstance(item, str) else item.name if isinstance(item, (Put, Get)) else str(item)
