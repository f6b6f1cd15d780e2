"""Both doors to the suite, from a vendor's folder: what is printed, written and returned, whatever that vendor's pytest is set to."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest
from vendor import ACME, Vendor

from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS

ROOT = Path(__file__).resolve().parent.parent.parent
SUITES = Path(os.environ.get("KVSTORE_SUITES", "/nonexistent"))
VERSIONS = [line.partition("==")[2] for line in (ROOT / "tools/pins/suites.txt").read_text().splitlines() if line.startswith("pytest==")]
NEWEST = VERSIONS[-1]
CORE = [requirement for requirement in REQUIREMENTS if requirement.profile.value == "core"]


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("sdk")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def vendor_with(version: str, sdk: Path, folder: Path) -> Vendor:
    python = SUITES / version / "bin" / "python"
    assert python.exists(), f"KVSTORE_SUITES has no pytest {version}: run `make test-core`"
    (folder / "acme_store.py").write_text(ACME)
    return Vendor(folder, python, sdk)


@pytest.fixture
def vendor(sdk: Path, tmp_path: Path) -> Vendor:
    return vendor_with(NEWEST, sdk, tmp_path)


# The same run, whoever starts it.


def test_both_doors_give_the_same_verdict(vendor: Vendor) -> None:
    one = vendor.pytest("--kvstore-report=one.json")
    other = vendor.conformance("--report=other.json")
    assert (one.code, other.code) == (0, 0), one.out + other.out
    assert "core:         CONFORMANT\n" in one.out
    assert "core:         CONFORMANT\n" in other.out
    statuses = [{found["id"]: found["status"] for found in vendor.report(name)["requirements"]} for name in ("one.json", "other.json")]
    assert statuses[0] == statuses[1]
    assert set(statuses[0]) == {requirement.id for requirement in CORE}
    assert (one.err, other.err) == ("", "")


def test_the_command_does_not_mind_what_the_folder_or_the_environment_say_about_pytest(vendor: Vendor) -> None:
    vendor.write(pytest_ini="[pytest]\naddopts = --no-such-option\n", conftest_py="raise RuntimeError('not for the suite')\n")
    done = vendor.conformance(env={"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"})
    assert done.code == 0, done.out + done.err
    assert "core:         CONFORMANT\n" in done.out
    assert {file.name for file in vendor.folder.iterdir()} == {"acme_store.py", "pytest.ini", "conftest.py"}


# What is broken is said by both, with how to see it again.


def test_a_broken_requirement_is_named_and_the_command_that_is_printed_shows_it_again(vendor: Vendor) -> None:
    first = vendor.conformance("--option", "fault=says yes", "--seed", "5")
    assert first.code == 1
    assert "KV-CORE-03 (MUST, core)" in first.out
    assert re.search(r"  expected  False for .*, which was never stored\n  seen      True\n", first.out)
    assert "core:         NOT CONFORMANT" in first.out
    [command] = set(re.findall(r"Run it alone: kvstore (conformance .*)", first.out))
    again = vendor.kvstore(*shlex.split(command))
    assert again.code == 1
    assert "KV-CORE-03    fail" in again.out
    expected = re.findall(r"  expected .*", first.out)
    assert expected == re.findall(r"  expected .*", again.out), "the printed seed shows the same"
    [rule] = set(re.findall(r"Rule: kvstore (conformance --explain \S+)", first.out))
    explained = vendor.kvstore(*rule.split())
    assert (explained.code, explained.err) == (0, "")
    assert BY_ID["KV-CORE-03"].why in " ".join(explained.out.split())


def test_the_failure_that_the_documentation_shows_is_what_is_printed(vendor: Vendor) -> None:
    vendor.write(acme_store_py=ACME.replace('fault=""', 'fault="says yes"'))
    done = vendor.kvstore("conformance", "acme_store:open_store", "-k", "test_exists_tells_what_is_there")
    shown = re.findall(r"^```\n(KV-CORE-03 .*?)^```$", (ROOT / "docs" / "conformance.md").read_text(), re.DOTALL | re.MULTILINE)
    printed = re.findall(r"^(KV-CORE-03 .*? Rule: .*?\n)", done.out, re.DOTALL | re.MULTILINE)
    name = re.compile(r"v1/[0-9a-f/]+-g0")
    assert [name.sub("NAME", text) for text in printed] == [name.sub("NAME", text) for text in shown]


def test_the_replay_that_is_printed_runs_without_pytest(vendor: Vendor) -> None:
    shown = vendor.pytest("--kvstore-option=fault=says yes", "-k", "test_exists_tells_what_is_there").out
    lines = shown.partition("Replay without pytest:\n")[2].partition("\n\n")[0].splitlines()
    replay = "\n".join(line.removeprefix("    ") for line in lines)
    done = vendor.run("-c", f"{replay}\nprint([name for name in dir() if name in ('a', 'store')])\nstore.discard()")
    assert done.code == 0, done.err
    assert "['a', 'store']" in done.out


def test_what_is_found_broken_while_another_requirement_is_checked_is_shown_as_well(vendor: Vendor) -> None:
    done = vendor.conformance("--option=fault=in doubt", "--report=report.json", "--report=report.md")
    assert done.code == 1
    assert "found while another requirement was checked" in done.out
    assert done.out.count("KV-LIVE-06 (MUST, liveness)") == 1
    assert "KV-CORE-01    blocked    blocked by KV-LIVE-06" in done.out
    [found] = [found for found in vendor.report()["requirements"] if found["id"] == "KV-LIVE-06"]
    assert found["status"] == "fail"
    assert found["seen"]
    assert "| KV-LIVE-06 | MUST |" in (vendor.folder / "report.md").read_text()


def test_one_check_alone_is_no_verdict(vendor: Vendor) -> None:
    done = vendor.conformance("-k", "test_exists_tells_what_is_there", "--report=acme.badge.json")
    assert done.code == 0
    assert re.search(r"core: +INCOMPLETE \(\d+ of \d+ requirements not checked\)", done.out)
    assert "acme.badge.json was not written: a badge is made from a complete run" in done.out
    assert not (vendor.folder / "acme.badge.json").exists()


def test_a_run_in_which_nothing_applies_is_no_pass(vendor: Vendor) -> None:
    done = vendor.pytest("--kvstore-profile=sharing")
    assert done.code == 1
    assert "Nothing was checked, so the run is no pass." in done.out
    assert "not claimed:  sharing" in done.out
    nothing = vendor.conformance("-k", "no_check_is_called_so")
    assert nothing.code == 5
    assert "Nothing was checked, so the run is no pass." in nothing.out


def test_a_broken_should_fails_a_strict_run_alone(vendor: Vendor) -> None:
    lax = vendor.pytest("--kvstore-option=fault=takes all", "-k", "test_a_record_above_the_limit_is_refused")
    assert (lax.code, "KV-CORE-22    advisory" in lax.out) == (0, True), lax.out
    assert "KV-CORE-22 (SHOULD, core)\n" in lax.out
    assert "Run it alone: pytest --pyargs kvstore_sdk_conformance --kvstore-backend=acme_store:open_store" in lax.out
    strict = vendor.conformance("--option=fault=takes all", "--strict", "-k", "test_a_record_above_the_limit_is_refused")
    assert (strict.code, "KV-CORE-22    fail" in strict.out) == (1, True), strict.out


# Deviations.


def test_a_declared_deviation_is_partly_conformant_and_no_failure(vendor: Vendor) -> None:
    vendor.write(known_toml='KV-CORE-20 = "asks its server | and <says> so"\n')
    reports = [f"--report=r.{form}" for form in ("json", "md", "badge.json")]
    done = vendor.conformance("--option=fault=changes its mind", "--deviations=known.toml", *reports)
    assert done.code == 0, done.out
    assert re.search(r"core: +PARTLY CONFORMANT \(1 declared deviation\)", done.out)
    [found] = [found for found in vendor.report("r.json")["requirements"] if found["id"] == "KV-CORE-20"]
    assert (found["status"], found["reason"]) == ("deviation", "asks its server | and <says> so")
    assert "| asks its server \\| and &lt;says> so |" in (vendor.folder / "r.md").read_text()
    badge = vendor.report("r.badge.json")
    assert (badge["message"], badge["color"]) == ("core (partly)", "yellow")


def test_what_cannot_be_judged_beside_a_declared_deviation_makes_the_run_incomplete(vendor: Vendor) -> None:
    vendor.write(known_toml='KV-CORE-03 = "asks no server"\n')
    done = vendor.conformance("--option=fault=says yes", "--deviations=known.toml")
    assert done.code == 0, done.out
    assert re.search(r"core: +INCOMPLETE \(\d+ of \d+ requirements cannot be judged beside the declared deviations\)", done.out)


def test_a_deviation_that_does_not_happen_fails_the_run(vendor: Vendor) -> None:
    vendor.write(known_toml='KV-CORE-03 = "asks no server"\n')
    done = vendor.pytest("--kvstore-deviations=known.toml")
    assert done.code == 1
    assert "KV-CORE-03    stale      declared as a deviation, but it did not happen, which fails the run" in done.out


# What cannot be run is one line and exit code 4.

REFUSED = {
    "no backend": ([], None, "no backend: give --kvstore-backend=TARGET"),
    "unknown backend": ([], "nosuch", "backend nosuch: backend: is not known"),
    "unknown module": ([], "no_such_module:open_store", "module 'no_such_module' cannot be imported"),
    "unknown factory": ([], "acme_store:open_shop", "module 'acme_store' has no factory 'open_shop'"),
    "import error": ([], "imports_what_is_not_there:open_store", "imports 'nothing_of_that_name', which cannot be imported"),
    "syntax error": ([], "does_not_parse:open_store", "importing module 'does_not_parse' raised SyntaxError"),
    "module that exits": ([], "exits:open_store", "importing module 'exits' raised SystemExit (0)"),
    "factory that raises": (["--kvstore-option=fault=crashes"], "acme_store:open_store", "the factory raised KeyError"),
    "factory that exits": (
        ["--kvstore-option=fault=leaves"],
        "acme_store:open_store",
        "module ended Python with exit code 0",
    ),
    "store that is down": (["--kvstore-option=fault=cannot open"], "acme_store:open_store", "no connection with"),
    "unknown option": (["--kvstore-option=colour=red"], "acme_store:open_store", "colour"),
    "location without {fresh}": (["--kvstore-location=/tmp/x"], "acme_store:open_store", "location: must hold {fresh}"),
}
# What is seen before a backend is opened.
MISWRITTEN = {
    "no pair": (["--kvstore-option=hunter2"], "option: must be written as name=value"),
    "option twice": (["--kvstore-option=fault=a", "--kvstore-option=fault=b"], "option: 'fault' is given twice"),
    "unset variable": (["--kvstore-option=fault=env:NO_SUCH"], "environment variable 'NO_SUCH', which is not set"),
    "unknown profile": (["--kvstore-profile=cores"], "profile: 'cores' is none; choose from core,"),
    "bad seed": (["--kvstore-seed=x"], "seed: 'x' must be a whole number"),
    "bad size": (["--kvstore-largest=x"], "largest: "),
    "bad count": (["--kvstore-examples=0"], "examples: '0' must be a whole number from 1 on"),
    "no file of deviations": (["--kvstore-deviations=none.toml"], "none.toml cannot be read"),
    "unknown deviation": (["--kvstore-deviations=unknown.toml"], "'KV-CORE-99' is no requirement"),
    "deviation without a reason": (["--kvstore-deviations=silent.toml"], "KV-CORE-03 needs a reason"),
    "unknown form": (["--kvstore-report=r.txt"], "r.txt must end in .badge.json, .json, .md"),
    "report nowhere": (["--kvstore-report=no/where/r.json"], "there is no folder no/where"),
    "report on a folder": (["--kvstore-report=folder.json"], "folder.json is a folder"),
}


@pytest.fixture
def wrong(vendor: Vendor) -> Vendor:
    vendor.write(
        imports_what_is_not_there_py="import nothing_of_that_name\n",
        does_not_parse_py="def open_store(location:\n",
        exits_py="raise SystemExit(0)\n",
    )
    return vendor


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_one_line_and_exit_code_4(wrong: Vendor, case: str) -> None:
    arguments, target, said = REFUSED[case]
    done = wrong.pytest(*arguments, target=target)
    assert done.code == 4, done.out + done.err
    assert done.error_line.startswith("ERROR: kvstore-sdk conformance: ")
    assert said in done.error_line


@pytest.mark.parametrize("case", MISWRITTEN)
def test_a_wrong_option_is_one_line_and_exit_code_4_before_a_backend_is_opened(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process: that saves a second for each."""
    arguments, said = MISWRITTEN[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "unknown.toml").write_text('KV-CORE-99 = "why not"\n')
    (tmp_path / "silent.toml").write_text('KV-CORE-03 = " "\n')
    (tmp_path / "folder.json").mkdir()
    # Opening it would fail with another message.
    command = ["--pyargs", "kvstore_sdk_conformance", "-p", "no:cacheprovider", "--kvstore-backend=no_such_module:open_store", *arguments]
    assert pytest.main(command) == 4
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("ERROR: kvstore-sdk conformance: ")
    assert said in line
    assert "hunter2" not in line


