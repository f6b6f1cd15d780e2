"""From a name, a URL or `module:factory` to an open backend; every mistake is one ConfigError that names its field."""

from __future__ import annotations

import errno
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    ConfigError,
    DeniedError,
    TimedOutError,
    UnavailableError,
    backend_options,
    open_backend,
    registered_backends,
)
from kvstore_sdk.backend import registry as registry_module
from kvstore_sdk_backends.fs import FsBackend
from kvstore_sdk_backends.memory import MemoryBackend, open_memory

GROUP = registry_module.ENTRY_POINT_GROUP


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A vendor's module `acme_kv` with a factory that says what it was called with."""
    module = types.ModuleType("acme_kv")
    module.calls = []  # type: ignore[attr-defined]

    def open_acme(location: str, *, tries: int = 1, timeout_s: float = 1.0) -> Backend:
        module.calls.append((location, tries, timeout_s))
        return open_memory("")

    module.open_acme = open_acme  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_kv", module)
    return module


def opened(target: str, **kwargs: Any) -> Backend:
    backend = open_backend(target, **kwargs)
    backend.close()
    return backend


def test_the_built_in_backends_are_registered_under_their_url_schemes() -> None:
    known = registered_backends()
    assert {"file", "fs", "memory"} <= set(known)
    assert "read_only" in backend_options("fs")
    assert backend_options("file") == backend_options("fs")


def test_a_name_with_a_location(tmp_path: Path) -> None:
    assert isinstance(opened("fs", location=str(tmp_path / "kv")), FsBackend)
    assert isinstance(opened("memory", location=""), MemoryBackend)


def test_a_url_carries_location_and_options(tmp_path: Path) -> None:
    folder = tmp_path / "a folder%"
    quoted = str(folder).replace("%", "%25").replace(" ", "%20")
    backend = opened(f"file://{quoted}?max_record_bytes=1MiB&direct_io=never")
    assert backend.capabilities.max_record_bytes == 1 << 20
    assert folder.is_dir()
    assert isinstance(opened("memory:"), MemoryBackend)
    assert isinstance(opened("memory:shared-name"), MemoryBackend)


def test_a_urls_options_and_given_ones_are_joined(tmp_path: Path) -> None:
    backend = opened(f"fs:{tmp_path}/kv?direct_io=never", options={"max_record_bytes": 4096})
    assert backend.capabilities.max_record_bytes == 4096


def test_module_and_factory(vendor: Any) -> None:
    opened("acme_kv:open_acme", location="here", options={"tries": "3"})
    assert vendor.calls == [("here", 3, 1.0)]


@pytest.mark.parametrize(
    ("target", "kwargs", "field", "says"),
    [
        ("nothing", {"location": "x"}, "backend", "installed are"),
        ("ftp://host/x", {}, "backend", "installed are"),
        ("fs", {}, "location", "must be given"),
        ("file:///x", {"location": "/y"}, "location", "given twice"),
        ("file:///x?direct_io=never", {"options": {"direct_io": "auto"}}, "direct_io", "given twice"),
        ("file:///x?direct_io=never&direct_io=auto", {}, "direct_io", "given twice"),
        ("file:///x?colour=red", {}, "colour", "unknown option"),
        ("file:///x?capacity=1GiB", {}, "capacity", "unknown option"),
        ("file:///x?io_threads=4", {}, "io_threads", "stand in its entry, beside the URL"),
        ("file:///x?codec=zstd", {}, "codec", "outside this SDK"),
        ("file:///x#there", {}, "location", "%23"),
        ("file://user:hunter2@host/x", {}, "location", "password"),
        ("file://[::1/x", {}, "location", "is no URL"),
        ("no_such_module_anywhere:open", {"location": ""}, "backend", "cannot be imported"),
        ("acme_kv:no_such_factory", {"location": ""}, "backend", "has no factory"),
        ("acme_kv:calls", {"location": ""}, "backend", "has no factory"),
        ("acme_kv:open_acme", {"location": "", "options": {"trys": 1}}, "trys", "tries"),
    ],
)
def test_a_mistake_is_one_error_that_names_its_field(vendor: Any, target: str, kwargs: Any, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend(target, **kwargs)
    assert caught.value.field == field
    assert says in caught.value.problem
    assert "hunter2" not in str(caught.value)
    assert vendor.calls == []


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("acme://user:hunter2@host/x?token=hunter2", "backend acme: "),
        ("acme://host/x#secret=hunter2", "backend acme: "),
        ("acme:secret_token=hunter2", "backend acme: "),
        ("my_acme:hunter2@host/x", "backend my_acme: "),
        ("acme?token=hunter2", "backend acme: "),
        ("token=hunter2", "backend token: "),
        ("://hunter2", "backend without a name: "),
        ("file://user:hunter2\u2100@host/x", "backend file: location: is no URL"),
        ("file:///x#secret=hunter2", "backend file: "),
        ("file:///x?secret_key=hunter2", "backend file: secret_key: "),
    ],
)
def test_a_refused_url_shows_no_secret(target: str, shown: str) -> None:
    """Of what is not known, only the name that was looked for is shown."""
    with pytest.raises(ConfigError) as caught:
        open_backend(target)
    assert str(caught.value).startswith(shown)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("target", ["file:///tmp/x", "memory:", "acme_kv:open_acme"])
