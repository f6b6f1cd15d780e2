"""The suite finds nothing wrong with backends that are right, however unusual they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_runner import QUICK, run_suite

PROFILES = ("liveness", "errors", "regions")


@pytest.mark.parametrize("name", ["in_doubt", "regions_in_doubt", "narrow", "slow", "unsure", "forking"])
def test_a_right_backend_breaks_nothing(name: str, tmp_path: Path) -> None:
    ran = run_suite(f"references:open_{name}", tmp_path, *PROFILES, options=[*QUICK, f"--kvstore-seed={len(name)}"])
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") | ran.ids("advisory") == set()
    assert ran.code == 0
    assert ran.verdict("liveness") == ran.verdict("errors") == "CONFORMANT"


def test_answers_that_are_in_doubt_now_and_then_break_nothing_elsewhere(tmp_path: Path) -> None:
    ran = run_suite("references:open_in_doubt", tmp_path, "core", "atomicity")
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") == set()


def test_a_store_may_count_whole_blocks(tmp_path: Path) -> None:
    ran = run_suite("references:open_blocks", tmp_path, "core", "deletion", "capacity")
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") == set()
    assert ran.verdict("capacity") == "CONFORMANT"


@pytest.mark.parametrize("name", ["read_only", "raising_read_only"])
def test_a_right_backend_that_takes_no_writes_breaks_nothing(name: str, tmp_path: Path) -> None:
    ran = run_suite(f"references:open_{name}", tmp_path, "core", "liveness", "errors")
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") | ran.ids("advisory") == set()
    assert {ran.verdict(profile) for profile in ("core", "liveness", "errors")} == {"CONFORMANT"}


def test_what_only_some_backends_have_is_judged_where_it_is(tmp_path: Path) -> None:
    ran = run_suite(
        "references:open_regions_in_doubt", tmp_path, "liveness", "regions", options=[*QUICK, "-k", "settled or regions or region"]
    )
    assert ran.result("KV-LIVE-07")["status"] == "pass"
    assert {ran.result(f"KV-REG-0{number}")["status"] for number in (1, 2, 3)} == {"pass"}


def test_a_secret_that_was_given_is_found_and_not_repeated(tmp_path: Path) -> None:
    options = [*QUICK, "--kvstore-option=secret_key=hunter2222"]
    ran = run_suite("mutants_errors:ShowsItsSecretInItsRepr.open", tmp_path, "errors", options=options)
    assert ran.ids("fail") == {"KV-ERR-04"}
    assert "hunter2222" not in (tmp_path / "report.json").read_text()


def test_a_secret_does_not_stand_in_the_line_that_says_why_nothing_was_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--kvstore-option=secret_key=hunter2222"]
    ran = run_suite("mutants_errors:IsDeniedWithItsSecretInTheOpen.open", tmp_path, "errors", options=options)
    said = "".join(capfd.readouterr())
    assert ran.code == 4
    assert "signature of *** does not match" in said
    assert "hunter2222" not in said