@pytest.mark.parametrize("case", ["no backend", "syntax error"])
def test_so_it_is_with_several_processes(wrong: Vendor, case: str) -> None:
    arguments, target, said = REFUSED[case]
    done = wrong.pytest("-n2", *arguments, target=target)
    assert done.code == 4, done.out + done.err
    assert said in done.error_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no backend: name a TARGET"),
        (["nosuch"], "backend nosuch: backend: is not known"),
        (["acme_store:open_store", "--option=hunter2"], "option: must be written as name=value"),
        (["acme_store:open_store", "--report=r.txt"], "r.txt must end in"),
        (["--explain=KV-CORE-99"], "'KV-CORE-99' is no requirement"),
        (["--list", "--profile=cores"], "profile: 'cores' is none"),
    ],
    ids=["no backend", "unknown backend", "no pair", "unknown form", "unknown requirement", "unknown profile"],
)
def test_so_it_is_by_the_command(vendor: Vendor, arguments: list[str], said: str) -> None:
    done = vendor.kvstore("conformance", *arguments)
    assert (done.code, done.out) == (4, "")
    assert said in done.error_line
    assert "hunter2" not in done.err


def test_checks_that_are_named_without_a_backend_are_refused(vendor: Vendor) -> None:
    done = vendor.plain_pytest(str(vendor.sdk / "kvstore_sdk_conformance" / "checks" / "test_records.py"))
    assert done.code == 4
    assert "no backend: give --kvstore-backend=TARGET" in done.err


