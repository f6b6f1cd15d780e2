"""A badge for a README, as shields.io reads it from a URL."""

from __future__ import annotations

from typing import Any

from kvstore_sdk_conformance.outcome import Verdict
from kvstore_sdk_conformance.report.report import Report
from kvstore_sdk_conformance.requirement import Profile

__all__ = ["NoBadge", "badge"]


class NoBadge(Exception):  # not an error: the run says too little
    """The run does not say enough for a badge; the text says why."""


def badge(report: Report) -> dict[str, Any]:
    """The profiles that the backend holds. One that it breaks turns the badge red, and is named alone.

    Raises:
        NoBadge: the run left something out.
    """
    by_verdict = {verdict: [p.value for p, (found, _) in report.verdicts.items() if found is verdict] for verdict in Verdict}
    if by_verdict[Verdict.INCOMPLETE]:
        raise NoBadge(f"a badge is made from a complete run, and this one is incomplete in {', '.join(by_verdict[Verdict.INCOMPLETE])}")
    if Profile.CORE not in report.profiles:
        raise NoBadge("a badge is made from a run that has the profile core")
    if report.stale:
        raise NoBadge(f"declared deviations did not happen: {', '.join(report.stale)}")
    if broken := by_verdict[Verdict.NOT]:
        message, color = f"not conformant: {', '.join(broken)}", "red"
    else:
        partly = by_verdict[Verdict.PARTLY]
        held = [f"{name} (partly)" if name in partly else name for name in _in_order(report, partly + by_verdict[Verdict.CONFORMANT])]
        message, color = ", ".join(held), "yellow" if partly else "brightgreen"
    return {"schemaVersion": 1, "label": f"kvstore-sdk {report.contract_version}", "message": message, "color": color}


def _in_order(report: Report, names: list[str]) -> list[str]:
    return [profile.value for profile in report.profiles if profile.value in names]
