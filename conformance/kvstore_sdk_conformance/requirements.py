"""The table of requirements, read from `requirements.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from kvstore_sdk_conformance.requirement import Level, Need, Profile, Requirement

__all__ = ["BY_ID", "REQUIREMENTS", "below"]


def _read() -> Iterator[Requirement]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for profile, rows in table.items():
        for row in rows:
            yield Requirement(
                id=row["id"],
                level=Level(row["level"]),
                profile=Profile(profile),
                sentence=row["sentence"],
                why=row["why"],
                needs=tuple(Need[name] for name in row.get("needs", ())),
                builds_on=tuple(row.get("builds_on", ())),
            )


REQUIREMENTS: tuple[Requirement, ...] = tuple(_read())
"""In the order in which they are checked."""

BY_ID: dict[str, Requirement] = {requirement.id: requirement for requirement in REQUIREMENTS}


def below(id_: str) -> set[str]:
    """What a requirement builds on, at any distance."""
    found: set[str] = set()
    left = list(BY_ID[id_].builds_on)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += BY_ID[one].builds_on
    return found
