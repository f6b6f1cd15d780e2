"""The table of requirements is sound."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from kvstore_sdk_conformance import checks
from kvstore_sdk_conformance.check import requirement_of
from kvstore_sdk_conformance.requirement import Level
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS, below

CHECKS = Path(checks.__file__).parent


def test_ids_are_unique_and_of_one_form_for_each_profile() -> None:
    assert len(BY_ID) == len(REQUIREMENTS)
    prefixes: dict[str, str] = {}
    for requirement in REQUIREMENTS:
        match = re.fullmatch(r"KV-([A-Z]+)-(\d\d)", requirement.id)
        assert match, requirement.id
        assert prefixes.setdefault(match[1], requirement.profile.value) == requirement.profile.value
    assert len(set(prefixes.values())) == len(prefixes)


def test_a_requirement_builds_on_others_and_never_on_itself() -> None:
    for requirement in REQUIREMENTS:
        assert set(requirement.builds_on) <= set(BY_ID), requirement.id
        assert requirement.id not in below(requirement.id), requirement.id


def test_a_sentence_says_its_level_and_both_texts_are_sentences() -> None:
    for requirement in REQUIREMENTS:
        assert requirement.level.value in requirement.sentence, requirement.id
        other = Level.SHOULD if requirement.level is Level.MUST else Level.MUST
        assert other.value not in requirement.sentence, requirement.id
        assert requirement.sentence.endswith("."), requirement.id
        assert requirement.why.endswith("."), requirement.id


def test_every_requirement_is_proved_by_a_check_and_every_check_proves_one() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(CHECKS.glob("test_*.py")):
        module = importlib.import_module(f"kvstore_sdk_conformance.checks.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and callable(function):
                requirement = requirement_of(function)
                assert requirement is not None, f"{path.name}: {name} proves nothing"
                found.setdefault(requirement.id, []).append(name)
    assert set(found) == set(BY_ID)
    names = [name for several in found.values() for name in several]
    assert len(names) == len(set(names)), "-k selects a check by its name"
