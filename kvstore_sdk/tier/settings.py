"""Settings of a Tier, with the reason of each default beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from kvstore_sdk.backend.options import Bounds

__all__ = ["TierSettings"]

_Seconds = Bounds(ge=0.001, le=86400)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TierSettings:
    """How a Tier drives its backend. Every operator may set these beside the backend's own options; the names must not collide."""

    io_threads: Annotated[int, Bounds(ge=1, le=256), "calls at the same time, at most the backend's max_concurrency"] = 8
    # A local disk keeps about 8 busy.
    batch_records: Annotated[int, Bounds(ge=1, le=4096), "records in one call, within max_batch; a backend's batch_bytes go before it"] = 16
    # Few enough that a job of some hundred records is spread over the threads.
    verify: Annotated[bool, "check every record that is loaded; switch it off only to measure"] = True
    # A wrong byte is a wrong answer that nobody sees; checking costs some per cent of a load.
    lookup_timeout_s: Annotated[float, _Seconds, "a look-up that has no answer by then is a miss"] = 2.0
    # A prefill of some thousand tokens is done by then.
    load_timeout_s: Annotated[float, _Seconds, "a load that is not done by then has failed; bytes add to it"] = 10.0
    # A request waits for it.
    store_timeout_s: Annotated[float, _Seconds, "likewise for a store; nobody waits for it, but the engine's row is in use"] = 30.0
    # A busy object store may take some seconds a request, and retries have to fit.
    max_store_wait_s: Annotated[float, _Seconds, "while stores have waited this long in the queue, new ones are shed"] = 5.0
    # Longer, and the store side is not catching up: what waits keeps rows of the engine in use.
    min_bytes_per_s: Annotated[float, Bounds(ge=1), "what a job may take more for its bytes"] = 50e6
    # Half of a link of 1 Gbit/s.
    drain_timeout_s: Annotated[float, _Seconds, "longest that drain waits"] = 10.0
    # As a load: what is running may take that long.
    close_timeout_s: Annotated[float, _Seconds, "longest that close waits for running calls"] = 5.0
    # Service managers kill after 10.
    hit_ttl_s: Annotated[float, Bounds(ge=0, le=86400), "how long a HIT is believed without asking again"] = 60.0
    # Whoever removes records from a store works in minutes.
    max_known_keys: Annotated[int, Bounds(ge=16), "entries in the table of hits"] = 262_144
    # Some 50 MB of memory; four million tokens at 16 a chunk.
    max_hits_per_request: Annotated[int, Bounds(ge=1, le=1000), "how often one request is told HIT for one chunk"] = 1
    # One is enough to converge when a prefix is larger than the host tier.
    staging_bytes: Annotated[int, Bounds(ge=8192, le=1 << 40), "records in calls at a time, and memory for them if they need any"] = (
        256 << 20
    )
    # A batch of 16 records of 2 MiB for each thread.
    max_queued_store_bytes: Annotated[int, Bounds(ge=0), "stores beyond this are shed"] = 1 << 30
    # What a disk of 200 MB/s writes in `max_store_wait_s`.
    max_quarantined_bytes: Annotated[int, Bounds(ge=0), "memory that abandoned calls may hold before the breakers open"] = 128 << 20
    # Half of the staging memory: the other half goes on working.
    retries: Annotated[int, Bounds(ge=0, le=20), "repeats of what failed and may be retried"] = 2
    # Enough for a connection that was reset and a server that restarts; more only delays the miss.
    retry_base_s: Annotated[float, _Seconds, "mean wait before the first repeat; doubles each time"] = 0.05
    # Some round trips.
    breaker_failures: Annotated[int, Bounds(ge=1, le=10_000), "failed calls in a row that open the breaker"] = 5
    # Fewer would open it for one request's bad luck.
    breaker_probe_s: Annotated[float, _Seconds, "wait before an open breaker lets one call try"] = 2.0
    # A restart of a store takes seconds.
    health_probe_s: Annotated[
        float, Bounds(ge=0, le=86400), "how often a store that is idle, or fails, is asked whether it works; 0 for never"
    ] = 5.0
    # A look-up of one name costs a store next to nothing, and what is down for longer is found before a request waits for it.
    admission: Annotated[
        Literal["all", "second_touch"], "which chunks are written: all, or those that are stored or used a second time"
    ] = "all"
    # What is stored once is found again, also after a restart. Prompts that never come again are the reason for the other.
    min_load_mb_per_s: Annotated[
        float, Bounds(ge=0), "while loads are slower than this (10^6 bytes/s), look-ups are misses; 0 for never"
    ] = 0.0
    # How fast an engine computes what it does not load, nobody but its operator knows.

    def __repr__(self) -> str:
        changed = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if getattr(self, field.name) != field.default]
        return f"TierSettings({', '.join(changed)})"
