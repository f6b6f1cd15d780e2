"""From what a check raised to what it means."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, NotApplicable
from kvstore_sdk_conformance.outcome import Result, Status
from kvstore_sdk_conformance.plain import plain
from kvstore_sdk_conformance.requirement import Requirement
from kvstore_sdk_conformance.requirements import BY_ID

__all__ = ["findings_of"]

TRACEBACK = 8000
"""Characters of one, with its middle left out."""
_OURS = Path(__file__).parent


def findings_of(
    requirement: Requirement, raised: BaseException | None, redact: Callable[[str], str], applies: Callable[[Requirement], bool]
) -> list[Result]:
    """What is known after a check of `requirement`: about it first, and about another one that was found broken on the way.

    What would break one that does not apply to this backend breaks the one that was being checked.
    """

    def clean(text: str) -> str:
        return plain(redact(text))

    if raised is None:
        return [Result(requirement, Status.PASS)]
    if isinstance(raised, NotApplicable):
        return [Result(requirement, Status.NOT_APPLICABLE, reason=f"not applicable: {clean(str(raised))}")]
    if not isinstance(raised, ConformanceFailure):
        text = plain(redact("".join(traceback.format_exception(raised))), TRACEBACK)
        return [Result(requirement, Status.ERROR, seen=clean(f"{type(raised).__name__}: {raised}"), traceback=text)]
    broken = BY_ID[raised.breaks] if raised.breaks is not None and applies(BY_ID[raised.breaks]) else requirement
    failed = Result(
        broken,
        Status.FAIL,
        expected=clean(raised.expected),
        seen=clean(raised.seen),
        note=clean("\n".join([raised.note, *getattr(raised, "__notes__", ())]).strip()),
        traceback=plain(redact(_vendors_traceback(raised)), TRACEBACK),
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
