"""The example of a vendor's package, taken out of this repository and used as its vendor would: installed, checked, tested."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "acme-redis"
PINS = Path(__file__).with_name("redis-pins.txt")
MOST_LINES = 149


def run(*command: str | Path, cwd: Path, path: Path, timeout_s: float = 250.0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the example, and a folder that it and its client library are installed into."""
    folder = tmp_path_factory.mktemp("acme-redis")
    source, site = folder / "acme-redis", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis"))
    # The SDK, which it asks for as well, is the one that runs this test.
    required = [name for name in tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"] if name != "kvstore-sdk"]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", site)
    run(*pip, "--constraint", PINS, *required, cwd=folder, path=site)
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", source, cwd=folder, path=site)
    return source, site


def test_the_backend_is_found_by_its_name_with_its_options(acme: tuple[Path, Path]) -> None:
    source, site = acme
    printed = run(sys.executable, "-m", "kvstore_sdk", "backends", "acmeredis", cwd=source, path=site)
    options = re.findall(r"^\| `(\w+)` \|", (source / "README.md").read_text(), re.MULTILINE)
    assert options == ["username", "password", "open_timeout_s", "max_record_bytes"]
    assert [name for name in options if name not in printed] == []


@pytest.mark.timeout(600)
def test_its_own_tests_pass_and_the_suite_finds_it_conformant(acme: tuple[Path, Path]) -> None:
    source, site = acme
    if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
        pytest.skip("no server to test on: apt-get install redis-server")
    printed = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=source, path=site, timeout_s=580.0)
    assert " passed" in printed
    assert "skipped" not in printed


def test_its_speed_is_measured_as_any_stores_is_and_nothing_is_left(acme: tuple[Path, Path], tmp_path: Path) -> None:
    source, site = acme
    if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
        pytest.skip("no server to test on: apt-get install redis-server")
    # It does not list what it holds, so the server is asked.
    code = f"""
import subprocess, sys
from pathlib import Path
from redis import Redis
sys.path.insert(0, "tests")
from redis_server import redis_server
with redis_server(Path({str(tmp_path)!r})) as server:
    options = ["--sizes", "64KiB", "--threads", "2", "--seconds", "3", "--json"]
    bench = [sys.executable, "-m", "kvstore_sdk", "bench", server.url + "/kv", *options]
    sys.stdout.write(subprocess.run(bench, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert Redis(port=server.port).dbsize() == 0
"""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert {cell["operation"] for cell in json.loads(done.stdout)["items"]} == {"put", "get", "exists", "delete"}


def test_it_is_typed_and_formatted_by_its_own_settings(acme: tuple[Path, Path]) -> None:
    source, site = acme
    run(sys.executable, "-m", "mypy", "--cache-dir", os.devnull, cwd=source, path=site)
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=source, path=site)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".", cwd=source, path=site)


def test_it_is_as_small_as_the_documentation_says() -> None:
    assert 0 < sum(code_lines(file.read_text()) for file in (EXAMPLE / "acme_redis").rglob("*.py")) <= MOST_LINES


def code_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # Every string that stands alone documents something.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_its_engine_configuration_is_accepted(acme: tuple[Path, Path]) -> None:
    source, site = acme
    [block] = re.findall(r"^```json\n(.*?)^```$", (source / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    [entry] = json.loads(block)["kv_connector_extra_config"]["secondary_tiers"]
    code = "import json, sys; from kvstore_sdk.vllm.options import parse_tier_options; parse_tier_options('it', json.loads(sys.argv[1]))"
    assert entry["backend"].startswith("acmeredis://")
    run(sys.executable, "-c", code, json.dumps(entry), cwd=source, path=site)
