"""Opening stores of other kinds: options, the probe, what is missing, and what nobody may read."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from scripted_fs import ScriptedFileSystem, Store

from kvstore_sdk.backend import (
    BackendError,
    ConfigError,
    Deadline,
    DeleteStatus,
    GetStatus,
    Mode,
    PutStatus,
    UnavailableError,
    Usage,
    backend_options,
)
from kvstore_sdk_backends.s3.fsspec_client import FileSystemKind
from kvstore_sdk_backends.s3.fsspec_opening import open_abfs, open_fsspec, open_gs
from kvstore_sdk_backends.s3.settings import S3Settings

LIMIT_S = 20.0
NAME = "v1/n/ab/h-g0"
OPENERS = {"gs": open_gs, "abfs": open_abfs}


class GoogleLike(ScriptedFileSystem):
    """Takes the options of a file system by JSON, so its objects are found by the class."""

    shared_store: Store
    _session: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(store=self.shared_store, **options)


class AzureLike(GoogleLike):
    credential = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.service_client = types.SimpleNamespace(close=self._close)
        # As adlfs does: at the end of the interpreter, on a loop that is gone by then.
        weakref.finalize(self, print, self)

    async def _close(self) -> None:
        await self.shared.end(self)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Store:
    """What the packages, replaced by ours, hold."""
    made = Store()
    monkeypatch.setattr(GoogleLike, "shared_store", made, raising=False)
    for module, name, cls in (
        ("gcsfs", "", None),
        ("gcsfs.core", "GCSFileSystem", GoogleLike),
        ("adlfs", "AzureBlobFileSystem", AzureLike),
    ):
        found = types.ModuleType(module)
        if cls is not None:
            setattr(found, name, cls)
        monkeypatch.setitem(sys.modules, module, found)
    return made


@pytest.fixture(params=OPENERS)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def open_it(scheme: str) -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []

    def opening(location: str = "buck/kv", **options: Any) -> Any:
        opened.append(OPENERS[scheme](location, **options))
        return opened[-1]

    yield opening
    for backend in opened:
        backend.close()


def threads() -> set[str]:
    """Without those that look a name up, which end by themselves."""
    return {name for thread in threading.enumerate() if not (name := thread.name).endswith("-resolver")}


def test_a_store_behind_any_file_system_keeps_the_contract(s3_server: S3Server, bucket: str, desk: Any) -> None:
    import s3fs

    async def end(fs: Any) -> None:
        await fs._s3creator.__aexit__(None, None, None)

    given = {
        "key": ACCESS_KEY_ID,
        "secret": SECRET_ACCESS_KEY,
        "endpoint_url": s3_server.endpoint,
        "client_kwargs": {"region_name": REGION},
    }
    kind = FileSystemKind("any", "s3fs", s3fs.S3FileSystem, end)
    backend = open_fsspec(kind, f"{bucket}/kv", json.dumps(given), S3Settings(concurrency=4, retries=1))
    try:
        limit = Deadline.after(LIMIT_S)
        record, other = b"r" * 70_001, b"o" * 70_001
        assert desk.get(backend, NAME, 9)[0].status is GetStatus.MISSING
        assert desk.put(backend, NAME, record).status is PutStatus.STORED
        assert desk.put(backend, NAME, other).status is PutStatus.EXISTS
        assert s3_server.objects(bucket) == {f"kv/{NAME}": record}
        result, got = desk.get(backend, NAME, len(record))
        assert (result.status, got) == (GetStatus.FOUND, record)
        wrong, _ = desk.get(backend, NAME, 9)
        assert (wrong.status, wrong.size_bytes, wrong.asked_bytes) == (GetStatus.WRONG_SIZE, len(record), 9)
        assert desk.put(backend, NAME, other, Mode.REPLACE).status is PutStatus.STORED
        assert desk.get(backend, NAME, len(other))[1] == other
        assert backend.exists([NAME, "v1/none"], limit) == [True, False]
        assert [entry.name for entry in backend.list("", limit).entries] == [NAME]
        assert backend.usage(limit) == Usage(1, len(other))
        assert backend.delete([NAME, "v1/none"], limit) == [DeleteStatus.DELETED, DeleteStatus.ABSENT]
        assert SECRET_ACCESS_KEY not in repr(backend)
    finally:
        backend.close()


def test_opening_asks_for_options_and_warns_once_that_this_is_experimental(
    objects: Store, open_it: Callable[..., Any], scheme: str, caplog: pytest.LogCaptureFixture, desk: Any
) -> None:
    with caplog.at_level(logging.DEBUG):
        backend = open_it(storage_options='{"project": "mine", "token": "hidden-token"}')
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == [f"{scheme}://buck/kv: the backend {scheme} is experimental: no release was tried on a real store of this kind"]
    [fs] = objects.made
    assert fs.options.pop("loop").is_running()
    assert fs.options == {"asynchronous": True, "use_listings_cache": False, "project": "mine", "token": "hidden-token"}
    assert objects.objects == {}
    assert desk.put(backend, NAME, b"r").status is PutStatus.STORED
    assert objects.objects == {f"buck/kv/{NAME}": b"r"}
    assert "hidden-token" not in caplog.text + repr(backend)


def test_closing_leaves_no_thread_and_no_file_system_for_the_interpreters_end(objects: Store, scheme: str) -> None:
    before = threads()
    backend = OPENERS[scheme]("buck")
    assert threads() - before == {f"kvstore-{scheme}"}
    backend.close()
    assert threads() == before
    left = [found for finalizer in list(weakref.finalize._registry) if (found := finalizer.peek()) is not None]  # type: ignore[attr-defined]
    assert not any(isinstance(found[0], GoogleLike) for found in left)
    if scheme == "abfs":
        assert objects.ended == objects.made


def test_a_store_that_heeds_no_condition_is_looked_at_first(
    objects: Store, open_it: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, desk: Any
) -> None:
    async def pipe(self: Any, path: str, value: bytes, **_: Any) -> None:
        self.shared.objects[path] = value

    monkeypatch.setattr(GoogleLike, "_pipe_file", pipe)
    backend = open_it()
    assert desk.put(backend, NAME, b"old").status is PutStatus.STORED
    assert desk.put(backend, NAME, b"new").status is PutStatus.EXISTS
    assert objects.objects == {f"buck/kv/{NAME}": b"old"}


def test_a_store_opened_to_read_is_not_written(objects: Store, open_it: Callable[..., Any], desk: Any) -> None:
    objects.faults = [("pipe", AssertionError("written"))]
    backend = open_it(read_only=True)
    assert desk.put(backend, NAME, b"r").status is PutStatus.FAILED
    assert objects.faults


@pytest.mark.parametrize(
    ("verb", "fault", "kind", "said"),
    [
        ("pipe", PermissionError("hidden-token"), ConfigError, "check the credentials in storage_options"),
        ("pipe", FileNotFoundError("hidden-token"), ConfigError, "is the bucket or container there?"),
        ("cat", RuntimeError("hidden-token"), UnavailableError, "get buck/kv/.kvstore-probe-"),
        ("rm", PermissionError("hidden-token"), ConfigError, "delete buck/kv/.kvstore-probe-"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_in_one_line_and_nothing_is_left(
    objects: Store, open_it: Callable[..., Any], verb: str, fault: Exception, kind: type[Exception], said: str
) -> None:
    before = threads()
    objects.faults = [(verb, fault)]
    with pytest.raises(kind) as caught:
        open_it()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hidden-token" not in str(caught.value)
    assert threads() == before
    if verb != "rm":
        assert objects.objects == {}


def test_a_body_that_is_not_what_was_stored_is_refused_at_opening(objects: Store, open_it: Callable[..., Any]) -> None:
    objects.cut = 999
    with pytest.raises(BackendError, match="999 bytes came of an object of 1000"):
        open_it()
    assert objects.objects == {}


@pytest.mark.parametrize(("given", "package"), [("gs", "gcsfs"), ("abfs", "adlfs")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, given: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"backend {given}: backend: needs {package} \(.*\); pip install {package}"):
        OPENERS[given]("buck")


@pytest.mark.parametrize(
    ("location", "options", "said"),
    [
        ("buck", {"max_bytes": 1 << 30}, "max_bytes: its writers cannot keep a bucket below a size; .* lifecycle rule, or .* prune"),
        ("buck", {"storage_options": '{"token": hidden-token'}, r"storage_options: is no JSON \(line 1, column 11\)"),
        ("buck", {"storage_options": '"hidden-token"'}, "storage_options: is no JSON object"),
        ("buck", {"storage_options": '{"use_listings_cache": true}'}, "storage_options: use_listings_cache is set by the backend"),
        ("b", {}, "location: 'b' is no name of a bucket"),
        ("buck/a@b", {}, "location: 'a@b' is no prefix that can be used"),
        ("buck/../x", {}, "location: .* is no prefix"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    objects: Store, open_it: Callable[..., Any], location: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_it(location, **options)
    assert "hidden-token" not in str(caught.value)
    assert (objects.made, objects.calls) == ([], 0)


def test_the_options_are_few_and_storage_options_is_a_secret(scheme: str) -> None:
    found = backend_options(f"kvstore_sdk_backends.s3:open_{scheme}")
    assert set(found) == {
        "storage_options",
        "concurrency",
        "request_timeout_s",
        "request_retries",
        "read_only",
        "max_record_bytes",
        "max_bytes",
    }
    assert found["storage_options"].secret
    assert all(option.help for option in found.values())
