"""Reading a record for a tool: into memory that nobody else writes, and never twice into memory that a store may still write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from damage import chunk_key, identity_of, record_of
from places import Place

from kvstore_sdk.backend import (
    BackendError,
    BreachError,
    Deadline,
    GetResult,
    GetStatus,
    InvalidError,
    Region,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, InDoubt, Return, Say
from kvstore_sdk.tools import retry as retry_module
from kvstore_sdk.tools.facts import MAX_MANIFEST_BYTES, Manifest
from kvstore_sdk.tools.reading import Reader, Sized, read_manifest
from kvstore_sdk.tools.retry import Retry

IDENTITY = identity_of("acme/one", [5000, 50_000])
SMALL, LARGE = chunk_key(IDENTITY, 0), chunk_key(IDENTITY, 0, group=1)
RECORDS = {SMALL.name: record_of(SMALL, 5000), LARGE.name: record_of(LARGE, 50_000)}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module.time, "sleep", lambda _: None)


@pytest.fixture
def folder(make_folder: Callable[[], Place]) -> Place:
    made = make_folder()
    for name, record in RECORDS.items():
        made.tree.write(name, record)
    return made


@contextlib.contextmanager
def reading(backend: Any, retry: Retry | None = None) -> Iterator[Reader]:
    reader = Reader(backend, retry or Retry(tries=2))
    try:
        yield reader
    finally:
        reader.close()
        backend.close()


def test_a_record_of_any_length_is_read_whole(folder: Place) -> None:
    with reading(folder.open()) as reader:
        for name in (SMALL.name, LARGE.name, SMALL.name):
            assert reader.read(name, len(RECORDS[name])) == RECORDS[name]


def test_what_is_missing_or_of_another_length_is_an_answer(folder: Place) -> None:
    with reading(folder.open()) as reader:
        assert reader.read(chunk_key(IDENTITY, 1).name, 8192) is None
        assert reader.read(SMALL.name, 8192) == Sized(len(RECORDS[SMALL.name]))


@pytest.mark.parametrize("size_bytes", [0, -4096, 5000])
def test_a_length_that_no_record_has_is_refused(folder: Place, size_bytes: int) -> None:
    with reading(folder.open()) as reader, pytest.raises(ValueError, match="not the whole pages of a record"):
        reader.read(SMALL.name, size_bytes)


def test_a_length_that_the_store_does_not_hold_is_refused_before_memory_is_taken(folder: Place) -> None:
    with reading(folder.open()) as reader, pytest.raises(InvalidError, match="max_record_bytes"):
        reader.read(SMALL.name, 1 << 62)


@pytest.mark.parametrize(
    ("action", "raised"),
    [
        (Return(lambda results: []), BreachError),
        (Return(lambda results: [*results, *results]), BreachError),
        (Return(lambda results: None), BreachError),
        (Say(42), BreachError),
        (Say(GetResult(GetStatus.TIMED_OUT)), TimedOutError),
        (Say(GetResult(GetStatus.FAILED)), BackendError),
        (Say(GetResult(GetStatus.CLOSED)), BackendError),
        (Say(GetResult(GetStatus.IN_DOUBT)), BreachError),
    ],
)
def test_an_answer_that_helps_nobody_is_an_error_with_the_name(folder: Place, action: Any, raised: type[Exception]) -> None:
    with reading(FaultyBackend(folder.open(), [Fault("get", action)])) as reader, pytest.raises(raised, match=f"get {SMALL.name}"):
        reader.read(SMALL.name, len(RECORDS[SMALL.name]))


class Watched(BackendWrapper):
    """Remembers the regions that it was told of, and those that gets used."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.registered: list[Region] = []
        self.gone: list[Region] = []
        self.used: list[Region] = []
        self.register_region = self.registered.append
        self.unregister_region = self.gone.append

    def around(self, op: str, items: Any, deadline: Any, proceed: Any) -> Any:
        if op == "get":
            self.used += [buffer.region for get in items for buffer in get.into]
            assert all(region in self.registered and region not in self.gone for region in self.used[-1:])
        return proceed(items)


