"""What is public is listed, and importing the SDK imports nothing heavy."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore_sdk
import kvstore_sdk_backends
import kvstore_sdk_conformance

ROOTS = (kvstore_sdk, kvstore_sdk_backends, kvstore_sdk_conformance)
# Some can be imported only where an engine, or a client of a store, is installed: their lists are checked without importing them.
# What is behind the command `kvstore`, and the checks that pytest collects, are nobody's to import.
INSIDE = ("kvstore_sdk.cli.", "kvstore_sdk_conformance.checks")
MODULES = sorted(
    name
    for root in ROOTS
    for name in [root.__name__, *(info.name for info in pkgutil.walk_packages(root.__path__, root.__name__ + ".", onerror=lambda _: None))]
    if not any(part.startswith("_") for part in name.split(".")) and not name.startswith(INSIDE)
)


def source(module: str) -> ast.Module:
    """The module's syntax tree, found without importing it."""
    root = next(root for root in ROOTS if module.split(".")[0] == root.__name__)
    path = Path(root.__path__[0]).joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def listed(tree: ast.Module) -> list[str] | None:
    """`__all__` as it is written, None where there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            assert node.value is not None
            found: list[str] = ast.literal_eval(node.value)
            return found
    return None


def named(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Public names that the module defines as classes and functions, and all names at its top level."""
    made, all_names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            all_names |= {alias.asname or alias.name for alias in node.names}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            made.add(node.name)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []:
            all_names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
            # A table of a module with `__getattr__`: these names are imported when they are asked for.
            if isinstance(node.value, ast.Dict) and "__getattr__" in {
                other.name for other in tree.body if isinstance(other, ast.FunctionDef)
            }:
                all_names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return {name for name in made if not name.startswith("_")}, all_names | made


def place(name: str) -> tuple[int, str]:
    """Constants first, then classes, then functions; in each of them the order of the characters."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted_and_says_what_the_module_defines(module: str) -> None:
    tree = source(module)
    names = listed(tree)
    assert names is not None, f"{module} has no __all__"
    assert names == sorted(set(names), key=place), "constants, classes, functions, each sorted case-sensitively, each name once"
    made, existing = named(tree)
    assert made <= set(names), "what is not public starts with an underscore"
    assert set(names) <= existing
    assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize(
    "module",
    [
        "kvstore_sdk",
        "kvstore_sdk.backend",
        "kvstore_sdk.host",
        "kvstore_sdk.layout",
        "kvstore_sdk.store",
        "kvstore_sdk.testing",
        "kvstore_sdk.tier",
    ],
)
def test_a_package_lists_exactly_what_it_offers(module: str) -> None:
    """Re-exports, without modules that are there because they were imported."""
    package = importlib.import_module(module)
    offered = {name for name, value in vars(package).items() if not name.startswith("_") and not isinstance(value, type(sys))}
    assert set(package.__all__) == offered


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith("kvstore_sdk.") and ".vllm" not in name and ".cli" not in name]
)
def test_everything_listed_exists(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


HEAVY = (
    "torch",
    "vllm",
    "numpy",
    "pytest",
    "_pytest",
    "hypothesis",
    "zmq",
    "msgpack",
    "s3fs",
    "fsspec",
    "nixl",
    "kvstore_sdk_backends",
    "kvstore_sdk_conformance",
)


@pytest.mark.parametrize(
    "module",
    [
        "kvstore_sdk",
        "kvstore_sdk.backend",
        "kvstore_sdk.host",
        "kvstore_sdk.layout",
        "kvstore_sdk.store",
        "kvstore_sdk.tier",
        "kvstore_sdk.testing",
    ],
)
def test_importing_the_sdk_imports_nothing_heavy(module: str) -> None:
    """Neither an engine, nor a test framework, nor a backend; and no thread is started."""
    code = f"import json, sys, threading; sys.path[:0] = {sys.path!r}; import {module}; "
    code += "json.dump([sorted({name.split('.')[0] for name in sys.modules}), threading.active_count()], sys.stdout)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert child.returncode == 0, child.stderr
    loaded, threads = json.loads(child.stdout)
    assert module.split(".")[0] in loaded
    assert [name for name in HEAVY if name in loaded] == []
    assert threads == 1
