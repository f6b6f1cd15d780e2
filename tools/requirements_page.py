"""Write docs/requirements.md, the table of requirements as people read it: `make docs`. A test compares."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from kvstore_sdk_conformance.requirement import CONTRACT_VERSION, Level, Profile, Requirement
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS
from kvstore_sdk_conformance.words import NEEDS, PROFILES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "requirements.md"
WIDTH = 140


def page() -> Iterator[str]:
    musts = sum(requirement.level is Level.MUST for requirement in REQUIREMENTS)
    yield "# Requirements"
    yield (
        f"What a backend promises, one clause each: version {CONTRACT_VERSION} of the contract, {musts} MUST and "
        f"{len(REQUIREMENTS) - musts} SHOULD. The conformance suite has a check for each of them; [conformance.md](conformance.md) says "
        "how to run it. This page is made from the suite's own table by `make docs`, and `kvstore conformance --explain KV-CORE-01` "
        "prints one entry of it anywhere."
    )
    yield (
        "A requirement *applies* to a backend that offers what it *needs*. One that *builds on* others cannot be judged while one of those "
        "is broken: it is *blocked* then."
    )
    yield "\n".join(["| profile | what it says | requirements |", "|---|---|---|", *map(_row, Profile)])
    for profile in Profile:
        yield f"## {profile.value}"
        yield PROFILES[profile]
        for requirement in _of(profile):
            yield from _entry(requirement)


def _row(profile: Profile) -> str:
    return f"| [{profile.value}](#{profile.value}) | {PROFILES[profile]} | {len(_of(profile))} |"


def _of(profile: Profile) -> list[Requirement]:
    return [requirement for requirement in REQUIREMENTS if requirement.profile is profile]


def _entry(requirement: Requirement) -> Iterator[str]:
    yield f"### {requirement.id}"
    yield f"**{requirement.level.value}.** {requirement.sentence}"
    yield f"Why: {requirement.why}"
    facts = []
    if requirement.needs:
        facts.append(f"Needs: {', '.join(NEEDS[need] for need in requirement.needs)}.")
    if requirement.builds_on:
        facts.append(f"Builds on: {', '.join(f'[{id_}](#{BY_ID[id_].anchor})' for id_ in requirement.builds_on)}.")
    if facts:
        yield "  \n".join(facts)


def written() -> str:
    paragraphs = (text if text.startswith(("|", "#")) else _wrapped(text) for text in page())
    return "\n\n".join(paragraphs) + "\n"


def _wrapped(text: str) -> str:
    # Two spaces at the end of a line are a line break.
    lines = (textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in text.split("  \n"))
    return "  \n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(written())