# Reports.


def test_the_reports_of_a_good_backend_say_what_was_checked(vendor: Vendor) -> None:
    done = vendor.pytest("--kvstore-report=r.json", "--kvstore-report=r.md", "--kvstore-report=r.badge.json", "--kvstore-seed=42")
    assert done.code == 0, done.out
    found = vendor.report("r.json")
    assert {"suite_version", "contract_version", "capabilities", "surfaces", "python", "platform", "at"} <= set(found)
    assert (found["seed"], found["backend"], found["implementation"]) == (42, "acme_store:open_store", "AcmeStore")
    assert found["verdicts"] == {"core": {"verdict": "CONFORMANT", "note": ""}}
    assert sum(sum(counts.values()) for counts in found["counts"].values()) == len(CORE) == len(found["requirements"])
    assert found["seconds"] > 0
    for one in found["requirements"]:
        requirement = BY_ID[one["id"]]
        assert (one["sentence"], one["why"], one["builds_on"]) == (requirement.sentence, requirement.why, list(requirement.builds_on))
        assert len(one["needs"]) == len(requirement.needs)
    page = (vendor.folder / "r.md").read_text()
    assert "| core | **CONFORMANT** |" in page
    for one in found["requirements"]:
        assert f"| {one['id']} | {one['level']} | " in page
    assert "| max_record_bytes | 65536 |" in page
    assert "seed 42" in page
    label = f"kvstore-sdk {found['contract_version']}"
    assert vendor.report("r.badge.json") == {"schemaVersion": 1, "label": label, "message": "core", "color": "brightgreen"}


