"""The tier that vLLM drives: `SecondaryTierManager` over a Tier."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.tier import JobResult, Lookup, Tier
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.vllm import compat, metrics
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.guard import NeverRaises, never_raises
from kvstore_sdk.vllm.hints import HintReader
from kvstore_sdk.vllm.identity import ChunkLayout, Decision, decide
from kvstore_sdk.vllm.memory import RowMemory, merge_ranks
from kvstore_sdk.vllm.opening import NOBODY_READS, open_tier
from kvstore_sdk.vllm.options import TierOptions, parse_tier_options, shown_settings, written_by_operator
from kvstore_sdk.vllm.tails import PartialTails, refuse_unmarked_tails
from kvstore_sdk.vllm.top_keys import check_top_keys

__all__ = ["KVStoreTier"]

logger = logging.getLogger(__name__)

_HIT, _PENDING = Lookup.HIT, Lookup.PENDING


class KVStoreTier(SecondaryTierManager, NeverRaises):
    """Tier type `kvstore`: vLLM's host rows in a backend of the SDK, and back.

    Nothing but the constructor raises, and no method but `drain_jobs` and `shutdown`, which are bounded, waits.
    """

    medium = compat.medium()

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **passed: Any) -> None:
        """Check the configuration, find out what the bytes mean, open the backend.

        Raises:
            ConfigError: the configuration is wrong, or the engine is one that the tier cannot serve. Nothing was written, unless it is the
                open backend that says so: then it may have prepared its store, but no record was written.
            BackendError: the store could not be opened.
        """
        compat.check_version()
        compat.borrow_logging()
        for_base = {name: value for name, value in passed.items() if name in compat.BASE_KEYWORDS}
        super().__init__(offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **for_base)
        where = f"kvstore tier {tier_type!r}"
        entry = written_by_operator(offloading_spec, tier_type, {name: passed[name] for name in passed if name not in for_base})
        if not hasattr(offloading_spec, "kvstore_geometry"):
            # vLLM's own spec. Ours has looked already.
            check_top_keys(where, offloading_spec.extra_config, has_table=False)
        options = parse_tier_options(where, entry)
        self.locality = compat.locality(options.adapter.locality) if options.adapter.locality else None
        self._known = compat.spec_facts(offloading_spec)
        options = options.of_replica(where, self._known.parallel.replica)
        self._label = _label(offloading_spec, tier_type, entry)
        self.shown_as = f"kvstore tier {self._label}"
        self._results: deque[Any] = deque()
        self._open: dict[int, bool] = {}
        # Empty while there is nothing to report: the Tier's, which also hears of `_results`.
        self._ready: Sized = self._results
        self._tails = PartialTails(self._known)
        groups = sorted(group for group, _, _ in self._known.groups)
        _refuse_unsupported(where, self._known)
        read = getattr(offloading_spec, "kvstore_geometry", None)
        records: list[RankGeometry] = read() if read is not None else []
        if not records:
            _refuse_without_records(where, self._known)
        if records and sorted(records[0].extents) != groups:
            problem = f"the workers have KV cache groups {sorted(records[0].extents)}, the scheduler {groups}; do all run the same vLLM?"
            raise ConfigError(where, "geometry", problem)
        extents = merge_ranks(records) if records else {self._known.groups[0][0]: [(0, compat.row_facts(offloading_spec).slot_bytes)]}
        layout = ChunkLayout(payload_bytes={group: sum(size for _, size in found) for group, found in extents.items()})
        decision = decide(where, self._known, records, layout, options.adapter)
        if records:
            refuse_unmarked_tails(where, self._known, records[0].facts)
        self._hash_unconfirmed = decision.none_hash
        self._may_store = options.adapter.may_store
        self._outlives_us = self._told_of_epoch = False
        # A chunk of one block is there or is not.
        self._may_lack_blocks = self._known.blocks_per_chunk > 1
        self._memory: RowMemory | None = None
        self._tier: Tier | None = None
        # The request that is being looked up, and what it was told; None while look-ups need more than a look at a table.
        self._asking: Any = None
        self._told: dict[bytes, int] = {}
        self._table: LookupTable
        self._hints: HintReader | None = None
        if decision.lora_off:
            logger.warning(
                "%s: LoRA is enabled, so nothing is stored or loaded: the tier cannot tell which requests use an adapter. "
                "Give lora_digests for all of them, and only_listed_adapters: true",
                where,
            )
            return
        marks = offloading_spec.kvstore_marks() if records else ()
        self._open_tier(where, options, decision, RowMemory(primary_kv_view, extents, marks))

    def _open_tier(self, where: str, options: TierOptions, decision: Decision, memory: RowMemory) -> None:
        try:
            opened = open_tier(where, options, decision.identity, memory, name=self._label, events=self._known.events, answer=_told)
        except BaseException:
            memory.close()
            raise
        self._memory, self._tier, self._outlives_us = memory, opened.tier, opened.outlives_us
        self._table = opened.tier.table
        self._ready = opened.tier.ready
        if opened.takes_hints:
            self._hints = HintReader(self.shown_as, options.adapter.peer_wait_s)
        if decision.private:
            logger.warning(
                "%s: its chunks are private to this process: %s%s",
                where,
                "; ".join(decision.private),
                NOBODY_READS % f"v1/{decision.identity.namespace}" if self._outlives_us and options.adapter.may_store else "",
            )
        logger.info(
            "%s: namespace %s, layout %s: its chunks are %s; backend %s, %s",
            where,
            decision.identity.namespace,
            decision.identity.layout,
            "private to this process" if decision.private else "shared by engines of this vLLM version, kind of machine and topology",
            options.shown_given,
            shown_settings(options.settings),
        )

    # Requests and look-ups.

    @never_raises(compat.request_context)
    def on_new_request(self, req_context: Any) -> Any:
        """Ask for nothing special. The first request confirms that the engine hashes as the identity says; any may name a peer."""
        if self._hash_unconfirmed is not None:
            self._confirm_hash(self._hash_unconfirmed)
        if self._tier is not None and self._hints is not None and (hint := self._hints.read(compat.transfer_params(req_context))):
            self._tier.begin_request(req_context.req_id, hint)
        return compat.request_context()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """From memory; RETRY while the backend is asked, for `lookup_timeout_s` at most."""
        # Guarded here and not by the decorator, and what is known is found without a call: the engine calls this for every chunk of every
        # request that waits.
        try:
            if req_context is not self._asking:
                return self._look_up(key, req_context)
            table, told = self._table, self._told
            if table.wary:
                return self._look_up(key, req_context)
            if key not in told:
                if table.present.get(key, 0.0) > table.now_s:
                    told[key] = table.max_hits - 1
                    table.hits += 1
                    return compat.HIT
                answer = table.ask(req_context.req_id, key)
            elif (left := told[key]) and key in table.present:
                told[key] = left - 1
                return compat.HIT
            else:
                answer = table.lookup(req_context.req_id, key)
            if answer is _PENDING:
                return compat.RETRY
            return compat.HIT if answer is _HIT else compat.MISS
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("lookup")
            return compat.MISS

    def _look_up(self, key: bytes, req_context: Any) -> Any:
        """The first of a request, and those that take a second look."""
        if self._tier is None or (self._tails.possible and self._tails.is_one(key, req_context)):
            return compat.MISS
        answer = self._tier.lookup(req_context.req_id, key)
        if not self._tails.possible:
            self._asking, self._told = req_context, self._table.told(req_context.req_id)
        if answer is _PENDING:
            return compat.RETRY
        return compat.HIT if answer is _HIT else compat.MISS

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget what the request was told."""
        self._asking = None
        if self._tier is not None:
            self._tier.end_request(req_context.req_id)

    @never_raises(lambda: None)
    def on_schedule_end(self, *context: Any) -> None:
        """Send this step's look-ups, one batch a request."""
        if self._tier is not None:
            self._tier.flush()

    # Jobs.

    def submit_store(self, job_metadata: Any) -> None:
        """Queue a store. Chunks that no look-up could find are left out."""
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Queue a load."""
        self._submit(job_metadata, load=True)

    def _submit(self, job: Any, *, load: bool) -> None:
        """Never raises, and whatever happens the job is reported once: vLLM would keep the rows of an unreported one for ever."""
        job_id = job.job_id
        if job_id in self._open:
            logger.error("kvstore tier %s: job %s was submitted twice; the second one is ignored", self._label, job_id)
            return
        self._open[job_id] = load
        method = "submit_load" if load else "submit_store"
        try:
            keys, rows = compat.job_rows(job)
            if self._tails.possible and not load:
                whole = [place for place, key in enumerate(keys) if not self._tails.is_one(key, job.req_context)]
                keys, rows = [keys[place] for place in whole], [rows[place] for place in whole]
            if self._may_lack_blocks and not load:
                keys, rows = self._without_incomplete(keys, rows)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain(method)
            self._fail(job_id)
            if self._tier is not None:
                self._tier.wake()
            return
        if self._tier is None:
            # Stores are skipped, not failed: vLLM counts failures. A load cannot be asked for, as nothing is a hit.
            self._report(JobResult(job_id, (), tuple(keys) if load else (), () if load else tuple(keys), 0, 0.0))
            return
        try:
            submit = self._tier.submit_load if load else self._tier.submit_store
            submit(job_id, keys, rows)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain(method)
            # Cannot happen; if it does, nobody knows whether the job was queued.
            self._give_up()

    def _fail(self, job_id: int) -> None:
        self._report(JobResult(job_id, (), (b"",), (), 0, 0.0))

    def get_finished_jobs(self) -> Iterable[Any]:
        """Results since the last call; each submitted job once, and nothing else."""
        if not self._ready:
            return ()
        try:
            self._hear_results()
            if not self._results:
                return ()
            results = tuple(self._results)
            self._results.clear()
            return results
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("get_finished_jobs")
            return ()

    def _hear_results(self) -> None:
        """Take in what the Tier has to report. A result that cannot be told as it is is told as a failure: none may get lost."""
        if self._tier is None:
            return
        open_jobs, results = self._open, self._results
        for result in self._tier.poll():
            if result.answer is not None:
                if open_jobs.pop(result.job_id, None) is not None:
                    results.append(result.answer)
                continue
            try:
                self._report(result)
            except Exception:  # noqa: BLE001  logged by `_complain`
                self._complain("get_finished_jobs")
                self._fail(result.job_id)

    def _report(self, result: JobResult) -> None:
        load = self._open.get(result.job_id)
        if load is None:
            return
        told = _told(result, load)
        del self._open[result.job_id]
        self._results.append(told)

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether a job is not reported yet. Each has a deadline, so this ends."""
        return bool(self._results) or bool(self._open)

    # What the engine may ask now and then.

    @never_raises(tuple)
    def take_events(self) -> Iterable[Any]:
        """Chunks that this tier stored, or found to be gone, where KV events are switched on."""
        if self._tier is None or not self._known.events:
            return ()
        events = self._tier.take_events()
        owner, where = self.tier_type, self.locality
        return tuple(compat.offloading_event(event.keys, removed=event.removed, where=where, owner=owner) for event in events)

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Every metric this tier can have. Runs in the API server: opens nothing."""
        return metrics.definitions()

    @never_raises(lambda: None)
    def get_stats(self) -> Any:
        """What was counted since the last call."""
        return None if self._tier is None else metrics.stats(self._tier.metrics.take(), self._label)

    # The end of things.

    def drain_jobs(self) -> None:
        """The engine resets its cache, and its weights may change: end all jobs, and never serve again what was stored before.

        Takes `drain_timeout_s` at most. Afterwards nothing touches the engine's rows, and every job's result is ready.
        """
        try:
            if self._tier is not None:
                self._tier.reset()
                self._hear_results()
                self._tier.wake()
                self._tell_of_epoch(self._tier.identity.namespace)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("drain_jobs")
            self._give_up()
        if self._open:
            self._give_up()

    def shutdown(self) -> None:
        """Close the backend, in `close_timeout_s` at most, and let go of the engine's memory."""
        tier, self._tier, self._asking = self._tier, None, None
        self._ready = self._results
        try:
            if tier is not None:
                tier.close()
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("shutdown")
        if self._memory is not None:
            self._memory.close()

    # Inside.

    def _tell_of_epoch(self, namespace: str) -> None:
        """Say once that what is stored after a reset is this engine's alone."""
        if self._outlives_us and self._may_store and not self._told_of_epoch:
            self._told_of_epoch = True
            where = f"v1/{namespace}"
            logger.warning("kvstore tier %s: after a reset its chunks are private to this process" + NOBODY_READS, self._label, where)

    def _without_incomplete(self, keys: list[bytes], rows: list[int]) -> tuple[list[bytes], list[int]]:
        """Leave out chunks that lack blocks which a reader could need. vLLM stores such late, when its host memory was full before.

        Rows are pinned while a job is open, so what is true at its submission stays true.
        """
        lacking = set(self._memory.incomplete(rows)) if self._memory is not None else set()
        if not lacking:
            return keys, rows
        if self._tier is not None:
            self._tier.metrics.count("stores", "incomplete", by=len(lacking))
        kept = [place for place in range(len(rows)) if place not in lacking]
        return [keys[place] for place in kept], [rows[place] for place in kept]

    def _confirm_hash(self, expected: bytes) -> None:
        """The engine draws its seed after the tiers are built, so what was assumed is checked before anything is stored."""
        self._hash_unconfirmed = None
        if compat.is_none_hash(expected) or self._tier is None:
            return
        logger.warning("kvstore tier %s: the engine hashes from another seed than expected: its chunks are private", self._label)
        self._tier.reset()

    def _give_up(self) -> None:
        """What cannot happen did: from here on no copy finds the engine's memory, nothing old is served, and every job has ended."""
        logger.error("kvstore tier %s: switched off after an error of its own", self._label)
        self.shutdown()
        for job_id in list(self._open):
            self._fail(job_id)