def test_a_region_is_announced_before_it_is_used_and_taken_back_after(folder: Place) -> None:
    backend = Watched(folder.open())
    with reading(backend) as reader:
        reader.read(SMALL.name, len(RECORDS[SMALL.name]))
        reader.read(LARGE.name, len(RECORDS[LARGE.name]))
        # It grew, so the small one is gone.
        assert (len(backend.registered), len(backend.gone)) == (2, 1)
    assert backend.gone == backend.registered


def test_memory_that_may_still_be_written_is_never_used_again(folder: Place) -> None:
    """The first get is in doubt for good; what is read then lies elsewhere, and nobody takes the old memory back."""
    faulty = FaultyBackend(folder.open(), [Fault("get", InDoubt(None), times=1)])
    backend = Watched(faulty)
    reader = Reader(backend, Retry(timeout_s=0.2, tries=2))
    assert reader.read(SMALL.name, len(RECORDS[SMALL.name])) == RECORDS[SMALL.name]
    doubtful, other = backend.used
    assert doubtful is not other
    assert doubtful not in backend.gone
    # The store writes into it now, and then it is over: on closing it is free.
    faulty.release()
    assert faulty.wait_late(30)
    reader.close()
    assert set(backend.gone) == {doubtful, other}
    backend.close()


def test_a_doubt_that_ends_in_time_costs_no_memory(folder: Place) -> None:
    backend = Watched(FaultyBackend(folder.open(), [Fault("get", InDoubt(0.05), times=1)]))
    with reading(backend, Retry(timeout_s=30.0, tries=2)) as reader:
        assert reader.read(SMALL.name, len(RECORDS[SMALL.name])) == RECORDS[SMALL.name]
        assert len(backend.registered) == 1


def test_memory_in_doubt_stays_mapped_and_there_is_never_much_of_it(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose calls all are in doubt, for good, does not work: that is said, and no more memory is given to it."""
    monkeypatch.setattr("kvstore_sdk.tools.memory._SETTLE_NOW_S", 0.01)
    monkeypatch.setattr("kvstore_sdk.tools.memory._SETTLE_S", 0.1)
    backend = Watched(FaultyBackend(folder.open(), [Fault("get", InDoubt(None))]))
    reader = Reader(backend, Retry(timeout_s=0.2, tries=1))
    said: set[str] = set()
    for _ in range(30):
        with pytest.raises(UnavailableError) as raised:
            reader.read(SMALL.name, len(RECORDS[SMALL.name]))
        said.add(str(raised.value))
    assert any("calls are in doubt" in text for text in said)
    assert 1 < len(backend.registered) < 10
    reader.close()
    assert backend.gone == []
    assert all(region.view[:1] for region in backend.registered), "the store may write into it until the process ends"
    backend.close()


def test_a_manifest_is_read_and_one_that_was_written_again_meanwhile_too(folder: Place) -> None:
    name = manifest_name(IDENTITY.namespace)
    content = IDENTITY.manifest()
    folder.tree.write(name, content)
    with reading(folder.open()) as reader:
        for listed in (len(content), len(content) + 4096):
            found = read_manifest(reader, name, IDENTITY.namespace, listed)
            assert isinstance(found, Manifest)
            assert found.model == "acme/one"
        folder.tree.write(name, content + b" ")
        assert "no whole pages" in str(read_manifest(reader, name, IDENTITY.namespace, len(content)))
        folder.tree.remove(name)
        assert read_manifest(reader, name, IDENTITY.namespace, len(content)) is None


@pytest.mark.parametrize("size_bytes", [0, 100, MAX_MANIFEST_BYTES + 4096])
def test_a_manifest_of_a_length_that_none_has_is_not_read(folder: Place, size_bytes: int) -> None:
    class Blind(BackendWrapper):
        def around(self, op: str, items: Any, deadline: Deadline | None, proceed: Any) -> Any:
            assert op != "get"
            return proceed(items)

    with reading(Blind(folder.open())) as reader:
        assert isinstance(read_manifest(reader, manifest_name(IDENTITY.namespace), IDENTITY.namespace, size_bytes), str)
