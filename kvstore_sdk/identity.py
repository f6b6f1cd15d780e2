"""What the bytes of a namespace mean, and the digest that names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, cast

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.keys import FORMAT_VERSION, LAYOUT_BYTES, is_layout_id

__all__ = ["GroupIdentity", "KVIdentity", "WriterIdentity", "canonical_json", "fresh_epoch", "salt_digest"]

_MAX_NUMBER = 2**53 - 1
_EPOCH = re.compile(r"[0-9a-f]{32}")
_TENANT = re.compile(r"[0-9a-f]{64}")

Plain = str | int | bool | None | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIdentity:
    """One KV cache group: layers whose KV has one shape and one life.

    Attributes:
        kind: `full`, `sliding_window`, `mla`, `mamba`, ... as the engine calls it.
        layers: Names of the layers, in the order of the bytes.
        payload_bytes: Length of a chunk of this group.
        heads: KV heads of a layer over all ranks; 0 where that means nothing.
        head_size: Elements of a head; for MLA the latent.
        window: Tokens of the sliding window or local chunk; 0 for none.
        state_shapes: Shapes and types of the parts of a state, such as `float32[4,128,128]`, in the order of the bytes.
    """

    kind: str
    layers: tuple[str, ...]
    payload_bytes: int
    heads: int = 0
    head_size: int = 0
    window: int = 0
    state_shapes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        _check_filled(self, "kind")
        _check_positive(self, "payload_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterIdentity:
    """Who wrote the bytes: part of the identity only while the layout is opaque, because then nobody else can read them.

    Attributes:
        engine: Name and version, `vllm 0.32.0`.
        attention_backend: Class or name of the attention backend of each group.
        variant: What else decides the byte order: the CPU kernel's ISA, the cache layout, the quantisation mode.
        topology: Sizes and ranks that cut the chunk, `tp=2 pp=1 ...`.
    """

    engine: str
    attention_backend: str
    variant: str
    topology: str

    def __post_init__(self) -> None:
        _check_types(self)
        # Unknown is not a value: two writers that know nothing of themselves would share bytes that neither can read.
        _check_filled(self, "engine", "attention_backend", "topology")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Everything that decides what stored KV bytes mean. Two engines share chunks exactly when theirs are equal.

    Attributes:
        model: The model's name.
        weights: Fingerprint of the weights: a hub commit, a digest of the files, or the operator's `weights_version`.
        model_config: Digest of the resolved model configuration (rope, maximum length).
        kv_dtype: Resolved type of the KV cache; `auto` is refused.
        quantization: Of the model and the cache, empty for none.
        layout: Id of the byte order, also in every record's header. A name of the engine's own; those that begin with `kv1:` are taken.
        layout_version: Of that byte order.
        block_tokens: Tokens of a block. The engine's hashes depend on it.
        hash_tokens: Tokens of a hash.
        blocks_per_chunk: Blocks of a chunk.
        groups: In the order of their numbers.
        hash_algorithm: Of the engine's token-chain hash.
        hash_seed: What stands for the seed of that hash (a digest of it where it is secret); empty for the algorithm's own.
        draft_model: Speculative model whose KV lies in the chunk too.
        lora: (adapter name, digest of its weights) of every adapter that may be used, sorted by name.
        tenant: Digest of the tenant's salt, from `salt_digest`; the salt itself appears nowhere.
        epoch: Empty, or after the engine's cache was reset what only this engine knows, from `fresh_epoch`.
        private: Empty, or a random value that keeps the namespace to one process.
        writer: Set if and only if the layout is opaque.
    """

    model: str
    weights: str
    model_config: str
    kv_dtype: str
    layout: str
    layout_version: int
    block_tokens: int
    hash_tokens: int
    blocks_per_chunk: int
    groups: tuple[GroupIdentity, ...]
    hash_algorithm: str
    hash_seed: str = ""
    quantization: str = ""
    draft_model: str = ""
    lora: tuple[tuple[str, str], ...] = ()
    tenant: str = ""
    epoch: str = ""
    private: str = ""
    writer: WriterIdentity | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check_filled(self, "model", "kv_dtype", "layout", "hash_algorithm", "groups")
        _check_positive(self, "block_tokens", "hash_tokens", "blocks_per_chunk")
        if self.kv_dtype.lower() == "auto":
            raise ConfigError("KVIdentity", "kv_dtype", "'auto' must be resolved first: equal names would hold different bytes")
        if not self.weights and not self.private:
            raise ConfigError("KVIdentity", "weights", "must not be empty in a shared namespace; give a weights_version")
        if not is_layout_id(self.layout):
            raise ConfigError("KVIdentity", "layout", f"{self.layout!r} must be 1 to {LAYOUT_BYTES} printable ASCII characters, no spaces")
        if self.layout.startswith("opaque") != (self.writer is not None):
            raise ConfigError("KVIdentity", "writer", "goes with an opaque layout, and only with one")
        if "xxh" in self.hash_algorithm.lower() and not self.hash_seed and not self.private:
            raise ConfigError(
                "KVIdentity", "hash_seed", "must be set in a shared namespace: collisions of xxHash can be made for a public seed"
            )
        if self.tenant and not _TENANT.fullmatch(self.tenant):
            raise ConfigError("KVIdentity", "tenant", "must be what salt_digest returns, never the salt itself")
        if self.epoch and not _EPOCH.fullmatch(self.epoch):
            raise ConfigError("KVIdentity", "epoch", f"{self.epoch!r} must be what fresh_epoch returns: counters of two engines meet")
        names = [name for name, _ in self.lora]
        if names != sorted(set(names)):
            raise ConfigError("KVIdentity", "lora", "must be sorted by name, each name once")
        if missing := [name for name, digest in self.lora if not digest]:
            raise ConfigError("KVIdentity", "lora", f"{missing[0]!r} has no digest: loaded anew under its name it would be given old bytes")

    @property
    def namespace(self) -> str:
        """The first 128 bits of the SHA-256 of the canonical JSON, as 32 hex digits."""
        return hashlib.sha256(self.canonical_json()).hexdigest()[:32]

    def canonical_json(self) -> bytes:
        """The identity as `canonical_json` writes it, with the version of the format."""
        return canonical_json({"format_version": FORMAT_VERSION} | dataclasses.asdict(self))

    def manifest(self) -> bytes:
        """`manifest.json`: the identity for people and tools, padded with spaces to whole pages of 4,096 bytes."""
        body = {"format": "kvstore-sdk", "namespace": self.namespace, "identity": json.loads(self.canonical_json())}
        text = json.dumps(body, indent=2, sort_keys=True, ensure_ascii=True).encode() + b"\n"
        return text.ljust(-(-len(text) // 4096) * 4096)


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces and ASCII only; strings, whole numbers, true, false, null, lists and objects.

    Refused is what languages write in different ways: numbers with a fraction or beyond 2**53 - 1, keys that are not ASCII, and
    strings with lone surrogates.

    Raises:
        TypeError: a value of another type.
        ValueError: a number, a key or a string that is refused.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def fresh_epoch() -> str:
    """A random 128-bit value. Never a counter: two engines that both reset must not meet."""
    return secrets.token_hex(16)


def salt_digest(salt: str) -> str:
    """What stands for a tenant's salt in an identity, so that manifests and names do not give it away."""
    return hashlib.sha256(b"kvstore-sdk tenant salt\0" + salt.encode()).hexdigest() if salt else ""


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
        return value
    if isinstance(value, int):
        if abs(value) > _MAX_NUMBER:
            raise ValueError(f"canonical_json: {value} is beyond 2**53 - 1, where some languages round")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not key.isascii():
                raise ValueError(f"canonical_json: key {key!r} is not a string of ASCII")
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"canonical_json: {type(value).__name__} has no canonical form; use strings, whole numbers, lists and objects")


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_tuple_of(value: object, check: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(map(check, value))


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (_is_text, "a string without lone surrogates"),
    "int": (lambda value: type(value) is int and 0 <= value <= _MAX_NUMBER, "a whole number from 0 to 2**53 - 1"),
    "tuple[str, ...]": (lambda value: _is_tuple_of(value, _is_text), "a tuple of strings"),
    "tuple[tuple[str, str], ...]": (
        lambda value: _is_tuple_of(value, lambda pair: _is_tuple_of(pair, _is_text) and len(cast(Sized, pair)) == 2),
        "a tuple of pairs of strings",
    ),
    "tuple[GroupIdentity, ...]": (
        lambda value: _is_tuple_of(value, lambda item: isinstance(item, GroupIdentity)),
        "a tuple of GroupIdentity",
    ),
    "WriterIdentity | None": (lambda value: value is None or isinstance(value, WriterIdentity), "a WriterIdentity or None"),
}


def _check_types(identity: Any) -> None:
    """Refuse values that look right and would get a digest of their own: 16.0, "16" or True for 16, None for an empty string."""
    for field in dataclasses.fields(identity):
        check, words = _CHECKS[str(field.type)]
        value = getattr(identity, field.name)
        if not check(value):
            # Somebody's salt in the wrong type must not get into a log.
            shown = type(value).__name__ if field.name == "tenant" else repr(value)
            raise ConfigError(type(identity).__name__, field.name, f"{shown} must be {words}")


def _check_filled(identity: Any, *names: str) -> None:
    for name in names:
        if not getattr(identity, name):
            raise ConfigError(type(identity).__name__, name, "must not be empty")


def _check_positive(identity: Any, *names: str) -> None:
    for name in names:
        if getattr(identity, name) < 1:
            raise ConfigError(type(identity).__name__, name, "must be at least 1")
