"""Which file gets which form of the report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from kvstore_sdk.backend import ConfigError
from kvstore_sdk_conformance.report.badge import NoBadge, badge
from kvstore_sdk_conformance.report.markdown import markdown
from kvstore_sdk_conformance.report.report import Report

__all__ = ["check_path", "write"]


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2) + "\n"


def _badge(report: Report) -> str:
    return json.dumps(badge(report)) + "\n"


# The longest ending first: a badge is JSON as well.
_FORMS: dict[str, Callable[[Report], str]] = {".badge.json": _badge, ".json": _json, ".md": markdown}


def check_path(path: Path) -> None:
    """Refuse, before a run, what could not be written after it. Nothing is created.

    Raises:
        ConfigError: the name asks for no form of the report, or the file cannot be written.
    """
    problem = None
    if _form(path) is None:
        problem = f"must end in {', '.join(_FORMS)}"
    elif path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: permission denied"
    if problem is not None:
        raise ConfigError("conformance", "report", f"{path} {problem}")


def write(report: Report, path: Path) -> str:
    """Write the report in the form that the name of the file asks for.

    Returns:
        Why a badge was not written, if that is so; otherwise nothing.

    Raises:
        OSError: the file cannot be written.
    """
    form = _form(path)
    assert form is not None, "check_path was called before"
    try:
        text = form(report)
    except NoBadge as reason:
        return f"{path} was not written: {reason}"
    path.write_text(text, encoding="utf-8")
    return ""


def _form(path: Path) -> Callable[[Report], str] | None:
    return next((form for ending, form in _FORMS.items() if path.name.endswith(ending)), None)
