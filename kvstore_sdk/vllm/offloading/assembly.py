"""The scheduler's side of an engine, put together from what its workers said: layout, identity, plan, host tier, tiers, store, manager."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import record_bytes
from kvstore_sdk.host import HostTier
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.layout import LayoutError, payload_bytes
from kvstore_sdk.store import StoreTier, TieredStore
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.engine_layout import EngineLayout, RankLayout, engine_layout
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.hints import HintReader
from kvstore_sdk.vllm.identity import ChunkLayout, Decision, decide
from kvstore_sdk.vllm.offloading.manager import KVStoreOffloadingManager, OpenStore
from kvstore_sdk.vllm.offloading.marks import Marks
from kvstore_sdk.vllm.offloading.options import OffloadingOptions, named_for_operators
from kvstore_sdk.vllm.offloading.plan import GroupPlan, Plan, control_bytes, least_bytes, most_slots, write_plan
from kvstore_sdk.vllm.opening import NOBODY_READS, OpenTier, fit_unopened, open_tier
from kvstore_sdk.vllm.options import shown_settings
from kvstore_sdk.vllm.tails import refuse_unmarked_tails

__all__ = ["WHERE", "build_manager"]

logger = logging.getLogger(__name__)

WHERE = "KVStoreOffloadingSpec"
"""In errors and logs."""


def build_manager(
    spec: Any, options: OffloadingOptions, records: Sequence[RankGeometry], join_region: Callable[[], Region]
) -> KVStoreOffloadingManager:
    """Open everything, or nothing.

    Args:
        spec: The scheduler's offloading spec.
        options: Its configuration.
        records: The geometry record of each rank.
        join_region: Maps the region that the workers mapped.

    Raises:
        ConfigError: the configuration or the engine is one that cannot be served. No record was written.
        BackendError: a store could not be opened.
    """
    known = compat.spec_facts(spec)
    numbers = [group for group, _, _ in known.groups]
    if sorted(records[0].groups) != sorted(numbers):
        problem = f"the workers have KV cache groups {sorted(records[0].groups)}, the scheduler {numbers}; do all run the same vLLM?"
        raise ConfigError(WHERE, "geometry", problem)
    refuse_unmarked_tails(WHERE, known, records[0].facts)
    layout = _layout(known, records)
    sizes = {group: payload_bytes(shape) for group, (shape, _) in zip(numbers, layout.groups, strict=True)}
    states = dict(zip(numbers, layout.state_shapes, strict=True)) if layout.state_shapes else {}
    chunks = ChunkLayout(payload_bytes=sizes, name=layout.layout, version=layout.version, state_shapes=states, kernels=layout.names)
    decision = decide(WHERE, known, records, chunks, options.adapter)
    options = options.of_replica(WHERE, known.parallel.replica)
    if decision.lora_off:
        logger.warning(
            "%s: LoRA is enabled, so nothing is stored or loaded: nobody can tell which requests use an adapter. "
            "Give lora_digests for all of them, and only_listed_adapters: true",
            WHERE,
        )
        return KVStoreOffloadingManager(None, known)
    opened = _open_store(options, known, layout, sizes, decision.identity, join_region)
    _tell(options, layout, decision, opened, sizes)
    return KVStoreOffloadingManager(opened, known, none_hash=decision.none_hash)


def _layout(known: compat.SpecFacts, records: Sequence[RankGeometry]) -> EngineLayout:
    """Raises ConfigError where the ranks do not make an engine, or one is of another version or another spec."""
    found = []
    for group, _, _ in known.groups:
        ranks = []
        for record in records:
            try:
                ranks.append(RankLayout.from_plain(record.groups[group]["layout"]))
            except (KeyError, LayoutError, TypeError, ValueError) as cause:
                problem = f"rank {record.rank} does not say how it keeps KV cache group {group} ({type(cause).__name__}: {cause}); "
                raise ConfigError(WHERE, "geometry", problem + "do all workers run this spec and this version of kvstore-sdk?") from cause
        found.append(ranks)
    try:
        return engine_layout(found, stages=known.parallel.world_size // known.parallel.tp, blocks=known.blocks_per_chunk)
    except LayoutError as cause:
        raise ConfigError(WHERE, "geometry", f"the ranks do not make one engine: {cause}") from cause


def _open_store(
    options: OffloadingOptions,
    known: compat.SpecFacts,
    layout: EngineLayout,
    sizes: Mapping[int, int],
    identity: KVIdentity,
    join_region: Callable[[], Region],
) -> OpenStore:
    for entry in options.tiers:
        fit_unopened(f"{WHERE} tier {entry.name}", entry.options, identity)
    lengths = {record_bytes(size) for size in sizes.values()}
    needed = least_bytes(lengths, known.parallel.world_size)
    if options.host_bytes < needed:
        problem = f"{options.host_bytes} bytes are too few: {needed} are needed at least, for two chunks of {max(lengths)} and the plan"
        raise ConfigError(WHERE, "cpu_bytes_to_use", problem)
    with contextlib.ExitStack() as undo:
        region = join_region()
        undo.callback(region.close)
        plan = _plan(known, layout, sizes, region.size_bytes)
        with named_for_operators(WHERE):
            host = HostTier(region, sizes, start=plan.slots_start, policy=options.policy, reserve_bytes=options.host.reserve_bytes)
        if host.row_count > plan.slot_count:
            # A worker would refuse such a slot, and end the engine, when the last of the memory is first used.
            problem = f"{host.row_count} slots of {plan.slot_count} that have marks; this is an error of kvstore-sdk, another size may do"
            raise ConfigError(WHERE, "cpu_bytes_to_use", problem)
        opened: list[OpenTier] = []
        for entry in options.tiers:
            where = f"{WHERE} tier {entry.name}"
            opened.append(open_tier(where, entry.options, identity, host, name=entry.name, events=known.events))
            undo.callback(opened[-1].tier.close)
        below = [
            StoreTier(entry.name, found.tier, entry.options.adapter.locality or "")
            for entry, found in zip(options.tiers, opened, strict=True)
        ]
        write_plan(region, plan)
        marks = Marks(region, plan)
        undo.callback(marks.close)
        store = TieredStore(host, below, identity=identity, settings=options.store, events=known.events)
        undo.pop_all()
    return OpenStore(
        store=store,
        tiers=tuple(below),
        marks=marks,
        release=region.close,
        localities={tier.name: compat.locality(tier.locality) if tier.locality else None for tier in below},
        hints=HintReader(WHERE, options.adapter.peer_wait_s) if any(found.takes_hints for found in opened) else None,
        outlives_us=any(found.outlives_us and entry.options.adapter.may_store for entry, found in zip(options.tiers, opened, strict=True)),
    )


def _plan(known: compat.SpecFacts, layout: EngineLayout, sizes: Mapping[int, int], region_bytes: int) -> Plan:
    records = {record_bytes(size) for size in sizes.values()}
    most, ranks = most_slots(region_bytes, records), known.parallel.world_size
    start = control_bytes(most, ranks)
    return Plan(
        world_size=ranks,
        blocks_per_chunk=known.blocks_per_chunk,
        slot_count=max(1, most),
        slots_start=start,
        groups=tuple(GroupPlan(shape, topology) for shape, topology in layout.groups),
    )


def _tell(options: OffloadingOptions, layout: EngineLayout, decision: Decision, opened: OpenStore, sizes: Mapping[int, int]) -> None:
    """Say at start-up what an operator may have to know."""
    namespace = decision.identity.namespace
    if decision.private and options.tiers:
        left = NOBODY_READS % f"v1/{namespace}" if opened.outlives_us else ""
        logger.warning("%s: its chunks are private to this process: %s%s", WHERE, "; ".join(decision.private), left)
    if layout.opaque and options.tiers:
        why = "; ".join(layout.why)
        logger.warning("%s: its chunks fit engines of this version, kind of machine and topology only: %s", WHERE, why)
    if layout.untested:
        # Other engines that share the store read these chunks in that order.
        level = logging.WARNING if options.tiers else logging.INFO
        logger.log(level, "%s: the layout of %s was read off vLLM's sources and never seen on a device", WHERE, ", ".join(layout.untested))
    host = opened.store.host.stats()
    chunks = [f"{found.slots} chunks of {record_bytes(sizes[group])} bytes" for group, found in host.groups.items()]
    logger.info(
        "%s: namespace %s, layout %s: its chunks are %s; %d bytes of host memory for %s, policy %s, reserve %d bytes; tiers: %s; %s",
        WHERE,
        namespace,
        layout.layout,
        _shared_by(options, layout, decision),
        options.host_bytes,
        " or ".join(chunks),
        options.policy,
        host.reserve_bytes,
        ", ".join(f"{tier.name} ({tier.options.shown_given})" for tier in options.tiers) or "none",
        shown_settings(options.store),
    )


def _shared_by(options: OffloadingOptions, layout: EngineLayout, decision: Decision) -> str:
    """Who else reads the chunks."""
    if not options.tiers:
        return "kept in host memory alone"
    if decision.private:
        return "private to this process"
    if layout.opaque:
        return "shared by engines of this vLLM version, kind of machine and topology"
    return "shared by engines of any tensor and pipeline parallel size"
