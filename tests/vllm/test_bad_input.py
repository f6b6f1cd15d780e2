"""Every wrong configuration gets one error that names the field and the fix, before anything is written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm_faulty import faulty_entry
from vllm_stand import Stand

from kvstore_sdk.backend import BackendError, Capabilities, ConfigError
from kvstore_sdk.backend.options import options_of
from kvstore_sdk.vllm import compat, options
from kvstore_sdk.vllm.options import parse_tier_options

MakeStand = Callable[..., Stand]


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder), **options}


def in_shared_memory() -> set[str]:
    """What stands of this process have there; other engines of the machine come and go."""
    return {name for name in os.listdir("/dev/shm") if f"vllm_offload_kvstore-test-{os.getpid()}-" in name}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "floppy"}, ["floppy", "backend", "fs", "memory"]),
        ({"backend": None}, ["backend", "must be given", "fs"]),
        ({"backend": 7}, ["backend", "must be given"]),
        ({"backend": "no_such_module:open"}, ["no_such_module", "cannot be imported"]),
        ({"backend": "vllm_faulty:close_faulty"}, ["vllm_faulty", "has no factory", "close_faulty"]),
        ({"location": None}, ["location", "must be given"]),
        ({"location": 7}, ["location", "is not a string but of type int"]),
        ({"location": "kv"}, ["location", "'kv'", "absolute path"]),
        ({"io_treads": 4}, ["io_treads", "unknown option", "io_threads", "direct_io", "tenant_salt", "lora_digests"]),
        ({"compression": "zstd"}, ["compression", "outside this SDK"]),
        ({"encryption_key": "hunter2"}, ["encryption_key", "outside this SDK"]),
        ({"io_threads": "many"}, ["io_threads", "'many'", "whole number"]),
        ({"io_threads": 0}, ["io_threads", "0", "out of bounds"]),
        ({"load_timeout_s": "3 parsecs"}, ["load_timeout_s", "seconds"]),
        ({"direct_io": "sometimes"}, ["direct_io", "sometimes", "auto", "never"]),
        ({"may_store": "perhaps"}, ["may_store", "true or false"]),
        ({"locality": "NEARBY"}, ["locality", "LOCAL", "REMOTE"]),
        ({"lora_digests": ["a"]}, ["lora_digests", "table"]),
        ({"lora_digests": {"a": 1}}, ["lora_digests", "table"]),
        ({"staging_bytes": 8192}, ["staging_bytes", "8192", "two slots"]),
        ({"max_record_bytes": 4096}, ["max_record_bytes", "4096", "this model's chunks need"]),
        ({"backend": "fs:///somewhere/else", "location": "/elsewhere"}, ["location", "twice"]),
    ],
    ids=lambda value: "-".join(f"{name}={value[name]}" for name in value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], words: list[str], stand: MakeStand, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    before = in_shared_memory()
    wrong = {name: value for name, value in (entry(folder) | options).items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        stand([wrong])
    for word in words:
        assert word in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert in_shared_memory() == before


def test_an_option_that_two_parts_claim_is_refused(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_faulty

    def open_greedy(location: str, *, io_threads: int = 1) -> Any:
        raise AssertionError("must not be opened")

    monkeypatch.setattr(vllm_faulty, "open_greedy", open_greedy, raising=False)
    with pytest.raises(ConfigError, match=r"io_threads: is an option of the tier and of backend vllm_faulty:open_greedy"):
        stand([entry(tmp_path / "kv", backend="vllm_faulty:open_greedy", io_threads=2)])


def test_no_error_and_no_repr_shows_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that tells people to use the URL must not print the URL."""
    import vllm_faulty

    def open_greedy(location: str, *, retries: int = 1, secret_key: str = "") -> Any:
        raise AssertionError("must not be opened")

    monkeypatch.setattr(vllm_faulty, "open_greedy", open_greedy, raising=False)
    target = "vllm_faulty:open_greedy"
    monkeypatch.setattr(options, "backend_options", lambda backend: options_of(open_greedy))
    wrong = [
        {"backend": "vend://host/x?secret_key=hunter2", "retries": 3},
        {"backend": "vend:secret=hunter2", "retries": 3},
        {"backend": "vend://me:hunter2@host/x", "retries": 3},
        {"backend": target, "location": {"secret": "hunter2"}},
        {"backend": target, "tenant_salt": ["hunter2"]},
        {"backend": target, "lora_digests": {"a": ["hunter2"]}},
        {"backend": target, "no_such_option": "hunter2"},
    ]
    for entry_ in wrong:
        with pytest.raises(ConfigError) as refused:
            parse_tier_options("tier", entry_)
        assert "hunter2" not in str(refused.value)
    right = {"backend": "vend://host/x?secret_key=hunter2", "location": "hunter2", "secret_key": "hunter2", "tenant_salt": "hunter2"}
    parsed = parse_tier_options("tier", right)
    assert "hunter2" not in repr(parsed)
    assert parsed.shown == "vend"


def test_a_path_that_is_a_file_is_refused(stand: MakeStand, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"location: .*is not a folder"):
        stand([entry(path)])
    assert path.read_text() == "mine"


