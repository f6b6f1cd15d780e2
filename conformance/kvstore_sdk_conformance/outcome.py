"""What became of a requirement, and what follows for a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from kvstore_sdk_conformance.requirement import Level, Profile, Requirement
from kvstore_sdk_conformance.requirements import BY_ID, below
from kvstore_sdk_conformance.words import NEEDS

__all__ = ["Result", "Status", "Verdict", "judge", "verdict"]


class Status(Enum):
    """Of one requirement.

    Attributes:
        PASS: Every check of it held.
        FAIL: It is broken.
        ADVISORY: It is broken, and is a SHOULD.
        NOT_APPLICABLE: The backend does not offer what it is about.
        DEVIATION: It is broken, and declared to be.
        BLOCKED: It cannot be judged, because another one that it builds on is broken.
        ERROR: The suite, or the place it was to test in, is at fault.
        NOT_RUN: No check of it was run.
    """

    PASS = "pass"
    FAIL = "fail"
    ADVISORY = "advisory"
    NOT_APPLICABLE = "not-applicable"
    DEVIATION = "deviation"
    BLOCKED = "blocked"
    ERROR = "error"
    NOT_RUN = "not-run"


class Verdict(Enum):
    """Of one profile. A run that leaves anything out is never CONFORMANT."""

    CONFORMANT = "CONFORMANT"
    PARTLY = "PARTLY CONFORMANT"
    NOT = "NOT CONFORMANT"
    INCOMPLETE = "INCOMPLETE"
    NOT_CLAIMED = "NOT CLAIMED"


@dataclass
class Result:
    """What is known of one requirement after a run.

    Attributes:
        requirement: Which.
        status: What became of it.
        expected: What the contract asks for, when it is broken.
        seen: What there was instead.
        note: Where and when.
        reason: Why it was not judged, or why it deviates.
        replay: The calls that led to it, as lines of Python.
        replays: Whether these lines show it again, all by themselves.
        traceback: Of the backend's own code.
        check: Node id of the check that says so.
        seconds: What its checks took.
        figures: Measured, by name.
        blockers: Broken requirements without which this one cannot be judged.
        met_by: The requirement on whose way this one was found broken; "" for what its own check says.
    """

    requirement: Requirement
    status: Status = Status.NOT_RUN
    expected: str = ""
    seen: str = ""
    note: str = ""
    reason: str = ""
    replay: Sequence[str] = ()
    replays: bool = False
    traceback: str = ""
    check: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    blockers: Sequence[str] = ()
    met_by: str = ""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Result:
        own = {name: found[name] for name in _OWN if name in found}
        return cls(BY_ID[found["id"]], Status(found["status"]), **own)

    def to_json(self) -> dict[str, Any]:
        """Everything that a reader of a report needs, the requirement's own text included."""
        found = {name: getattr(self, name) for name in _OWN if getattr(self, name)}
        return {
            "id": self.requirement.id,
            "level": self.requirement.level.value,
            "profile": self.requirement.profile.value,
            "sentence": self.requirement.sentence,
            "why": self.requirement.why,
            "needs": [NEEDS[need] for need in self.requirement.needs],
            "builds_on": list(self.requirement.builds_on),
            "status": self.status.value,
            **found,
        }


_OWN = ("expected", "seen", "note", "reason", "blockers", "replay", "replays", "traceback", "check", "seconds", "figures", "met_by")


# The worst of several checks of one requirement counts.
_ORDER = (
    Status.NOT_RUN,
    Status.NOT_APPLICABLE,
    Status.PASS,
    Status.ADVISORY,
    Status.DEVIATION,
    Status.BLOCKED,
    Status.ERROR,
    Status.FAIL,
)