def test_nothing_is_opened_when_an_option_is_wrong(vendor: Any, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the factory was called")

    monkeypatch.setattr(vendor, "open_acme", lambda location, *, tries=1: refuse())
    monkeypatch.setattr("kvstore_sdk_backends.fs.open_fs", lambda location, *, tries=1: refuse())
    monkeypatch.setattr("kvstore_sdk_backends.memory.open_memory", lambda location, *, tries=1: refuse())
    kwargs: Any = {} if "/" in target or target == "memory:" else {"location": ""}
    with pytest.raises(ConfigError):
        open_backend(target, {"tries": "many", "other": 1}, **kwargs)


def entry_points(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    made = [EntryPoint(name, value, GROUP) for name, value in points]
    monkeypatch.setattr(registry_module, "entry_points", lambda group, name=None: [point for point in made if name in (None, point.name)])


def test_a_package_that_fails_to_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "acme_needy.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry_points(monkeypatch, ("broken", "acme_broken:open"), ("needy", "acme_needy:open"), ("odd", "acme_odd"))
    with pytest.raises(ConfigError, match=r"backend broken: .*acme_broken.*RuntimeError \(no licence\)"):
        open_backend("broken", location="")
    with pytest.raises(ConfigError, match=r"backend needy: .*'acme_needy' imports 'not_installed_anywhere'.*install what it needs"):
        open_backend("needy", location="")
    with pytest.raises(ConfigError, match="backend odd: backend: "):
        open_backend("odd", location="")


def test_a_factory_in_a_module_called_like_its_backend_is_no_url_when_it_has_a_location(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "from kvstore_sdk_backends.memory import open_memory\n\n\ndef open_it(location):\n    return open_memory(location)\n"
    (tmp_path / "acmekv.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry_points(monkeypatch, ("acmekv", "acmekv:open_it"))
    for target, location in (("acmekv:open_it", "one"), ("acmekv:one", None), ("acmekv", "one")):
        open_backend(target, location=location).close()
    with pytest.raises(ConfigError, match="given twice"):
        open_backend("acmekv://one", location="two")


def test_an_entry_point_may_name_extras(monkeypatch: pytest.MonkeyPatch, vendor: Any) -> None:
    entry_points(monkeypatch, ("acme", "acme_kv:open_acme [fast]"))
    opened("acme", location="there")
    assert vendor.calls == [("there", 1, 1.0)]


def test_two_packages_with_one_name_are_refused_rather_than_chosen_by_chance(monkeypatch: pytest.MonkeyPatch, vendor: Any) -> None:
    entry_points(monkeypatch, ("acme", "acme_kv:open_acme"), ("acme", "other_kv:open"))
    with pytest.raises(ConfigError, match="registered by two packages"):
        open_backend("acme", location="")
    entry_points(monkeypatch, ("acme", "acme_kv:open_acme"), ("acme", "acme_kv:open_acme"))
    opened("acme", location="")


def test_annotations_that_mean_nothing_are_the_vendors_fault(vendor: Any) -> None:
    def factory(location: str, *, size: Any = 1) -> Backend:
        return open_memory("")

    factory.__annotations__["size"] = "NotDefinedAnywhere"
    vendor.open_acme = factory
    with pytest.raises(ConfigError, match="NotDefinedAnywhere"):
        backend_options("acme_kv:open_acme")


class WithoutGet:
    capabilities = open_memory("").capabilities
    exists = put = close = print


class WithoutCapabilities:
    exists = put = get = close = print


@pytest.mark.parametrize(
    ("made", "says"), [(WithoutGet(), "lacks get"), (WithoutCapabilities(), "capabilities"), (None, "lacks exists, put, get, close")]
)
def test_what_a_factory_returns_must_be_a_backend(vendor: Any, made: object, says: str) -> None:
    vendor.open_acme = lambda location: made
    with pytest.raises(ConfigError, match=says):
        open_backend("acme_kv:open_acme", location="")


def test_a_coroutine_function_is_no_factory(vendor: Any) -> None:
    async def factory(location: str) -> Backend:
        return open_memory("")

    vendor.open_acme = factory
    with pytest.raises(ConfigError, match="coroutine"):
        open_backend("acme_kv:open_acme", location="")


def test_a_factorys_own_error_comes_through(vendor: Any) -> None:
    def factory(location: str) -> Backend:
        raise UnavailableError("acme open: no route to host")

    vendor.open_acme = factory
    with pytest.raises(UnavailableError, match="no route"):
        open_backend("acme_kv:open_acme", location="")


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (RuntimeError("no licence for hunter2"), BackendError, "open: the factory raised RuntimeError (no licence for ***)"),
        (KeyError("region"), BackendError, "open: the factory raised KeyError ('region')"),
        (TimeoutError("no answer"), TimedOutError, "backend acme_kv:open_acme: open: TimeoutError (no answer)"),
        (PermissionError(errno.EACCES, "Permission denied"), DeniedError, "EACCES (Permission denied)"),
    ],
)
def test_whatever_else_a_factory_raises_is_one_error_of_ours(vendor: Any, raised: Exception, kind: type[BackendError], says: str) -> None:
    """A start-up ends with one line that names the backend, without the secrets it was given."""

    def factory(location: str, *, secret_key: str = "") -> Backend:
        raise raised

    vendor.open_acme = factory
    with pytest.raises(kind) as caught:
        open_backend("acme_kv:open_acme", {"secret_key": "hunter2"}, location="")
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is raised