def test_a_folder_of_another_format_version_is_refused(stand: MakeStand, tmp_path: Path) -> None:
    stand([entry(tmp_path / "kv")]).close()
    marker = tmp_path / "kv" / ".kvstore" / "format.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"version": 99}))
    before = sorted(path.name for path in (tmp_path / "kv").rglob("*"))
    with pytest.raises(ConfigError, match=r"location: .*version 99"):
        stand([entry(tmp_path / "kv")])
    assert sorted(path.name for path in (tmp_path / "kv").rglob("*")) == before


def test_a_folder_without_permission_is_refused(stand: MakeStand, tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    with pytest.raises((ConfigError, BackendError), match=r"locked.*(EACCES|permission)"):
        stand([entry(locked / "kv", backend="vllm_faulty:open_as_nobody")])
    locked.chmod(0o700)
    assert list(locked.iterdir()) == []


def test_a_chunk_larger_than_the_largest_record_is_refused(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backend says so itself, and not an option of it."""
    from vllm_faulty import OPENED

    folder = tmp_path / "kv"
    small = Capabilities(max_record_bytes=4096)
    monkeypatch.setattr("kvstore_sdk.testing.FaultyBackend.capabilities", property(lambda self: small))
    with pytest.raises(ConfigError, match=r"max_record_bytes: .*4096"):
        stand([faulty_entry(folder)])
    assert [event.op for event in OPENED[str(folder)].log] == ["close"]
    assert not (folder / "v1").exists()


@pytest.mark.parametrize("version", ["0.23.1", "0.34.0", "1.0.0"])
def test_vllm_outside_the_range_is_refused(version: str, stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError, match=rf"vllm: version {version} .*0\.24 to 0\.33"):
        stand([entry(tmp_path / "kv")])
    assert list(tmp_path.iterdir()) == []


def test_a_build_from_source_is_told_by_its_features(stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "dev")
    stand([entry(tmp_path / "kv")])
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    monkeypatch.setattr(SecondaryTierManager, "__abstractmethods__", frozenset({"lookup"}))
    with pytest.raises(ConfigError, match=r"vllm: version dev cannot reset a tier"):
        compat.check_version()


def test_an_unresolved_kv_type_is_refused(stand: MakeStand, tmp_path: Path) -> None:
    """KEY-05: under vLLM's own spec `auto` is all that can be seen in 0.26 and before."""
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    def unresolved(self: Stand, rank: int) -> Any:
        import dataclasses

        config = resolved(self, rank)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="auto"))

    resolved = Stand._offloading_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stand, "_offloading_config", unresolved)
        with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'auto' .*KVStoreTieringSpec"):
            stand([entry(tmp_path / "kv")], ranks=1, groups=1, blocks_per_chunk=1, workers=False, spec_class=TieringOffloadingSpec)
        # Our own spec asks the worker, which knows.
        made = stand([entry(tmp_path / "kv")])
        assert made.adapter._tier.identity.kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__nnodes": 2}, "nnodes: 2 machines"),
        ({"extra": {"cpu_bytes_to_use": 4096}}, "cpu_bytes_to_use: 4096 bytes hold no chunk: one takes 8192"),
        ({"extra": {"canonical_layout": True}}, "canonical_layout"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(changes: dict[str, Any], words: str, stand: MakeStand, tmp_path: Path) -> None:
    """TOP-07 and others."""
    before = in_shared_memory()
    with pytest.raises(Exception, match=words):  # vLLM refuses some of them itself, with a bare Exception.
        stand([entry(tmp_path / "kv")], **changes)
    assert list(tmp_path.iterdir()) == []
    leftover = in_shared_memory() - before
    for name in leftover:
        # Made by a worker that then refused to start: the next engine to start removes it.
        os.unlink(f"/dev/shm/{name}")


def test_a_region_larger_than_the_room_for_it_is_refused_before_it_is_made(
    stand: MakeStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CFG-10: vLLM before 0.30 maps it nevertheless, and dies at a write later on."""
    before = in_shared_memory()
    asked: list[str] = []

    def nearly_full(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(f_bavail=5, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(
        ConfigError, match=r"cpu_bytes_to_use: the region /dev/shm/vllm_offload_\S+ needs 49152 bytes, /dev/shm has 20480 free"
    ):
        stand([entry(tmp_path / "kv")])
    assert asked == ["/dev/shm"]
    assert in_shared_memory() == before
    assert list(tmp_path.iterdir()) == []


def test_a_keyword_of_a_later_factory_is_no_reason_to_fail(stand: MakeStand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """API-01: None is ignored, anything else is ignored with one warning; a misspelt option of the operator is neither."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    create = SecondaryTierFactory.create_secondary_tier

    def later(config: dict[str, Any], view: memoryview, spec: Any) -> Any:
        tier_class = SecondaryTierFactory.get_tier_class(config)
        passed = {name: value for name, value in config.items() if name != "type"}
        return tier_class(offloading_spec=spec, primary_kv_view=view, tier_type="kvstore", future=None, future_too="x", **passed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecondaryTierFactory, "create_secondary_tier", later)
        stand([entry(tmp_path / "kv")])
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [line for line in warnings if "future" in line] == [
            "kvstore tier: vLLM passes future_too='x', which this version does not know; it is ignored"
        ]
        with pytest.raises(ConfigError, match="misspelt"):
            stand([entry(tmp_path / "kv", misspelt=None)])
    assert SecondaryTierFactory.create_secondary_tier == create
