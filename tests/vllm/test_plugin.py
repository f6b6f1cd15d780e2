"""How vLLM finds the adapter."""

from __future__ import annotations

import logging
import os
import re
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "[]"


def test_metric_definitions_open_and_import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server asks for them, with a configuration whose backend it may not even have."""
    config = {"type": "kvstore", "backend": "no_such_module:open", "location": "/nonexistent"}
    assert KVStoreTier.build_metric_definitions(config)
    assert KVStoreTieringSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": [config]})


LINES = """
import logging
PACKAGES = ("kvstore_sdk", "kvstore_sdk_backends")
{before}
import vllm.logger
if not logging.getLogger("vllm").handlers:
    # From 0.32 on the engine says when; before, it was by the import.
    vllm.logger._configure_vllm_root_logger()
from kvstore_sdk.vllm import compat
import kvstore_sdk_backends.memory
assert not any(logging.getLogger(package).handlers for package in PACKAGES), "imports alone set up nothing"
compat.borrow_logging()
compat.borrow_logging()
{after}
for package in PACKAGES:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(package + ".part").log(level, "said by %s at %d", package, level)
"""


def lines_of(before: str = "", after: str = "") -> list[str]:
    """What both packages log in a process that vLLM set up, after `before`."""
    script = LINES.format(before=before, after=after)
    environment = {name: value for name, value in os.environ.items() if "LOGGING" not in name}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True, env=environment)
    return [line for line in (done.stdout + done.stderr).splitlines() if "said by" in line]


def test_both_packages_log_as_vllm_does() -> None:
    """OBS-05: a line that nobody sees is none. Once each, with time, level and process, and from the level on that vLLM shows."""
    lines = lines_of()
    assert [line.partition("said by ")[2] for line in lines] == [
        f"{package} at {level}" for package in ("kvstore_sdk", "kvstore_sdk_backends") for level in (logging.INFO, logging.WARNING)
    ]
    assert all(
        re.match(rf"(\(.+\) )?{level} \d\d-\d\d \d\d:\d\d:\d\d \[", line)
        for line, level in zip(lines, ["INFO", "WARNING"] * 2, strict=True)
    )


def test_no_line_comes_twice_when_the_root_logger_is_set_up_later() -> None:
    lines = lines_of(after="logging.basicConfig(level=logging.INFO)")
    assert len(lines) == len({line.partition("said by ")[2] for line in lines}) == 4


@pytest.mark.parametrize("package", ["kvstore_sdk", "kvstore_sdk_backends"])
def test_loggers_that_the_operator_set_up_are_left_alone(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger(package), logging.getLogger("vllm")
    both = [logging.getLogger(name) for name in ("kvstore_sdk", "kvstore_sdk_backends")]
    monkeypatch.setattr(theirs, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name, value in {"handlers": [logging.NullHandler()], "level": logging.ERROR, "propagate": False}.items():
        with monkeypatch.context() as patch:
            for each, default in {"handlers": [], "level": logging.NOTSET, "propagate": True}.items():
                for logger in both:
                    # The other one borrows, and gives back at the end.
                    patch.setattr(logger, each, value if each == name and logger is ours else default)
            compat.borrow_logging()
            assert getattr(ours, name) == value
    for logger in both:
        # Loggers remember what they may say: they are told that it is over.
        logger.setLevel(logger.level)


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
