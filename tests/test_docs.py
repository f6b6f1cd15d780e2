"""What the documentation shows is run, and what it lists is what the code has."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS
from kvstore_sdk.vllm.options import parse_tier_options

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run(*command: str | Path, cwd: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)
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


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package of docs/write-a-backend.md: its source, and a folder it is installed into."""
    folder = tmp_path_factory.mktemp("acme")
    source, site = folder / "acme-kvstore", folder / "site"
    text = (ROOT / "docs" / "write-a-backend.md").read_text()
    text, _, end = text.partition("## Break it on purpose")
    files = re.findall(r"^`([\w/]+\.\w+)`:?[^`]*?\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    [faulty] = re.findall(r"^```python\n(.*?)^```$", end, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in files] == ["pyproject.toml", "acme_kvstore/__init__.py", "acme_kvstore/backend.py", "tests/test_acme.py"]
    for name, content in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    (folder / "faulty_acme.py").write_text(faulty)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--target", site, source, cwd=folder, path=site)
    return source, site


def test_the_vendors_package_is_found_by_its_name_and_passes_its_test(acme: tuple[Path, Path]) -> None:
    source, site = acme
    assert "busy_wait_s" in kvstore("backends", "acme", cwd=source, path=site)
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "-W", "error", cwd=source, path=site)


def test_the_vendors_package_carries_the_demo(acme: tuple[Path, Path], tmp_path: Path) -> None:
    source, site = acme
    demo = ("demo", "--no-vllm", "--prompts", "1", "--store")
    assert "58 of 58" in kvstore(*demo, f"acme://{tmp_path}/kv.db", cwd=tmp_path, path=site)
    other_way = ("acme_kvstore:open_acme", "--location", f"{tmp_path}/kv.db", "--option", "busy_wait_s=500ms")
    printed = kvstore(*demo, *other_way, cwd=tmp_path, path=source)
    assert ": 0 new, 0 replaced, 58 there before" in printed


def test_the_vendors_package_wants_an_absolute_path(acme: tuple[Path, Path], tmp_path: Path) -> None:
    command = (sys.executable, "-m", "kvstore_sdk", "demo", "--no-vllm", "--store", "acme://kv.db")
    environment = {**os.environ, "PYTHONPATH": str(acme[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "backend acme: location: 'kv.db' must be an absolute path" in done.stderr


def test_the_demo_of_the_broken_backend_fails_and_counts_what_was_bad(acme: tuple[Path, Path], tmp_path: Path) -> None:
    source, site = acme
    command = (sys.executable, "-m", "kvstore_sdk", "demo", "--no-vllm", "--prompts", "1")
    store = ("--store", "faulty_acme:open_faulty", "--location", str(tmp_path / "faulty.db"))
    environment = {**os.environ, "PYTHONPATH": f"{site}:{source.parent}"}
    done = subprocess.run((*command, *store), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {"unstable_reads", "corrupt"} <= {line[0] for line in lines if line}
    assert any("is corrupt (" in line for line in done.stdout.splitlines())


def test_the_vendors_package_is_typed(acme: tuple[Path, Path]) -> None:
    source, site = acme
    (source / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    run(sys.executable, "-m", "mypy", "acme_kvstore", cwd=source, path=site)


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_the_engine_configurations_are_accepted(page: str) -> None:
    for block in blocks(ROOT / page, "json"):
        config = json.loads(block)
        assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
        extra = config["kv_connector_extra_config"]
        assert (extra["spec_name"], extra["spec_module_path"]) == ("KVStoreTieringSpec", "kvstore_sdk.vllm")
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
    assert page.count("<!-- options: ") == 4
    assert page.count("| `vllm:kvstore_") == len(COUNTERS) + len(GAUGES) + len(HISTOGRAMS)
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
