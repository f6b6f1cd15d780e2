"""A wrapper offers what the backend below offers: no more, no less."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_sdk.backend import (
    Deadline,
    DeleteStatus,
    Hint,
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
    Usage,
)
from kvstore_sdk.testing import BackendWrapper, FaultyBackend, RecordingBackend

SURFACES = [
    SupportsDelete,
    SupportsList,
    SupportsUsage,
    SupportsSettle,
    SupportsRegions,
    SupportsServe,
    SupportsIdentity,
    SupportsHints,
    SupportsReports,
    SupportsCounters,
]
WRAPPERS = [BackendWrapper, FaultyBackend, RecordingBackend]


class Bare:
    """Only what every backend has."""

    def __init__(self, inner: Any) -> None:
        self.capabilities = inner.capabilities
        self.exists, self.put, self.get, self.close = inner.exists, inner.put, inner.get, inner.close


class Full(Bare):
    """Every optional surface; those the memory backend lacks only note that they were called."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.delete, self.list, self.usage = inner.delete, inner.list, inner.usage
        self.called: list[tuple[str, object]] = []

    def settle(self, tickets: Any, deadline: Deadline) -> list[bool]:
        self.called.append(("settle", tickets))
        return [True for _ in tickets]

    def register_region(self, region: Region) -> None:
        self.called.append(("register", region))

    def unregister_region(self, region: Region) -> None:
        self.called.append(("unregister", region))

    def serve(self, source: RecordSource) -> None:
        self.called.append(("serve", source))

    def use_identity(self, namespace: str, layout: str) -> None:
        self.called.append(("identity", (namespace, layout)))

    def hint(self, names: Any, hint: Hint) -> None:
        self.called.append(("hint", (list(names), hint)))

    def report_corrupt(self, names: Any) -> None:
        self.called.append(("report", list(names)))

    def counters(self) -> dict[str, int]:
        return {"calls": len(self.called)}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_surface_is_made_up(wrapper: type[BackendWrapper], inner: Any) -> None:
    backend = wrapper(Bare(inner))
    assert [surface for surface in SURFACES if isinstance(backend, surface)] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_surface_passes_through(wrapper: type[BackendWrapper], inner: Any, bench: Any) -> None:
    full = Full(inner)
    backend: Any = wrapper(full)
    assert [surface for surface in SURFACES if isinstance(backend, surface)] == SURFACES
    soon = Deadline.after(30)
    assert backend.delete(["a", "z"], soon) == [DeleteStatus.DELETED, DeleteStatus.ABSENT]
    page = backend.list("", soon, limit=2)
    assert [entry.name for entry in page.entries] == ["b", "c"]
    assert [entry.name for entry in backend.list("", soon, page.cursor, 2).entries] == ["d"]
    assert backend.usage(soon) == Usage(3, 3 * 8192)
    backend.register_region(bench.region)
    backend.unregister_region(bench.region)
    assert backend.counters() == {"calls": 2}
    source: Any = object()
    backend.use_identity("n" * 32, "layout")
    backend.serve(source)
    backend.hint(["a", "b"], Hint("peer:1", 2.0))
    backend.report_corrupt(["a"])
    assert full.called == [
        ("register", bench.region),
        ("unregister", bench.region),
        ("identity", ("n" * 32, "layout")),
        ("serve", source),
        ("hint", (["a", "b"], Hint("peer:1", 2.0))),
        ("report", ["a"]),
    ]
    assert backend.capabilities == inner.capabilities


def test_wrappers_nest(inner: Any, bench: Any) -> None:
    backend = RecordingBackend(FaultyBackend(RecordingBackend(inner)))
    assert bench.fetch(backend, "a")[1] == bench.record("a")
    backend.close()