def judge(found: Sequence[Result]) -> dict[str, Result]:
    """One result for each requirement: the worst that its own checks found, or else what was found on the way of others.

    What failed, and builds at any distance on something whose own check failed, is blocked. So is a check on whose way something else was
    found broken; that counts, unless the check builds on a broken requirement itself: then it is a consequence. Nothing fails a requirement
    that does not apply: what was found to break it breaks the one that was being checked. The order of what was found does not matter.
    """
    results = {id_: Result(requirement) for id_, requirement in BY_ID.items()}
    for result in found:
        if not result.met_by:
            _keep_worse(results, result)
    met = [result for result in found if result.met_by and result.status in (Status.FAIL, Status.DEVIATION)]
    for result in met:
        if results[result.requirement.id].status is Status.NOT_APPLICABLE:
            _keep_worse(results, _as_own(result))
    broken = _broken(results)
    for result in met:
        before = results[result.requirement.id]
        if before.status is not Status.NOT_APPLICABLE and not below(result.met_by) & broken:
            _keep_worse(results, replace(result, seconds=0.0))
    _block(results, broken)
    return results


def _keep_worse(results: dict[str, Result], result: Result) -> None:
    """Of two results of a requirement the worse one stays, with the time and the figures of both."""
    before = results[result.requirement.id]
    worse = result if _ORDER.index(result.status) > _ORDER.index(before.status) else before
    results[result.requirement.id] = replace(worse, seconds=before.seconds + result.seconds, figures=before.figures | result.figures)


def _as_own(result: Result) -> Result:
    """What was found on the way of a check, as a finding of that check."""
    requirement = BY_ID[result.met_by]
    status = Status.FAIL if requirement.level is Level.MUST else Status.ADVISORY
    return replace(result, requirement=requirement, status=status, reason="", met_by="", seconds=0.0)


def _block(results: dict[str, Result], broken: set[str]) -> None:
    """Turn what builds on `broken`, at any distance, into blocked results. Each names what has to be mended first."""
    every = _broken(results)
    roots = {id_ for id_ in every if results[id_].status is Status.DEVIATION or not below(id_) & broken}
    for id_, result in results.items():
        under = below(id_)
        if result.status is Status.BLOCKED:
            on = set(result.blockers) & every or under & every
        elif result.status in (Status.FAIL, Status.ADVISORY, Status.ERROR):
            on = under & broken
        else:
            continue
        if on:
            blockers = sorted(on.union(*map(below, on)) & roots)
            results[id_] = replace(result, status=Status.BLOCKED, reason=f"blocked by {', '.join(blockers)}", blockers=blockers)


def _broken(results: Mapping[str, Result]) -> set[str]:
    return {id_ for id_, result in results.items() if result.status in (Status.FAIL, Status.DEVIATION)}


def verdict(profile: Profile, results: Mapping[str, Result]) -> tuple[Verdict, str]:
    """The verdict on a profile, and what there is to say about it."""
    musts = [result for result in results.values() if result.requirement.profile is profile and result.requirement.level is Level.MUST]
    # With --kvstore-strict a broken SHOULD is a failure like any other.
    musts += [r for r in results.values() if r.requirement.profile is profile and r not in musts and r.status is Status.FAIL]
    statuses = [result.status for result in musts]
    if all(status is Status.NOT_APPLICABLE for status in statuses):
        return Verdict.NOT_CLAIMED, ""
    excused = [r for r in musts if r.status is Status.BLOCKED and all(results[on].status is Status.DEVIATION for on in r.blockers)]
    if failed := statuses.count(Status.FAIL) + statuses.count(Status.BLOCKED) - len(excused):
        return Verdict.NOT, f"{failed} of {len(statuses)} requirements are broken or blocked"
    if unknown := statuses.count(Status.NOT_RUN) + statuses.count(Status.ERROR):
        return Verdict.INCOMPLETE, f"{unknown} of {len(statuses)} requirements not checked"
    if excused:
        # Nobody knows what of it is a consequence of what was declared.
        return Verdict.INCOMPLETE, f"{len(excused)} of {len(statuses)} requirements cannot be judged beside the declared deviations"
    if deviations := statuses.count(Status.DEVIATION):
        return Verdict.PARTLY, f"{deviations} declared deviation{'s' if deviations > 1 else ''}"
    return Verdict.CONFORMANT, ""
