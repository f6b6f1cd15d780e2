"""What the documentation shows is run, and what it lists is what the code has."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk import store
from kvstore_sdk.backend import Capabilities
from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS
from kvstore_sdk.vllm.metrics import HOST_COUNTERS, HOST_GAUGES
from kvstore_sdk.vllm.offloading.options import parse_offloading_options
from kvstore_sdk.vllm.options import parse_tier_options

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run(*command: str | Path, cwd: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def kvstore(*arguments: str, cwd: Path, path: Path) -> str:
    return run(sys.executable, "-m", "kvstore_sdk", *arguments, cwd=cwd, path=path)


def test_the_backend_of_the_readme_carries_the_demo(tmp_path: Path) -> None:
    [source] = blocks(ROOT / "README.md", "python")
    (tmp_path / "my_store.py").write_text(source)
    arguments = ("--store", "my_store:open_my_store", "--location", str(tmp_path / "records"))
    assert "kvstore demo --no-vllm --store my_store:open_my_store --location" in (ROOT / "README.md").read_text()
    printed = kvstore("demo", "--no-vllm", "--prompts", "1", *arguments, cwd=tmp_path, path=tmp_path)
    assert "58 of 58" in printed
    assert len(list((tmp_path / "records").iterdir())) == 58 + 1  # and the manifest


def test_the_engine_of_the_engines_page_finds_what_it_stored(tmp_path: Path) -> None:
    page = ROOT / "docs" / "engine.md"
    [source] = blocks(page, "python")
    (tmp_path / "my_engine.py").write_text(source)
    printed = run(sys.executable, "my_engine.py", f"file://{tmp_path}/kv", cwd=tmp_path, path=tmp_path)
    assert printed.splitlines() == ["stored 8 shed 0", "loaded 8 equal True"]
    assert all(f"`{line}`" in page.read_text() for line in printed.splitlines())


VENDORS_PAGE = ROOT / "docs" / "write-a-backend.md"


def conformance(target: str, *arguments: str, cwd: Path) -> dict[str, Any]:
    """The report of a run, which may end as it likes."""
    command = (sys.executable, "-m", "kvstore_sdk", "conformance", target, "--report", str(cwd / "report.json"), *arguments)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((cwd / "report.json").read_text())
    return found


@pytest.fixture
def vendor(tmp_path: Path) -> tuple[str, str, str]:
    """The sources of the vendors' page: the dictionary, the same when it is finished, and the broken one."""
    sources = [source for source in blocks(VENDORS_PAGE, "python") if "import" in source]
    [first, finished, faulty] = sources
    return first, finished, faulty


def test_the_first_backend_of_the_vendors_page_breaks_what_the_page_says(vendor: tuple[str, str, str], tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(vendor[0])
    report = conformance("my_store:open_my_store", "--profile", "core,liveness", cwd=tmp_path)
    broken = {found["id"] for found in report["requirements"] if found["status"] == "fail"}
    assert broken == set(re.findall(r"^\| (KV-\w+-\d+) \|", VENDORS_PAGE.read_text(), re.MULTILINE))


def test_the_finished_backend_of_the_vendors_page_is_conformant(vendor: tuple[str, str, str], tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(vendor[1])
    report = conformance("my_store:open_my_store", cwd=tmp_path)
    claimed = {profile for profile, found in report["verdicts"].items() if found["verdict"] != "NOT CLAIMED"}
    assert {found["verdict"] for found in report["verdicts"].values()} <= {"CONFORMANT", "NOT CLAIMED"}
    [named] = re.findall(r"It is CONFORMANT in all that it claims: ([^.]+)\.", VENDORS_PAGE.read_text())
    assert claimed == set(re.findall(r"`(\w+)`", named))


def test_the_broken_backend_of_the_vendors_page_is_found_out(vendor: tuple[str, str, str], tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(vendor[1])
    (tmp_path / "faulty_store.py").write_text(vendor[2])
    report = conformance("faulty_store:open_faulty", "--profile", "core", cwd=tmp_path)
    assert {found["id"] for found in report["requirements"] if found["status"] == "fail"} == {"KV-CORE-01"}


def test_the_vendors_page_quotes_the_example_as_it_is() -> None:
    text = VENDORS_PAGE.read_text()
    quotes = re.findall(r"^From `(examples/[^`]+)`:\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(quotes) == 4
    for name, quote in quotes:
        assert quote in (ROOT / name).read_text(), name
    [tree] = [block for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if block.startswith("acme-redis/")]
    assert tree in (ROOT / "examples" / "acme-redis" / "README.md").read_text()


def test_the_vendors_page_has_every_capability() -> None:
    section = VENDORS_PAGE.read_text().partition("## Capabilities")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    declared = {field.name: field.default for field in dataclasses.fields(Capabilities)}
    assert list(shown) == list(declared)
    for name, default in declared.items():
        wanted = "required" if default is dataclasses.MISSING else getattr(default, "name", str(default).lower())
        assert shown[name].strip("`") == wanted, name


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_the_engine_configurations_are_accepted(page: str) -> None:
    for block in blocks(ROOT / page, "json"):
        config = json.loads(block)
        assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
        extra = config["kv_connector_extra_config"]
        assert extra["spec_module_path"] == "kvstore_sdk.vllm"
        if extra["spec_name"] == "KVStoreOffloadingSpec":
            parse_offloading_options("the spec", extra)
        else:
            assert extra["spec_name"] == "KVStoreTieringSpec"
        for entry in extra["secondary_tiers"]:
            assert (entry["type"], entry["module_path"]) == ("kvstore", "kvstore_sdk.vllm")
            parse_tier_options("the entry", entry)


def test_the_tables_of_options_and_metrics_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("option_tables", ROOT / "tools" / "option_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text()
    assert page.count("<!-- options: ") == 10
    shown = (COUNTERS, GAUGES, HISTOGRAMS, store.COUNTERS, store.GAUGES, store.HISTOGRAMS, HOST_COUNTERS, HOST_GAUGES)
    assert page.count("| `vllm:kvstore_") == sum(map(len, shown))
    assert page == tables.rewritten(page), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target
