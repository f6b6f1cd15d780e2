"""`python -m kvstore_sdk_conformance`: the table of requirements, printed. `kvstore conformance --list` and `--explain` start this."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from kvstore_sdk.backend import ConfigError
from kvstore_sdk_conformance.requirement import CONTRACT_VERSION, Profile, Requirement
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS
from kvstore_sdk_conformance.run import parse_profiles
from kvstore_sdk_conformance.words import NEEDS, PROFILES

__all__ = ["main"]

WIDTH = 100
EXIT_USAGE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Print requirements.

    Returns:
        0, or 4 where there is no such requirement or profile.
    """
    parser = argparse.ArgumentParser(prog="python -m kvstore_sdk_conformance", description="Print requirements of kvstore-sdk backends.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="one line for each requirement")
    what.add_argument("--explain", metavar="ID", action="append", help="all there is to say about one, such as KV-CORE-12; may be repeated")
    parser.add_argument("--profile", metavar="PROFILE", action="append", default=[], help="of these profiles only")
    given = parser.parse_args(arguments)
    try:
        lines = _listed(parse_profiles(given.profile or ["all"])) if given.list else _explained(given.explain)
        print("\n".join(lines))  # noqa: T201  # this is a command
        return 0
    except ConfigError as error:
        print(f"kvstore-sdk {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE


def _listed(profiles: frozenset[Profile]) -> Iterator[str]:
    yield f"contract {CONTRACT_VERSION}"
    for profile in Profile:
        if profile in profiles:
            yield f"\n{profile.value}: {PROFILES[profile]}"
            for requirement in REQUIREMENTS:
                if requirement.profile is profile:
                    yield f"  {requirement.id:<13}  {requirement.level.value:<6}  {requirement.sentence}"


def _explained(ids: Iterable[str]) -> Iterator[str]:
    for number, id_ in enumerate(ids):
        requirement = BY_ID.get(id_.strip().upper())
        if requirement is None:
            raise ConfigError("conformance", "explain", f"{id_!r} is no requirement; kvstore conformance --list shows them")
        yield from [""] * bool(number)
        yield from _explanation(requirement)


def _explanation(requirement: Requirement) -> Iterator[str]:
    yield f"{requirement.id} ({requirement.level.value}, {requirement.profile.value})"
    parts = [requirement.sentence, f"Why: {requirement.why}"]
    if requirement.needs:
        parts.append(f"Needs: {', '.join(NEEDS[need] for need in requirement.needs)}.")
    if requirement.builds_on:
        parts.append(f"Builds on: {', '.join(requirement.builds_on)}.")
    for part in parts:
        yield from textwrap.wrap(part, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
