"""From geometry records and options to the identity of what is stored, and to what keeps it private."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import vllm

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.identity import GroupIdentity, KVIdentity, WriterIdentity, salt_digest
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.facts import UNSUPPORTED
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.options import AdapterOptions

__all__ = ["ChunkLayout", "Decision", "decide"]

_COLLISION_RESISTANT = ("sha256", "sha256_cbor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The order of the bytes in a chunk.

    Attributes:
        payload_bytes: Of each group.
        name: Id of the layout. `opaque-vllm` is the parts of all ranks as vLLM's rows have them, one after another.
        version: Of the layout.
        state_shapes: Of each group that has states, over all ranks; needed unless it is opaque.
        kernels: Names of those that decide the order, where it is opaque.
    """

    payload_bytes: Mapping[int, int]
    name: str = "opaque-vllm"
    version: int = 1
    state_shapes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    kernels: Sequence[str] = ()

    @property
    def opaque(self) -> bool:
        """Whether only an engine like the writer's can read the bytes."""
        return self.name.startswith("opaque")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a tier stores under.

    Attributes:
        identity: Of the chunks.
        private: Why nobody else can find them; empty when they are shared.
        none_hash: What the engine must hash from for the keys to be shared, to be checked once it hashes; None when they are private.
        lora_off: The engine may use adapters nobody vouches for, so nothing must be stored or loaded.
    """

    identity: KVIdentity
    private: tuple[str, ...]
    none_hash: bytes | None
    lora_off: bool


def decide(
    where: str,
    known: compat.SpecFacts,
    records: Sequence[RankGeometry],
    layout: ChunkLayout,
    options: AdapterOptions,
) -> Decision:
    """Build the identity, failing closed: what cannot be told makes the namespace private to this process.

    Args:
        where: For errors.
        known: What the scheduler's side sees.
        records: One of each rank, or none under vLLM's plain `TieringOffloadingSpec`.
        layout: Of the chunks.
        options: The operator's.

    Raises:
        ConfigError: what the operator asked for cannot be had.
    """
    for record in records:
        for group, described in record.groups.items():
            if described["kind"].startswith(UNSUPPORTED):
                name = described["kind"].removeprefix(UNSUPPORTED)
                problem = f"KV cache group {group} is a {name}, which this version cannot store: leave the tier out, or use another model"
                raise ConfigError(where, "model", problem)
    facts = records[0].facts if records else _facts_without_records(where, known)
    lora = bool(facts["lora"])
    if lora and options.lora_digests and compat.runtime_lora_updating():
        raise ConfigError(
            where, "lora_digests", "cannot be given while VLLM_ALLOW_RUNTIME_LORA_UPDATING is set: a digest would outlive its adapter"
        )
    reasons = _why_private(facts, options, records)
    seed = compat.hash_seed(facts["hash_algorithm"])
    identity = KVIdentity(
        model=facts["model"],
        weights=options.weights_version or facts["weights"],
        model_config=facts["model_config"],
        kv_dtype=facts["kv_dtype"],
        quantization=facts["quantization"],
        layout=layout.name,
        layout_version=layout.version,
        block_tokens=known.groups[0][1],
        hash_tokens=known.hash_tokens,
        blocks_per_chunk=known.blocks_per_chunk,
        groups=tuple(_group(group, records, layout, layers) for group, _, layers in known.groups),
        hash_algorithm=facts["hash_algorithm"],
        hash_seed=_seed_digest(seed),
        draft_model=facts["draft_model"],
        lora=tuple(sorted(options.lora_digests.items())) if lora else (),
        tenant=salt_digest(options.tenant_salt),
        private=secrets.token_hex(16) if reasons else "",
        writer=_writer(known, records, facts, layout) if layout.opaque else None,
    )
    return Decision(
        identity=identity,
        private=tuple(reasons),
        none_hash=None if reasons or seed is None else compat.expected_none_hash(facts["hash_algorithm"], seed),
        lora_off=lora and not (options.lora_digests and options.only_listed_adapters),
    )


def _facts_without_records(where: str, known: compat.SpecFacts) -> dict[str, Any]:
    """What the scheduler's side alone can say; it is used for a private namespace only."""
    if known.kv_dtype == "auto":
        problem = "'auto' is not resolved on this side; use spec_name KVStoreTieringSpec, or name the type"
        raise ConfigError(where, "kv_cache_dtype", problem)
    return {
        "engine": f"vllm {vllm.__version__}",
        "platform": "unknown",
        "cache_layout": known.kv_cache_layout,
        "model": known.model,
        "weights": "",
        "model_config": "unknown",
        "kv_dtype": known.kv_dtype,
        "quantization": "",
        "hash_algorithm": "unknown",
        "draft_model": "",
        # Adapters cannot be seen from here. Keys hold their names, so those that stay as they are do not meet.
        "lora": compat.runtime_lora_updating(),
        "mamba_align": False,
        "own_scales": False,
    }