def test_a_broken_backend_gets_a_red_badge_and_a_page_with_what_was_seen(vendor: Vendor) -> None:
    assert vendor.pytest("--kvstore-option=fault=says yes", "--kvstore-report=r.badge.json", "--kvstore-report=r.md").code == 1
    badge = vendor.report("r.badge.json")
    assert (badge["message"], badge["color"]) == ("not conformant: core", "red")
    page = (vendor.folder / "r.md").read_text()
    assert "## What is broken" in page
    assert re.search(r"^\| KV-CORE-03 \| False for .* \| True \|$", page, re.MULTILINE)
    assert "| blocked by KV-CORE-03 |" in page


@pytest.mark.parametrize("processes", [[], ["-n2"]], ids=["one process", "several processes"])
def test_the_file_of_junit_has_the_requirement_of_every_case(vendor: Vendor, processes: list[str]) -> None:
    assert vendor.pytest(*processes, "--kvstore-option=fault=says yes", "--junitxml=junit.xml").code == 1
    cases = ElementTree.parse(vendor.folder / "junit.xml").getroot().findall(".//testcase")
    found = {}
    for case in cases:
        properties = {one.attrib["name"].removeprefix("kvstore_"): one.attrib["value"] for one in case.findall("./properties/property")}
        found[properties["id"]] = properties
        requirement = BY_ID[properties["id"]]
        assert (properties["level"], properties["profile"]) == (requirement.level.value, "core")
        tag = {"pass": None, "fail": "failure"}.get(properties["status"], "skipped")
        assert [child.tag for child in case if child.tag != "properties"] == ([tag] if tag else [])
    assert set(found) == {requirement.id for requirement in CORE}
    assert found["KV-CORE-01"]["status"] == "pass"
    assert (found["KV-CORE-03"]["status"], found["KV-CORE-03"]["seen"]) == ("fail", "True")
    assert found["KV-CORE-03"]["expected"].startswith("False for ")
    assert "what is there" not in found["KV-CORE-01"]


