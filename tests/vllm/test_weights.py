"""Fingerprints of weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvstore_sdk.vllm import weights
from kvstore_sdk.vllm.weights import digest_files, model_fingerprint

SIZE = 4096


def model(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    given = {"a": torch.zeros(SIZE), "b": torch.ones(3, SIZE)} | tensors
    save_file(given, folder / "model.safetensors")
    return folder


def test_equal_files_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    shutil.copytree(one, tmp_path / "other")
    assert digest_files(one) == digest_files(tmp_path / "other")
    assert digest_files(one).startswith("files:")


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.full((SIZE,), 1e-3)},
        {"b": torch.full((3, SIZE), 2.0)},
        {"c": torch.zeros(1)},
        {"a": torch.zeros(SIZE, dtype=torch.bfloat16)},
    ],
    ids=["one tensor", "another", "one more", "another type"],
)
def test_other_weights_have_other_fingerprints(change: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """KEY-01: a fine-tune keeps every shape, and may touch one layer only."""
    assert digest_files(model(tmp_path / "one")) != digest_files(model(tmp_path / "other", **change))


def test_the_configuration_and_the_names_of_files_count(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    before = digest_files(one)
    (one / "config.json").write_text('{"rope_theta": 1}')
    changed = digest_files(one)
    (one / "model.safetensors").rename(one / "model-00001.safetensors")
    assert len({before, changed, digest_files(one)}) == 3


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_every_byte_of_a_file_of_any_format_counts(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KEY-01: files of several steps of reading, and none."""
    monkeypatch.setattr(weights, "_STEP", 1 << 20)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3_000_000))
    before = digest_files(path)
    data = bytearray(3_000_000)
    data[place] = 1
    path.write_bytes(data)
    changed = digest_files(path)
    path.write_bytes(b"")
    assert len({before, changed, digest_files(path)}) == 3


def fingerprint(model: str, load_format: str = "auto", commit: str | None = "c0ffee", options: Any = None, **fields: Any) -> str:
    loader = SimpleNamespace(load_format=load_format, model_loader_extra_config=options or {})
    return model_fingerprint(SimpleNamespace(model=model, hf_config=SimpleNamespace(_commit_hash=commit), **fields), loader)


def test_where_a_fingerprint_comes_from(tmp_path: Path) -> None:
    """A commit says what came from the hub; a folder here says itself; and what is made up or streamed says nothing."""
    folder = model(tmp_path / "one")
    assert fingerprint("org/model") == "commit:c0ffee"
    assert fingerprint("org/model", commit=None) == ""
    assert fingerprint(str(folder)) == digest_files(folder)
    # The commit is that of the configuration, not of the weights.
    assert fingerprint("org/model", model_weights="s3://bucket/model") == ""
    assert fingerprint("org/model", hf_config_path="org/other") == ""
    assert fingerprint("org/model", "gguf") == ""
    # vLLM puts the configuration of a streamed model in a folder here.
    assert fingerprint(str(folder), model_weights="s3://bucket/model") == ""
    (folder / "model.safetensors").unlink()
    assert fingerprint(str(folder)) == ""


@pytest.mark.parametrize(
    "load_format", ["dummy", "tensorizer", "modelexpress", "ipc_cache", "runai_streamer", "runai_streamer_sharded", "of_a_plugin"]
)
def test_weights_that_may_come_from_anywhere_have_no_fingerprint(load_format: str, tmp_path: Path) -> None:
    """KEY-01: the commit is that of the configuration, and the files that happen to lie in a folder need not be the ones that are read."""
    assert fingerprint("org/model", load_format) == ""
    assert fingerprint(str(model(tmp_path / "one")), load_format) == ""


def test_options_of_the_loader_count() -> None:
    """KEY-01: they can name other weights. They are seen as a digest, since they can hold credentials."""
    seen = {fingerprint("org/model", options=options) for options in (None, {"uri": "s3://a"}, {"uri": "s3://b", "key": "hunter2"})}
    assert len(seen) == 3
    assert not any("hunter2" in found for found in seen)
    assert fingerprint("org/model", commit=None, options={"uri": "s3://a"}) == ""


def test_one_row_of_one_tensor_shows(tmp_path: Path) -> None:
    """KEY-01: a fine-tune may train the embedding of a single token."""
    base = torch.zeros(64, SIZE)
    other = base.clone()
    other[9] = 1.0
    assert digest_files(model(tmp_path / "one", a=base)) != digest_files(model(tmp_path / "two", a=other))
