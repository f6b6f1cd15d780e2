"""The conformance suite's profile vllm: good backends pass it, and a fault breaks its requirement and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The suite's own tests have the helpers; processes that the suite starts look where this one does.
sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import mutants_vllm
from mutant import Mutant
from suite_runner import run_suite

# Four or five engines, one after another.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("target", ["memory:", "fs"])
def test_engines_answer_from_a_good_backend(target: str, tmp_path: Path) -> None:
    ran = run_suite(target, tmp_path, "vllm")
    assert (ran.code, ran.verdict("vllm"), ran.ids("pass")) == (0, "CONFORMANT", {"KV-VLLM-01", "KV-VLLM-02"})


@pytest.mark.parametrize("mutant", mutants_vllm.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_breaks_its_requirement_and_no_other(mutant: type[Mutant], tmp_path: Path) -> None:
    ran = run_suite(f"{mutant.__module__}:{mutant.__name__}.open", tmp_path, "core", "vllm")
    assert ran.ids("fail") | ran.ids("error") == {mutant.breaks}
    assert ran.ids("blocked") <= {"KV-VLLM-02"}