def _why_private(facts: Mapping[str, Any], options: AdapterOptions, records: Sequence[RankGeometry]) -> list[str]:
    if options.private:
        return ["private is set"]
    if not records:
        return ["vLLM's TieringOffloadingSpec does not say what the bytes mean: use spec_name KVStoreTieringSpec"]
    reasons = []
    if not options.weights_version and not facts["weights"]:
        reasons.append("the weights have no fingerprint: set weights_version")
    if facts["draft_model"].endswith(":unknown"):
        reasons.append("the weights of the draft model have no fingerprint")
    if facts["own_scales"]:
        reasons.append("calculate_kv_scales gives each process scales of its own: use a checkpoint that has them")
    if any(group["kind"] == "unknown" for record in records for group in record.groups.values()):
        reasons.append("layers of this model do not say what they keep in their cache")
    algorithm = facts["hash_algorithm"]
    if compat.hash_seed(algorithm) is None:
        fix = "set PYTHONHASHSEED to the same value everywhere" if algorithm in _COLLISION_RESISTANT else "use sha256_cbor"
        reasons.append(f"{algorithm} hashes from a random value of this process: {fix}")
    elif algorithm not in _COLLISION_RESISTANT and not options.trusted_hash_seed:
        reasons.append(f"{algorithm} is not collision resistant: use sha256_cbor, or set trusted_hash_seed if PYTHONHASHSEED is secret")
    return reasons


def _seed_digest(seed: str | None) -> str:
    """What stands for the seed: it may be a secret."""
    if seed is None:
        return "random"
    return hashlib.sha256(b"kvstore-sdk hash seed\0" + seed.encode()).hexdigest()[:32]


def _group(group: int, records: Sequence[RankGeometry], layout: ChunkLayout, layers: tuple[str, ...]) -> GroupIdentity:
    payload_bytes = layout.payload_bytes[group]
    if not records:
        return GroupIdentity(kind="unknown", layers=layers, payload_bytes=payload_bytes)
    ranks = [record.groups[group] for record in records]
    first = ranks[0]
    # With pipeline stages each rank has layers of its own, with tensor parallelism all have the same.
    names = tuple(dict.fromkeys(name for rank in ranks for name in rank["layers"]))
    return GroupIdentity(
        kind=first["kind"],
        layers=names,
        payload_bytes=payload_bytes,
        heads=first["heads"],
        head_size=first["head_size"],
        window=first["window"],
        # A rank knows its own part of a state. What does not depend on who wrote it must not depend on how many ranks there are.
        state_shapes=tuple(first["state_shapes"]) if layout.opaque else tuple(layout.state_shapes.get(group, ())),
    )


def _writer(known: compat.SpecFacts, records: Sequence[RankGeometry], facts: Mapping[str, Any], layout: ChunkLayout) -> WriterIdentity:
    backends = []
    for group, _, _ in known.groups:
        names = sorted({name for record in records for name in record.groups[group]["backends"]})
        backends.append(f"{group}:{'+'.join(names)}")
    shapes = "/".join(record.groups[group]["shape"] for record in records for group in sorted(record.groups))
    shape = hashlib.sha256(shapes.encode()).hexdigest()[:32]
    sizes = known.parallel
    return WriterIdentity(
        engine=facts["engine"],
        attention_backend=" ".join(backends),
        variant="; ".join((f"{facts['platform']} layout={facts['cache_layout'] or 'default'} shape={shape}", *layout.kernels)),
        topology=f"tp={sizes.tp} pp={sizes.pp} pcp={sizes.pcp} dcp={sizes.dcp} world={sizes.world_size} replicated={int(known.replicated)}",
    )
