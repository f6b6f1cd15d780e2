"""What the bytes of a namespace mean, and the digest that names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from dataclasses import dataclass

from kvstore_sdk.errors import ConfigError

__all__ = ["GroupIdentity", "KVIdentity", "WriterIdentity", "canonical_json", "fresh_epoch", "salt_digest"]

IDENTITY_VERSION = 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Everything that decides what stored KV bytes mean. Two engines share chunks exactly when theirs are equal.

    Attributes:
        model: The model's name.
        weights: Fingerprint of the weights: a hub commit, a digest of the files, or the operator's `weights_version`.
        model_config: Digest of the resolved model configuration (rope, maximum length).
        kv_dtype: Resolved type of the KV cache; `auto` is refused.
        quantization: Of the model and the cache, empty for none.
        layout: Id of the byte order, also in every record's header.
        layout_version: Of that byte order.
        block_tokens: Tokens of a block. The engine's hashes depend on it.
        hash_tokens: Tokens of a hash.
        blocks_per_chunk: Blocks of a chunk.
        groups: In the order of their numbers.
        hash_algorithm: Of the engine's token-chain hash.
        hash_seed: Of that hash; empty for the engine's fixed default.
        draft_model: Speculative model whose KV lies in the chunk too.
        lora: (adapter name, digest of its weights) of every adapter that may be used, sorted.
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
        for field in ("model", "kv_dtype", "layout", "hash_algorithm"):
            if not getattr(self, field):
                raise ConfigError("KVIdentity", field, "must not be empty")
        if self.kv_dtype == "auto":
            raise ConfigError("KVIdentity", "kv_dtype", "'auto' must be resolved first: equal names would hold different bytes")
        if not self.weights and not self.private:
            raise ConfigError("KVIdentity", "weights", "must not be empty in a shared namespace; give a weights_version")
        if not self.groups:
            raise ConfigError("KVIdentity", "groups", "must not be empty")
        if self.layout.startswith("opaque") != (self.writer is not None):
            raise ConfigError("KVIdentity", "writer", "goes with an opaque layout, and only with one")

    @property
    def namespace(self) -> str:
        """The first 128 bits of the SHA-256 of the canonical JSON, as 32 hex digits."""
        return hashlib.sha256(self.canonical_json()).hexdigest()[:32]

    def canonical_json(self) -> bytes:
        """The identity as `canonical_json` writes it, with the version of this table."""
        return canonical_json({"identity_version": IDENTITY_VERSION} | dataclasses.asdict(self))

    def manifest(self) -> bytes:
        """`manifest.json`: the identity for people and tools, padded with spaces to whole pages of 4,096 bytes."""
        body = {"format": "kvstore-sdk", "namespace": self.namespace, "identity": json.loads(self.canonical_json())}
        text = json.dumps(body, indent=2, sort_keys=True, ensure_ascii=True).encode() + b"\n"
        return text.ljust(-(-len(text) // 4096) * 4096)


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces and ASCII only; strings, whole numbers, true, false, null, lists and objects.

    Numbers with a fraction are refused: languages print them differently.

    Raises:
        TypeError: a value of another type.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def fresh_epoch() -> str:
    """A random 128-bit value. Never a counter: two engines that both reset must not meet."""
    return secrets.token_hex(16)


def salt_digest(salt: str) -> str:
    """What stands for a tenant's salt in an identity, so that manifests and names do not give it away."""
    return hashlib.sha256(b"kvstore-sdk tenant salt\0" + salt.encode()).hexdigest() if salt else ""


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"canonical_json: {type(value).__name__} has no canonical form; use strings, whole numbers, lists and objects")
