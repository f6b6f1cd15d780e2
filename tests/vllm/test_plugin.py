"""How vLLM finds the adapter."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvstore_sdk.vllm
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.plugin import register
from kvstore_sdk.vllm.spec import KVStoreTieringSpec
from kvstore_sdk.vllm.tier import KVStoreTier


def test_the_spec_is_found_by_the_names_of_the_documentation() -> None:
    found = OffloadingSpecFactory.get_spec_cls({"spec_name": "KVStoreTieringSpec", "spec_module_path": "kvstore_sdk.vllm"})
    assert found is KVStoreTieringSpec


def test_the_tier_is_found_with_and_without_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecondaryTierFactory, "_registry", {})
    config = {"type": "kvstore", "module_path": "kvstore_sdk.vllm"}
    assert SecondaryTierFactory.get_tier_class(config) is KVStoreTier
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvstore")
    plugin.load()()
    assert SecondaryTierFactory.get_tier_class({"type": "kvstore"}) is KVStoreTier


def test_registering_again_changes_nothing_and_takes_nobodys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads plugins in each of its processes, some of them twice."""
    monkeypatch.setattr(SecondaryTierFactory, "_registry", {"kvstore": lambda: dict})
    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "kvstore"}) is dict


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvstore_sdk.vllm.nothing  # noqa: B018


def test_a_misspelt_spec_is_answered_with_the_names_that_there_are() -> None:
    """vLLM shows the error of the look-up as it is."""
    with pytest.raises(AttributeError, match="as spec_name there are KVStoreOffloadingSpec, KVStoreTieringSpec"):
        OffloadingSpecFactory.get_spec_cls({"spec_name": "KVStoreOffloadSpec", "spec_module_path": "kvstore_sdk.vllm"})


def test_the_package_is_light() -> None:
    """It is imported in every process of every vLLM on the machine: no engine, no torch, no backend."""
    heavy = {"torch", "vllm", "numpy", "kvstore_sdk_backends"}
    script = f"import sys, kvstore_sdk.vllm, kvstore_sdk.vllm.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_metric_definitions_open_and_import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server asks for them, with a configuration whose backend it may not even have."""
    config = {"type": "kvstore", "backend": "no_such_module:open", "location": "/nonexistent"}
    assert KVStoreTier.build_metric_definitions(config)
    assert KVStoreTieringSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": [config]})


def test_the_sdk_logs_as_vllm_does_unless_somebody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """OBS-05: a warning that nobody sees is none."""
    ours, theirs = logging.getLogger("kvstore_sdk"), logging.getLogger("vllm")
    handler = logging.StreamHandler()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", ours.level)
    compat.borrow_logging()
    assert ours.handlers == [], "pytest has handlers of its own"
    monkeypatch.setattr(ours, "propagate", False)
    compat.borrow_logging()
    assert ours.handlers == [handler]
    assert ours.level == theirs.level
    compat.borrow_logging()
    assert ours.handlers == [handler]


def test_a_vllm_without_tiers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.factory", None)
    register()


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM calls its plugins without a guard: whatever it renames, no engine on the machine may fail to start because of this package."""

    def refuse(*arguments: object) -> None:
        raise ValueError("taken")

    with monkeypatch.context() as patch:
        patch.delattr(SecondaryTierFactory, "_registry")
        patch.setattr(SecondaryTierFactory, "register_tier", refuse)
        register()
    with monkeypatch.context() as patch:
        patch.setattr(SecondaryTierFactory, "_registry", {})
        patch.delattr(SecondaryTierFactory, "register_tier")
        register()
    assert [record.levelname for record in caplog.records if "not registered" in record.getMessage()] == ["WARNING"] * 2
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["vllm.v1.kv_offload.tiering.factory"], "SecondaryTierFactory")
        register()