def _told(result: JobResult, load: bool) -> Any:
    """The engine's word for a result."""
    return compat.job_result(
        result.job_id,
        success=result.success,
        loaded=result.done if load else None,
        seconds=result.elapsed_s,
        moved_bytes=result.moved_bytes,
    )


def _label(spec: Any, tier_type: str, entry: Mapping[str, Any]) -> str:
    """The name vLLM gives the tier in its own metrics: place in the list, counted from 1, and type."""
    entries = spec.extra_config.get("secondary_tiers", ())
    for place, found in enumerate(entries, 1):
        if isinstance(found, Mapping) and found.get("type") == tier_type and all(found.get(name) == entry[name] for name in entry):
            return f"{place}:{tier_type}"
    return f"1:{tier_type}"


def _refuse_unsupported(where: str, known: compat.SpecFacts) -> None:
    """What goes wrong in vLLM itself, or gives bytes that are not what they seem."""
    if known.canonical:
        raise ConfigError(where, "canonical_layout", "is not supported; leave it out")
    if compat.LOSES_FINISHED_REQUESTS and not known.prompt_only:
        raise ConfigError(where, "offload_prompt_only", "false makes vLLM 0.26 fail at the end of a request; leave it out, or use 0.27")
    if compat.SHARES_REGION_BETWEEN_REPLICAS and known.parallel.dp > 1:
        problem = f"{known.parallel.dp} replicas share one host region in this vLLM; use 0.26 or later, or one replica"
        raise ConfigError(where, "data_parallel_size", problem)


def _refuse_without_records(where: str, known: compat.SpecFacts) -> None:
    """Under vLLM's plain spec nobody says which bytes of a row belong to which group and rank."""
    fix = 'use "spec_name": "KVStoreTieringSpec", "spec_module_path": "kvstore_sdk.vllm"'
    workers, groups = known.parallel.world_size, len(known.groups)
    if workers > 1:
        raise ConfigError(where, "spec_name", f"TieringOffloadingSpec serves one worker only, this engine has {workers}: {fix}")
    if groups > 1:
        raise ConfigError(where, "spec_name", f"TieringOffloadingSpec serves one KV cache group only, this model has {groups}: {fix}")
    if known.blocks_per_chunk > 1:
        # A layer with a window may have lost some of a chunk's blocks, and here nobody would know.
        problem = f"TieringOffloadingSpec does not say which of a chunk's {known.blocks_per_chunk} blocks are there: {fix}, or set it to 1"
        raise ConfigError(where, "blocks_per_chunk", problem)
