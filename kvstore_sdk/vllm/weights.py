"""What tells the weights of one model from those of another of the same name and shape."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["digest_files", "model_fingerprint"]

logger = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_STEP = 4 << 20
_WORTH_SAYING_BYTES = 8 << 30
_FROM_FILES = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor", "gguf")
"""Load formats whose weights are the files of the model's folder or repository. Any other may take them from anywhere."""


def model_fingerprint(model_config: Any, load_config: Any) -> str:
    """A fingerprint of the weights of a model, or nothing when none can be had.

    A commit of the hub where the weights came from there; for a folder or a file on this machine `digest_files`. The options of the loader
    are in it. Weights made up on the spot (`load_format: dummy`), streamed from elsewhere, or read by a loader that is not known here have
    none.
    """
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    # vLLM sets `model_weights` where `model` is a folder with the configuration alone.
    if load_format not in _FROM_FILES or getattr(model_config, "model_weights", None):
        return ""
    model = str(model_config.model)
    if os.path.exists(model):
        found = digest_files(Path(model))
    elif getattr(model_config, "hf_config_path", None) or load_format == "gguf":
        # The commit would be that of the configuration, not of the weights.
        found = ""
    else:
        commit = getattr(model_config.hf_config, "_commit_hash", None)
        found = f"commit:{commit}" if commit else ""
    options = getattr(load_config, "model_loader_extra_config", None)
    if found and options:
        given = json.dumps(options, sort_keys=True, default=str).encode()
        found += f" loader:{hashlib.sha256(given).hexdigest()[:32]}"
    return found


def digest_files(model: Path) -> str:
    """Digest the weight files of a folder, or one weight file; nothing when there are none.

    The configuration, and of each weight file name, size and every byte: a fine-tune may change one row of one tensor. It reads what the
    engine has just loaded, some seconds for ten gigabytes; `weights_version` spares it.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        return ""
    size = sum(path.stat().st_size for path in files)
    if size > _WORTH_SAYING_BYTES:
        logger.info("kvstore tier: reading %.0f GB of weights to tell them from others; weights_version spares it", size / 1e9)
    digest = hashlib.sha256()
    for extra in ("config.json", "quantize_config.json"):
        path = model / extra
        if model.is_dir() and path.is_file():
            digest.update(_framed(extra.encode(), path.read_bytes()))
    for path in files:
        digest.update(_framed(path.name.encode(), *_content(path)))
    return f"files:{digest.hexdigest()}"


def _content(path: Path) -> tuple[bytes, bytes]:
    """Size and checksum of a file."""
    checksum, size = xxhash.xxh3_128(), 0
    step = memoryview(bytearray(_STEP))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(step):
            checksum.update(step[:number])
            size += number
    return str(size).encode(), checksum.digest()


def _framed(*parts: bytes) -> bytes:
    """Parts with their lengths, so that no two sequences of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
