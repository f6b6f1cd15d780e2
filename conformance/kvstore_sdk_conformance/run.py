"""One run of the suite: what is tested, and what was found so far."""

from __future__ import annotations

import os
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_sdk.backend import Bounds, ConfigError
from kvstore_sdk_conformance.offer import DEFAULT_PROFILES, Offer
from kvstore_sdk_conformance.requirement import Level, Profile, Requirement
from kvstore_sdk_conformance.requirements import BY_ID
from kvstore_sdk_conformance.target import Target

__all__ = [
    "LARGEST",
    "MAX_HANGS",
    "Run",
    "import_path",
    "parse_examples",
    "parse_options",
    "parse_profiles",
    "parse_seed",
    "read_deviations",
]

WHERE = "conformance"
MAX_HANGS = 4
"""A backend that hangs again and again costs 15 s each time; after so many what is left is blocked."""
FROM_ENVIRONMENT = "env:"
LARGEST = Bounds(ge=4096, le=1 << 40)


@dataclass
class Run:
    """What the options of the command say, and what the checks that ran in this process found.

    Attributes:
        target: The backend under test.
        offer: What it offers.
        profiles: Which are checked.
        seed: Of everything that is drawn.
        deviations: Requirements that may be broken, each with its reason.
        strict: A SHOULD counts like a MUST.
        largest_bytes: Largest record that is tried.
        examples: Of hypothesis, for each stateful check.
        broken: Requirements that are known to be broken, in this process.
        held: Requirements whose own check held, in this process.
        hangs: Calls that did not return, in this process.
    """

    target: Target
    offer: Offer
    profiles: frozenset[Profile]
    seed: int
    deviations: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    largest_bytes: int = 256 << 20
    examples: int = 40
    broken: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    hangs: int = 0

    def blocked_by(self, requirement: Requirement) -> str | None:
        """A broken requirement without which this one cannot be judged."""
        if self.hangs >= MAX_HANGS and requirement.id != "KV-LIVE-03":
            return "KV-LIVE-03"
        return next((id_ for id_ in requirement.builds_on if id_ in self.broken), None)

    def is_failure(self, requirement: Requirement) -> bool:
        """Whether breaking it fails the run, if it is not declared."""
        return self.strict or requirement.level is Level.MUST


def parse_profiles(names: Sequence[str]) -> frozenset[Profile]:
    """`core`, `all`; several may be given, also separated by commas. None at all: those that are checked by default.

    Raises:
        ConfigError: there is no such profile.
    """
    wanted = [name for text in names for name in text.split(",")]
    found: set[Profile] = set()
    for name in wanted:
        if name == "all":
            found |= set(Profile)
            continue
        try:
            found.add(Profile(name))
        except ValueError:
            choices = ", ".join(profile.value for profile in Profile)
            raise ConfigError(WHERE, "profile", f"{name!r} is none; choose from {choices}, all") from None
    return frozenset(found) or DEFAULT_PROFILES


def parse_options(pairs: Sequence[str]) -> dict[str, str]:
    """`name=value`, each; or `name=env:VARIABLE`, whose value no other user of the machine can see.

    Raises:
        ConfigError: one is not of that form, one is given twice, or a variable is not set.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # Nothing of it is shown: it may be a secret.
            raise ConfigError(WHERE, "option", "must be written as name=value, or name=env:VARIABLE")
        if name in found:
            raise ConfigError(WHERE, "option", f"{name!r} is given twice; leave one out")
        if value.startswith(FROM_ENVIRONMENT):
            variable = value.removeprefix(FROM_ENVIRONMENT)
            if variable not in os.environ:
                raise ConfigError(WHERE, "option", f"{name!r} takes its value from the environment variable {variable!r}, which is not set")
            value = os.environ[variable]
        found[name] = value
    return found


def parse_seed(text: str) -> int:
    """A whole number, or `random` for a new one.

    Raises:
        ConfigError: it is neither.
    """
    if text == "random":
        return random.SystemRandom().randrange(1 << 32)
    return _whole_number("seed", text, 0, ", or random")


def parse_examples(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        ConfigError: it is none.
    """
    return _whole_number("examples", text, 1)


def read_deviations(path: str | None) -> dict[str, str]:
    """A TOML file: the id of a requirement, and why the backend breaks it.

    Raises:
        ConfigError: the file cannot be read, an id is unknown, or a reason is missing.
    """
    if path is None:
        return {}
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(WHERE, "deviations", f"{path} cannot be read: {reason}") from None
    for id_, reason in found.items():
        if id_ not in BY_ID:
            raise ConfigError(WHERE, "deviations", f"{path}: {id_!r} is no requirement; kvstore conformance --list shows them")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(WHERE, "deviations", f"{path}: {id_} needs a reason, as text")
    return found


def _whole_number(field: str, text: str, least: int, alternative: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(WHERE, field, f"{text!r} must be a whole number from {least} on{alternative}")
    return number


def import_path() -> tuple[str, ...]:
    """Where a vendor's module is looked for, before everything else: where the command was started."""
    return (os.getcwd(),)