# Secrets.


def test_a_secret_reaches_the_backend_by_the_environment_and_nothing_that_is_shown_or_written(vendor: Vendor) -> None:
    written = ["--kvstore-report=r.json", "--kvstore-report=r.md", "--junitxml=junit.xml", "-o", "junit_logging=all", "-rA"]
    one = vendor.pytest(
        "--kvstore-option=fault=wants a secret", "--kvstore-option=secret_key=env:ACME_SECRET", *written, env={"ACME_SECRET": "hunter2"}
    )
    assert one.code == 0, one.out + one.err
    assert "opening with ***" in one.out
    other = vendor.conformance("--option=fault=wants a secret", "--option=secret_key=hunter2")
    assert other.code == 0, other.out + other.err
    failing = vendor.conformance("--option=fault=says yes", "--option=secret_key=hunter2", "-k", "test_exists_tells_what_is_there")
    assert "--option=secret_key=env:SECRET_KEY" in failing.out
    assert "'secret_key': '***'" in failing.out
    shown = [done.out.replace("opening with hunter2\n", "", 1) + done.err for done in (one, other, failing)]
    files = [(vendor.folder / name).read_text() for name in ("r.json", "r.md", "junit.xml")]
    assert [text for text in shown + files if "hunter2" in text] == []


# A vendor's own settings of pytest.

PICKY = """
[pytest]
addopts = --strict-markers --strict-config -W error
filterwarnings = error
xfail_strict = true
python_files = check_*.py
python_functions = check_*
python_classes = Check*
"""


@pytest.mark.parametrize(
    ("version", "arguments"),
    list(zip(VERSIONS, [["--import-mode=importlib"], ["--import-mode=prepend", "-n2"], ["--import-mode=append", "-n2"]], strict=True)),
    ids=VERSIONS,
)
def test_the_suite_runs_under_a_vendors_settings(sdk: Path, tmp_path: Path, version: str, arguments: list[str]) -> None:
    vendor = vendor_with(version, sdk, tmp_path)
    vendor.write(pytest_ini=PICKY)
    done = vendor.pytest(*arguments, "--kvstore-option=fault=takes all")
    assert done.code == 0, done.out + done.err
    assert f"pytest-{version}" in done.out
    assert "KV-CORE-22    advisory" in done.out
    assert "core:         CONFORMANT\n" in done.out


