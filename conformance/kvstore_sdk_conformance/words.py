"""What profiles and needs mean, for readers of lists, pages and reports."""

from __future__ import annotations

from kvstore_sdk_conformance.requirement import Need, Profile

__all__ = ["NEEDS", "PROFILES"]

PROFILES: dict[Profile, str] = {
    Profile.CORE: "Answers, order, sizes, names, modes and buffers are as the contract says.",
    Profile.ATOMICITY: "A record is whole or absent for every reader, whatever becomes of its writer.",
    Profile.CONCURRENCY: "Calls from several threads at once get the answers that they would get alone.",
    Profile.LIVENESS: "Deadlines are kept, memory is left alone afterwards, and close and fork end well.",
    Profile.ERRORS: "Failures say what went wrong, names stay in their location, and secrets stay secret.",
    Profile.SHARING: "Processes that open one location see each other's records at once.",
    Profile.DURABILITY: "What was stored survives `kill -9` of whoever stored it, and killed writers are in nobody's way.",
    Profile.DELETION: "Records can be removed, also while others read them.",
    Profile.LISTING: "A walk shows every record once, by its prefix, also while the store is in use.",
    Profile.CAPACITY: "Usage is counted right, and a bound on it holds.",
    Profile.REGIONS: "Memory that was announced is served, also where other memory was before.",
    Profile.TIER: "The SDK's Tier works on it, also while faults are injected around it.",
    Profile.PERFORMANCE: "Figures, and what must not grow with the size of a record, a call or the store. Only when asked for.",
    Profile.VLLM: "Real vLLM engines on CPU store and load through it. Only when asked for.",
}
"""One sentence on each."""

NEEDS: dict[Need, str] = {
    Need.WRITABLE: "a backend that does not declare read_only",
    Need.READ_ONLY: "a backend that declares read_only",
    Need.SEVERAL_PARTS: "max_parts above 1",
    Need.SEVERAL_ITEMS: "max_batch above 1",
    Need.SEVERAL_CALLS: "max_concurrency above 1",
    Need.SHARED: "a backend that declares shared",
    Need.READ_AFTER_WRITE: "a backend that declares read_after_write",
    Need.PROCESS_CRASH: "durability PROCESS_CRASH",
    Need.IN_DOUBT: "a backend that declares in_doubt",
    Need.DELETE: "SupportsDelete",
    Need.LIST: "SupportsList",
    Need.USAGE: "SupportsUsage",
    Need.BOUNDED: "a capacity of at most 256 MiB, which an option such as max_bytes may set for the run",
    Need.REGIONS: "SupportsRegions",
    Need.SECRETS: "an option whose name says that it is secret",
    Need.VLLM: "vLLM, installed beside the suite",
}
"""What has to be there for a requirement to apply."""
