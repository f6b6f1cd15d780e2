"""What tells the weights of one model from those of another of the same name and shape."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["digest_files", "model_fingerprint"]

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PAGE = 4096
_MAX_HEADER_BYTES = 256 << 20
_WHOLE_BYTES = 512 << 20
"""Weights of up to this many bytes are read whole: half a second, once for each start."""
_STEP = 1 << 20
_SAMPLES = 256
"""Pages of a file whose tensors cannot be told apart: a fine-tuned file of 5 GB differs from its base in nearly every one of them."""


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

    The configuration and, of each weight file, name and size. Then all bytes of it, when the files have no more than `_WHOLE_BYTES`
    together; else the header and two pages of each tensor, the first and the middle one. A model of hundreds of gigabytes takes well under
    a second from the page cache, and two of them that differ in nothing but some rows of a tensor may look alike.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        return ""
    digest = hashlib.sha256()
    for extra in ("config.json", "quantize_config.json"):
        path = model / extra
        if model.is_dir() and path.is_file():
            digest.update(_framed(extra.encode(), path.read_bytes()))
    whole = sum(path.stat().st_size for path in files) <= _WHOLE_BYTES
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(_framed(path.name.encode(), str(size).encode()))
            for offset, length in _pieces(size) if whole else _samples(file.fileno(), size):
                digest.update(_framed(str(offset).encode(), os.pread(file.fileno(), length, offset)))
    return f"files:{digest.hexdigest()}"


def _pieces(size: int) -> list[tuple[int, int]]:
    """All of a file."""
    return [(offset, min(_STEP, size - offset)) for offset in range(0, size, _STEP)]


def _framed(*parts: bytes) -> bytes:
    """Parts with their lengths, so that no two sequences of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _samples(fd: int, size: int) -> list[tuple[int, int]]:
    """Which parts of a file are read: the header and two pages of each tensor, or pages at equal distances."""
    tensors = _safetensors(fd, size)
    if tensors is not None:
        header, spans = tensors
        parts = [(0, header)]
        for start, end in spans:
            parts.append((start, min(_PAGE, end - start)))
            middle = start + (end - start) // 2
            parts.append((middle, min(_PAGE, end - middle)))
        return parts
    step = max(_PAGE, size // _SAMPLES)
    return [(offset, min(_PAGE, size - offset)) for offset in range(0, size, step)] + [(max(0, size - _PAGE), min(_PAGE, size))]


def _safetensors(fd: int, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """(length of the header with its length field, (start, end) of each tensor in the file), or None for another format."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        return None
    try:
        table = json.loads(os.pread(fd, length, 8))
        offsets = [entry["data_offsets"] for name, entry in table.items() if name != "__metadata__"]
        spans = [(8 + length + int(start), 8 + length + int(end)) for start, end in offsets]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if any(not 8 + length <= start <= end <= size for start, end in spans):
        return None
    return 8 + length, sorted(spans)
