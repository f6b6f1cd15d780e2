"""docs/requirements.md is the table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from kvstore_sdk_conformance.requirement import Need, Profile
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS
from kvstore_sdk_conformance.words import NEEDS, PROFILES

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "requirements.md"


def test_the_page_is_made_from_the_table() -> None:
    spec = importlib.util.spec_from_file_location("requirements_page", ROOT / "tools" / "requirements_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert PAGE.read_text() == module.written(), "run: make docs"


def test_the_page_has_every_requirement_once_under_the_anchor_that_reports_point_to() -> None:
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == [requirement.id for requirement in REQUIREMENTS]
    assert [heading.lower() for heading in headings] == [requirement.anchor for requirement in REQUIREMENTS]


def test_every_profile_and_need_has_its_words() -> None:
    assert set(PROFILES) == set(Profile)
    assert set(NEEDS) == set(Need)


def test_what_a_requirement_builds_on_is_another_one_and_never_a_circle() -> None:
    def below(id_: str, path: tuple[str, ...]) -> None:
        assert id_ not in path, f"{id_} builds on itself: {path}"
        for on in BY_ID[id_].builds_on:
            assert on in BY_ID
            below(on, (*path, id_))

    for id_ in BY_ID:
        below(id_, ())
