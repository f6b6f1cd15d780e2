"""Settings of a Tier, with the reason of each default beside it."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from kvstore_sdk.backend.options import Bounds

__all__ = ["TierSettings"]

_SECONDS = Bounds(ge=0.001, le=86400)


class TierSettings:
    """How a Tier drives its backend. Every operator may set these beside the backend's own options; the names must not collide."""

    def __init__(
        self,
        *,
        io_threads: Annotated[int, Bounds(ge=1, le=256), "calls at the same time, at most the backend's max_concurrency"] = 8,
        batch_records: Annotated[int, Bounds(ge=1, le=4096), "records in one call, at most the backend's max_batch"] = 16,
        verify: Annotated[bool, "check every record that is loaded; switch it off only to measure"] = True,
        lookup_timeout_s: Annotated[float, _SECONDS, "a look-up that has no answer by then is a miss"] = 2.0,
        load_timeout_s: Annotated[float, _SECONDS, "a load that is not done by then has failed; bytes add to it"] = 10.0,
        store_timeout_s: Annotated[float, _SECONDS, "likewise for a store; nobody waits for it"] = 30.0,
        min_bytes_per_s: Annotated[float, Bounds(ge=1), "what a job may take more for its bytes"] = 50e6,
        drain_timeout_s: Annotated[float, _SECONDS, "longest that drain waits"] = 10.0,
        close_timeout_s: Annotated[float, _SECONDS, "longest that close waits for running calls"] = 5.0,
        hit_ttl_s: Annotated[float, Bounds(ge=0, le=86400), "how long a HIT is believed without asking again"] = 60.0,
        max_known_keys: Annotated[int, Bounds(ge=16), "entries in the table of hits"] = 262_144,
        max_hits_per_request: Annotated[int, Bounds(ge=1, le=1000), "how often one request is told HIT for one chunk"] = 1,
        staging_bytes: Annotated[int, Bounds(ge=8192), "memory that records pass through"] = 256 << 20,
        max_queued_store_bytes: Annotated[int, Bounds(ge=0), "stores beyond this are shed"] = 1 << 30,
        max_quarantined_bytes: Annotated[int, Bounds(ge=0), "memory that abandoned calls may hold before the breaker opens"] = 128 << 20,
        retries: Annotated[int, Bounds(ge=0, le=20), "repeats of what failed and may be retried"] = 2,
        retry_base_s: Annotated[float, _SECONDS, "mean wait before the first repeat; doubles each time"] = 0.05,
        breaker_failures: Annotated[int, Bounds(ge=1, le=10_000), "failed calls in a row that open the breaker"] = 5,
        breaker_probe_s: Annotated[float, _SECONDS, "wait before an open breaker lets one call try"] = 2.0,
    ) -> None:
        # Reasons. io_threads: vLLM's fs tier uses 32, of which a local disk keeps about 8 busy. batch_records: few enough that a batch is
        # spread over threads. lookup_timeout_s: longer than that and a prefill of some thousand tokens is done. load_timeout_s:
        # a request waits for it. min_bytes_per_s: half of a 1 Gbit/s link. close_timeout_s: service managers kill after 10.
        # hit_ttl_s: evictors work in minutes. max_hits_per_request: one is enough to converge when a prefix is larger than the host tier.
        # staging_bytes: io_threads batches of 16 records of 2 MiB. breaker_probe_s: a restart of a store takes seconds.
        self.io_threads = io_threads
        self.batch_records = batch_records
        self.verify = verify
        self.lookup_timeout_s = lookup_timeout_s
        self.load_timeout_s = load_timeout_s
        self.store_timeout_s = store_timeout_s
        self.min_bytes_per_s = min_bytes_per_s
        self.drain_timeout_s = drain_timeout_s
        self.close_timeout_s = close_timeout_s
        self.hit_ttl_s = hit_ttl_s
        self.max_known_keys = max_known_keys
        self.max_hits_per_request = max_hits_per_request
        self.staging_bytes = staging_bytes
        self.max_queued_store_bytes = max_queued_store_bytes
        self.max_quarantined_bytes = max_quarantined_bytes
        self.retries = retries
        self.retry_base_s = retry_base_s
        self.breaker_failures = breaker_failures
        self.breaker_probe_s = breaker_probe_s

    def __repr__(self) -> str:
        changed: dict[str, Any] = {
            name: getattr(self, name)
            for name, parameter in inspect.signature(TierSettings).parameters.items()
            if getattr(self, name) != parameter.default
        }
        return "TierSettings(" + ", ".join(f"{name}={value!r}" for name, value in changed.items()) + ")"
