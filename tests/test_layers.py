"""The arrows of docs/architecture.md and the types, as the code has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "kvstore_sdk", ROOT / "backends" / "kvstore_sdk_backends", ROOT / "conformance" / "kvstore_sdk_conformance")


LINT_IMPORTS = ("-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache")


def run(*arguments: str, cwd: Path, path: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)


def test_imports_go_downwards_only() -> None:
    done = run(*LINT_IMPORTS, cwd=ROOT, path=[folder.parent for folder in SOURCES])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_an_import_that_goes_upwards_is_found(tmp_path: Path) -> None:
    # The contracts themselves: a misspelt module name in them would let everything pass.
    for folder in SOURCES:
        target = tmp_path / folder.name
        target.mkdir()
        for file in folder.rglob("*.py"):
            (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / file.relative_to(folder)).write_bytes(file.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    with open(tmp_path / "kvstore_sdk" / "keys.py", "a") as file:
        file.write("\nfrom kvstore_sdk.tier import Tier\nfrom kvstore_sdk_backends import memory\n")
    done = run(*LINT_IMPORTS, cwd=tmp_path, path=[tmp_path])
    assert done.returncode == 1
    assert "The core imports neither backends nor the suite BROKEN" in done.stdout
    assert "Inside the core, arrows point downwards BROKEN" in done.stdout


def test_types_hold_with_what_is_installed_here() -> None:
    """`make lint` says the same without an engine installed; this environment has one."""
    done = run("-m", "mypy", cwd=ROOT, path=())
    assert done.returncode == 0, done.stdout + done.stderr
