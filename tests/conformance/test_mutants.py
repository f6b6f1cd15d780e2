"""The suite finds every fault, and names the requirement that it breaks and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutants_answers
import mutants_atomicity
import mutants_buffers
import mutants_capacity
import mutants_close
import mutants_concurrency
import mutants_deletion
import mutants_durability
import mutants_errors
import mutants_limits
import mutants_listing
import mutants_liveness
import mutants_modes
import mutants_more
import mutants_names
import mutants_performance
import mutants_records
import mutants_regions
import mutants_sharing
import mutants_tier
import mutants_vllm
import pytest
from mutant import Mutant
from suite_runner import MANY, QUICK, run_suite

from kvstore_sdk_conformance.requirement import Level, Profile
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS, below

MUTANTS: list[type[Mutant]] = [
    *mutants_atomicity.MUTANTS,
    *mutants_answers.MUTANTS,
    *mutants_buffers.MUTANTS,
    *mutants_limits.MUTANTS,
    *mutants_modes.MUTANTS,
    *mutants_names.MUTANTS,
    *mutants_records.MUTANTS,
    *mutants_capacity.MUTANTS,
    *mutants_concurrency.MUTANTS,
    *mutants_deletion.MUTANTS,
    *mutants_durability.MUTANTS,
    *mutants_listing.MUTANTS,
    *mutants_errors.MUTANTS,
    *mutants_liveness.MUTANTS,
    *mutants_close.MUTANTS,
    *mutants_more.MUTANTS,
    *mutants_regions.MUTANTS,
    *mutants_performance.MUTANTS,
    *mutants_sharing.MUTANTS,
    *mutants_tier.MUTANTS,
]

COSTLY = {Profile.LIVENESS, Profile.DURABILITY, Profile.SHARING, Profile.ATOMICITY, Profile.CAPACITY, Profile.TIER, Profile.PERFORMANCE}
"""Their checks wait for deadlines, start processes or move much."""


def runs() -> Iterator[Any]:
    """One fault for each requirement, and all others where they cost little. The rest is for `make test-all`."""
    seen: set[str] = set()
    for mutant in MUTANTS:
        costly = mutant.breaks in seen and BY_ID[mutant.breaks].profile in COSTLY
        seen.add(mutant.breaks)
        name = f"{mutant.__module__.removeprefix('mutants_')}-{mutant.__name__}"
        yield pytest.param(mutant, id=name, marks=[pytest.mark.long] if costly else [])


@pytest.mark.parametrize("mutant", [*runs()])
def test_a_fault_breaks_its_requirement_and_no_other(mutant: type[Mutant], tmp_path: Path) -> None:
    profiles = dict.fromkeys(["core", *mutant.profiles, BY_ID[mutant.breaks].profile.value])
    options = MANY if mutant.breaks == "KV-CORE-24" else QUICK
    ran = run_suite(f"{mutant.__module__}:{mutant.__name__}.open", tmp_path, *profiles, options=options)
    wanted = "advisory" if BY_ID[mutant.breaks].level is Level.SHOULD else "fail"
    assert ran.result(mutant.breaks)["status"] == wanted
    assert ran.ids("fail") | ran.ids("advisory") <= {mutant.breaks}
    assert ran.ids("error") == set()
    for id_ in ran.ids("blocked"):
        # By what it builds on, or by what its own check met on the way.
        blockers = below(id_) | set(ran.result(id_)["blockers"])
        assert mutant.breaks in blockers, f"{id_} is blocked, but does not build on {mutant.breaks}"
    assert ran.code == (0 if wanted == "advisory" else 1)


def test_every_must_has_a_fault_that_breaks_it() -> None:
    musts = {requirement.id for requirement in REQUIREMENTS if requirement.level is Level.MUST}
    # Those of engines are run with the tests of the adapter.
    assert musts - {mutant.breaks for mutant in (*MUTANTS, *mutants_vllm.MUTANTS)} == set()
