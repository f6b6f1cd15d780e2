"""The content of every report."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from typing import Any

from kvstore_sdk_conformance.outcome import Result, Status, Verdict, verdict
from kvstore_sdk_conformance.requirement import CONTRACT_VERSION, Level, Profile
from kvstore_sdk_conformance.run import Run

__all__ = ["FOUND_BROKEN", "Report"]


FOUND_BROKEN = (Status.FAIL, Status.ADVISORY, Status.DEVIATION, Status.ERROR)


@dataclass(frozen=True)
class Report:
    """One run, without secrets.

    Attributes:
        suite_version: Of the SDK that the suite came with.
        contract_version: Of the table of requirements.
        backend: The target as it was given.
        implementation: Name of the backend's class.
        capabilities: As declared.
        surfaces: Optional protocols that it implements.
        seed: Reproduces the run.
        largest_bytes: Largest record that was tried.
        is_bounded: Whether it was so because the store has no room for more.
        at: When it ended, in UTC.
        seconds: How long it took.
        python: Version of the interpreter.
        platform: Operating system and architecture.
        profiles: Those that were checked.
        verdicts: For each of them, and what there is to say about it.
        results: One for each requirement of the profiles, and for others that were found broken on the way.
        stale: Declared deviations that did not happen.
        strict: Whether a SHOULD counted like a MUST.
    """

    suite_version: str
    contract_version: str
    backend: str
    implementation: str
    capabilities: Mapping[str, Any]
    surfaces: Sequence[str]
    seed: int
    largest_bytes: int
    is_bounded: bool
    at: str
    seconds: float
    python: str
    platform: str
    profiles: Sequence[Profile]
    verdicts: Mapping[Profile, tuple[Verdict, str]]
    results: Mapping[str, Result]
    stale: Sequence[str]
    strict: bool

    @classmethod
    def of(cls, run: Run, results: Mapping[str, Result], stale: Sequence[str], redact: Callable[[str], str], seconds: float) -> Report:
        """Of a run that has ended after `seconds`."""
        profiles = [profile for profile in Profile if profile in run.profiles]
        declared, capacity_bytes = run.offer.capabilities, run.offer.capacity_bytes
        half = capacity_bytes // 2 if capacity_bytes is not None else run.largest_bytes
        capabilities = {
            name: value.value if isinstance(value := getattr(declared, name), Enum) else value for name in declared.__dataclass_fields__
        }
        return cls(
            suite_version=version("kvstore-sdk"),
            contract_version=CONTRACT_VERSION,
            backend=redact(run.target.target),
            implementation=run.offer.name,
            capabilities=capabilities,
            surfaces=run.offer.surfaces,
            seed=run.seed,
            largest_bytes=min(run.largest_bytes, declared.max_record_bytes, half),
            is_bounded=half < min(run.largest_bytes, declared.max_record_bytes),
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            seconds=round(seconds, 3),
            python=platform.python_version(),
            platform=platform.platform(),
            profiles=profiles,
            verdicts={profile: verdict(profile, results) for profile in profiles},
            results={id_: r for id_, r in results.items() if r.requirement.profile in run.profiles or r.status in FOUND_BROKEN},
            stale=stale,
            strict=run.strict,
        )

    def counts(self, level: Level) -> dict[str, int]:
        """How many requirements of a level have each status; those that none has are left out."""
        found = Counter(result.status for result in self.results.values() if result.requirement.level is level)
        return {status.value: found[status] for status in Status if found[status]}

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "kvstore-sdk conformance report",
            "suite_version": self.suite_version,
            "contract_version": self.contract_version,
            "backend": self.backend,
            "implementation": self.implementation,
            "capabilities": dict(self.capabilities),
            "surfaces": list(self.surfaces),
            "seed": self.seed,
            "largest_bytes": self.largest_bytes,
            "at": self.at,
            "seconds": self.seconds,
            "python": self.python,
            "platform": self.platform,
            "strict": self.strict,
            "verdicts": {profile.value: {"verdict": found.value, "note": note} for profile, (found, note) in self.verdicts.items()},
            "counts": {level.value: self.counts(level) for level in Level},
            "requirements": [result.to_json() for result in self.results.values()],
            "stale_deviations": list(self.stale),
        }
