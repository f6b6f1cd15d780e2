"""`kvstore backends` shows what a configuration may hold, as the code has it."""

from __future__ import annotations

import types
from importlib.metadata import EntryPoint
from typing import Annotated, Literal

import pytest

from kvstore_sdk.backend import Bounds, backend_options, registered_backends
from kvstore_sdk.backend.options import options_of
from kvstore_sdk.cli import backends, main
from kvstore_sdk.tier import TierSettings
from kvstore_sdk.vllm.options import AdapterOptions


def test_every_option_of_every_backend_and_of_the_tier_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in registered_backends():
        assert any(name in line.partition("(")[0] for line in lines if not line.startswith(" "))
    for options in (*map(backend_options, registered_backends()), options_of(TierSettings)):
        for option in options.values():
            assert any(line.split()[:1] == [option.name] and option.help in line for line in lines), option.name


@pytest.mark.parametrize("name", registered_backends())
def test_an_entry_can_set_every_option_of_a_backend_and_of_the_tier(name: str) -> None:
    """They stand side by side in it."""
    assert not backend_options(name).keys() & (options_of(TierSettings).keys() | options_of(AdapterOptions).keys())


def test_one_backend_is_shown_with_types_units_and_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def open_store(
        location: str,
        *,
        bucket: Annotated[str, "where to"],
        io_threads: Annotated[int, Bounds(ge=1), "at the same time"] = 4,
        max_bytes: int | None = None,
        part_bytes: int = 8 << 20,
        rate_bytes_per_s: float = 50e6,
        connect_timeout_s: float = 2.5,
        style: Literal["path", "host"] = "path",
        verify: bool = True,
        secret_key: str = "hunter2",
    ) -> object: ...

    module = types.ModuleType("acme_store")
    module.open_store = open_store  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "acme_store", module)
    assert main(["backends", "acme_store:open_store"]) == 0
    printed = capsys.readouterr().out
    assert [" ".join(line.split()) for line in printed.splitlines()[1:-1]] == [
        "bucket string required where to",
        "io_threads whole number default 4 at the same time",
        "max_bytes bytes or none default none",
        "part_bytes bytes default 8MiB",
        "rate_bytes_per_s bytes per second default 50MB",
        "connect_timeout_s seconds default 2.5",
        "style path|host default path",
        "verify true|false default true",
        "secret_key string default ***",
    ]


def test_a_backend_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = EntryPoint("broken", "no_such_module:open_store", "kvstore_sdk.backends")
    everything = {**registered_backends(), "broken": broken}
    monkeypatch.setattr(backends, "registered_backends", lambda: everything)
    monkeypatch.setattr("kvstore_sdk.backend.registry.entry_points", lambda group: [*everything.values()])
    assert main(["backends"]) == 0
    printed = capsys.readouterr().out
    assert "cannot be used: module 'no_such_module' cannot be imported" in printed
    assert "kvstore_sdk_backends.memory:open_memory" in printed
