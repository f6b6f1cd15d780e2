"""What a TieredStore counts besides what each of its tiers counts. Every name and label is listed here once."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore_sdk.tier.metrics import MetricSpec

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

COUNTERS: Mapping[str, MetricSpec] = {
    "hits": MetricSpec("Chunks that requests were told are there, by the tier that had them; once for each request and chunk.", ("tier",)),
    "misses": MetricSpec(
        "Chunks that requests were told are not there, or not in time; once for each request and chunk. An engine asks for a prefix up to "
        "the first one, so hits / (hits + misses) is no hit rate."
    ),
    "lookup_timeouts": MetricSpec("Misses because no tier answered, or no store ended, in time."),
    "engine_stores": MetricSpec("Chunks that the engine wrote whole into host memory."),
    "engine_loads": MetricSpec(
        "Chunks that the engine read from host memory. Where this stays near 0 and engine_stores grows, what is written is never read."
    ),
    "no_room": MetricSpec(
        "Chunks that host memory had no room for when they were wanted (lookup: a miss; store: asked again); once for each request and "
        "chunk.",
        ("wanted",),
    ),
    "unfit_stores": MetricSpec(
        "Chunks that were not stored, nor asked for again, because what a request stored at once was more than host memory has room for."
    ),
    "incomplete_stores": MetricSpec("Chunks that were dropped because not all ranks wrote them whole."),
    "promotions": MetricSpec(
        "Chunks asked from a tier for host memory, by tier and result (loaded, failed, late; "
        "unwanted: came when the engine had computed it itself, or after a reset).",
        ("tier", "result"),
    ),
    "cascades": MetricSpec(
        "Chunks sent from host memory, by tier and result (stored, failed, skipped; not_admitted: the tier waits for a second use; "
        "shed: evicted before its turn, so that the tier does not have it).",
        ("tier", "result"),
    ),
    "loans": MetricSpec(
        "Chunks in host memory asked for by others through a tier, by tier and result (lent; refused: too many of them are lent or on "
        "their way to the tier, or no more may be kept).",
        ("tier", "result"),
    ),
    "double_releases": MetricSpec("Ends of loads that were not under way, by chunk."),
    "expired_holds": MetricSpec(
        "Requests whose hits were let go because nobody loaded them in time, or a store of chunks of another size had no room."
    ),
    "forgotten_requests": MetricSpec("Requests that were taken to be over because so many others came. Their ends should have been told."),
    "faults": MetricSpec("Errors of the SDK that were caught, by the part they came from.", ("part",)),
}

GAUGES: Mapping[str, MetricSpec] = {
    "host_capacity_bytes": MetricSpec("Host memory for chunks."),
    "host_used_bytes": MetricSpec("Host memory that chunks lie in."),
    "holding_requests": MetricSpec("Requests that keep hits for a load."),
    "open_promotions": MetricSpec("Chunks on their way from a tier into host memory."),
    "cascade_bytes": MetricSpec("Host memory that stores to tiers, and others who read it through tiers, keep in use."),
    "lent_chunks": MetricSpec("Chunks in host memory that others may read now, through tiers."),
    "held_slots": MetricSpec("Slots that calls which outlived their jobs may still touch."),
}

HISTOGRAMS: Mapping[str, MetricSpec] = {
    "pending_seconds": MetricSpec("Time that look-ups waited, of those that could not be answered at once.", (), _SECONDS),
}
