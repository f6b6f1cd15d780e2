"""From what a check raised to what it means."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, NotApplicable
from kvstore_sdk_conformance.outcome import Result, Status
from kvstore_sdk_conformance.requirement import Requirement
from kvstore_sdk_conformance.requirements import BY_ID

__all__ = ["findings_of"]

_OURS = Path(__file__).parent


def findings_of(requirement: Requirement, raised: BaseException | None, redact: Callable[[str], str]) -> list[Result]:
    """What is known after a check of `requirement`: about it first, and about another one that was found broken on the way."""
    if raised is None:
        return [Result(requirement, Status.PASS)]
    if isinstance(raised, NotApplicable):
        return [Result(requirement, Status.NOT_APPLICABLE, reason=f"not applicable: {redact(str(raised))}")]
    if not isinstance(raised, ConformanceFailure):
        text = "".join(traceback.format_exception(raised))
        return [Result(requirement, Status.ERROR, seen=redact(f"{type(raised).__name__}: {raised}"), traceback=redact(text))]
    broken = BY_ID[raised.breaks] if raised.breaks is not None else requirement
    failed = Result(
        broken,
        Status.FAIL,
        expected=redact(raised.expected),
        seen=redact(raised.seen),
        note=redact("\n".join([raised.note, *getattr(raised, "__notes__", ())]).strip()),
        traceback=redact(_vendors_traceback(raised)),
    )
    if broken is requirement:
        return [failed]
    failed.met_by = requirement.id
    return [Result(requirement, Status.BLOCKED, reason=f"blocked by {broken.id}", blockers=(broken.id,)), failed]


def _vendors_traceback(raised: ConformanceFailure) -> str:
    """The frames of the backend's own code, if it raised."""
    if not isinstance(raised, CallRaised):
        return ""
    frames = traceback.extract_tb(raised.error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if _OURS in Path(frame.filename).parents]
    own = frames[ours[-1] + 1 :] if ours else frames
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(raised.error)])