@pytest.mark.parametrize("order", ["--randomly-seed=7", "--random-order"])
def test_in_any_order_a_fault_breaks_its_requirement_and_blocks_what_builds_on_it(vendor: Vendor, order: str) -> None:
    done = vendor.pytest("--kvstore-option=fault=says yes", "--kvstore-report=report.json", order)
    assert done.code == 1, done.out
    statuses = {found["id"]: found["status"] for found in vendor.report()["requirements"]}
    assert [id_ for id_, status in statuses.items() if status == "fail"] == ["KV-CORE-03"]
    # Checked before what it builds on, a requirement may be seen to hold.
    assert "blocked" in statuses.values()
    assert set(statuses.values()) <= {"fail", "blocked", "pass", "not-applicable"}
    assert re.findall(r"^(KV-\S+) \(MUST", done.out, re.MULTILINE) == ["KV-CORE-03"], "what follows from it is not shown as a failure"


def test_a_vendors_own_tests_run_as_they_would_where_the_backend_is_named_in_the_settings(vendor: Vendor) -> None:
    vendor.write(
        pytest_ini="[pytest]\naddopts = --kvstore-backend acme_store:open_store\n",
        test_own_py="def test_good():\n    pass\n\n\ndef test_bad():\n    assert not 'hunter2'\n",
    )
    good = vendor.plain_pytest("-q", "-k", "good")
    assert (good.code, "conformance" in good.out.partition("\n.")[2]) == (0, False), good.out
    bad = vendor.plain_pytest("-q", "test_own.py")
    assert bad.code == 1
    assert "assert not 'hunter2'" in bad.out


def test_a_run_that_stops_at_the_first_failure_is_judged_by_it(vendor: Vendor) -> None:
    done = vendor.pytest("-x", "--kvstore-option=fault=says yes", "--kvstore-report=report.json")
    assert done.code == 1
    statuses = {found["id"]: found["status"] for found in vendor.report()["requirements"]}
    assert statuses["KV-CORE-03"] == "fail"
    assert "not-run" in statuses.values()
    assert vendor.report()["verdicts"]["core"]["verdict"] == "NOT CONFORMANT"


def test_checks_are_collected_without_being_run_or_judged(vendor: Vendor) -> None:
    done = vendor.pytest("--collect-only", "-q", "--kvstore-report=report.json")
    assert done.code == 0, done.out + done.err
    assert "test_exists_tells_what_is_there" in done.out
    assert "CONFORMANT" not in done.out
    assert not (vendor.folder / "report.json").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_project_that_merely_has_the_sdk_installed_is_not_disturbed(sdk: Path, tmp_path: Path, version: str) -> None:
    vendor = vendor_with(version, sdk, tmp_path)
    vendor.write(
        pytest_ini="[pytest]\nfilterwarnings = error\n",
        test_own_py="import sys\n\n\ndef test_own():\n    loaded = [name for name in sys.modules if name.startswith('kvstore')]\n"
        "    assert sorted(loaded) == ['kvstore_sdk_conformance', 'kvstore_sdk_conformance.plugin']\n",
    )
    done = vendor.plain_pytest("-q", "-p", "no:xdist")
    assert (done.code, done.err) == (0, ""), done.out + done.err
    assert re.fullmatch(r"\. +\[100%\]\n1 passed in .*\n", done.out)


# The table, at hand where only the package is installed.


def test_the_requirements_are_listed_by_profile_with_their_sentences(vendor: Vendor) -> None:
    every = vendor.kvstore("conformance", "--list")
    assert (every.code, every.err) == (0, "")
    assert re.findall(r"^  (KV-\S+) ", every.out, re.MULTILINE) == [requirement.id for requirement in REQUIREMENTS]
    assert all(requirement.sentence in every.out for requirement in REQUIREMENTS)
    some = vendor.kvstore("conformance", "--list", "--profile=core")
    assert re.findall(r"^  (KV-\S+) ", some.out, re.MULTILINE) == [requirement.id for requirement in CORE]


def test_a_requirement_is_explained_with_what_it_needs_and_builds_on(vendor: Vendor) -> None:
    done = vendor.kvstore("conformance", "--explain", "kv-dur-03")
    said = " ".join(done.out.split())
    requirement = BY_ID["KV-DUR-03"]
    assert said.startswith("KV-DUR-03 (MUST, durability) ")
    assert requirement.sentence in said
    assert f"Why: {requirement.why}" in said
    assert "Needs: a backend that does not declare read_only, durability PROCESS_CRASH." in said
    assert f"Builds on: {', '.join(requirement.builds_on)}." in said
