"""Runs the suite as a vendor does, in this process, and returns its JSON report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--kvstore-largest=1MiB", "--kvstore-examples=2")
"""Enough to see what else a fault breaks, and for as many kills of a writer as with more."""
MANY = ("--kvstore-largest=1MiB", "--kvstore-examples=15")
"""For what only sequences of operations show."""


@dataclass(frozen=True)
class Ran:
    """A run that has ended.

    Attributes:
        code: Exit code of pytest.
        report: The JSON report.
    """

    code: int
    report: dict[str, Any]

    def ids(self, status: str) -> set[str]:
        """The requirements with this status."""
        return {found["id"] for found in self.report["requirements"] if found["status"] == status}

    def result(self, id_: str) -> dict[str, Any]:
        found: dict[str, Any] = next(found for found in self.report["requirements"] if found["id"] == id_)
        return found

    def verdict(self, profile: str) -> str:
        found: str = self.report["verdicts"][profile]["verdict"]
        return found


def run_suite(target: str, folder: Path, *profiles: str, options: Sequence[str] = QUICK) -> Ran:
    """Run the suite on a target; `folder` takes the report, and is where pytest thinks it was started from."""
    report = folder / "report.json"
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    arguments = [
        "--pyargs",
        "kvstore_sdk_conformance",
        "-c",
        str(folder / "pytest.ini"),
        "--rootdir",
        str(folder),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    arguments += ["--kvstore-backend", target, "--kvstore-report", str(report), *options]
    arguments += [f"--kvstore-profile={profile}" for profile in profiles]
    code = pytest.main(arguments)
    return Ran(int(code), json.loads(report.read_text()) if report.exists() else {})
