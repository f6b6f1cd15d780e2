"""The arrows of docs/architecture.md, the types, and the public names, as the code has them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "kvstore_sdk", ROOT / "backends" / "kvstore_sdk_backends", ROOT / "conformance" / "kvstore_sdk_conformance")
MODULES = sorted(file for folder in SOURCES for file in folder.rglob("*.py") if file.name != "__main__.py")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "conformance"))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)


def test_imports_go_downwards_only() -> None:
    done = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache")
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
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "The core imports neither backends nor the suite BROKEN" in done.stdout
    assert "Inside the core, arrows point downwards BROKEN" in done.stdout


def test_types_hold_with_what_is_installed_here() -> None:
    """`make lint` says the same without an engine installed; this environment has one."""
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_public_names_are_listed_once_and_defined(file: Path) -> None:
    body = ast.parse(file.read_text()).body
    names = next(ast.literal_eval(node.value) for node in body if _target(node) == "__all__")
    assert len(names) == len(set(names))
    defined = {name for node in body for name in _defined(node)}
    if "__getattr__" in defined:
        # Names that are imported on first use, because an engine stands behind them: a test of the engine's asks for each.
        return
    assert set(names) <= defined
    if file.name == "__init__.py":
        # A package re-exports: what it imports for others is public, and nothing else is in it.
        assert {name for name in defined if not name.startswith("_")} == set(names)


def _target(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.If, ast.Try)):
        return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt) for name in _defined(child)}
    target = _target(node)
    return set() if target is None else {target}
