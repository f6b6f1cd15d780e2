"""Bytes from a store, a socket or shared memory are never run: nothing in the packages decodes them by a format that can."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "kvstore_sdk", ROOT / "backends" / "kvstore_sdk_backends", ROOT / "conformance" / "kvstore_sdk_conformance")
RUN_WHAT_THEY_READ = frozenset(
    # Their connections and queues pickle: multiprocessing. The others decode by making objects of any class.
    {"cloudpickle", "dbm", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing", "pickle", "pickletools", "shelve", "yaml"}
)
EVALUATE = frozenset({"eval", "exec", "execfile"})
LOADERS = frozenset({("torch", "load"), ("numpy", "load"), ("np", "load"), ("os", "system"), ("os", "popen"), ("subprocess", "getoutput")})


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        else:
            imported = []
        yield from (f"{node.lineno}: imports {name}" for name in imported if name.partition(".")[0] in RUN_WHAT_THEY_READ)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in EVALUATE:
                yield f"{node.lineno}: calls {node.func.id}"
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(node.func, ast.Attribute) and isinstance(of, ast.Name) and (of.id, node.func.attr) in LOADERS:
                yield f"{node.lineno}: calls {of.id}.{node.func.attr}"
            yield from (
                f"{node.lineno}: passes {word.arg}=True"
                for word in node.keywords
                if word.arg in ("shell", "allow_pickle") and not (isinstance(word.value, ast.Constant) and word.value.value is False)
            )


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def test_no_module_decodes_by_what_can_run_code() -> None:
    """SEC-06"""
    found = {str(path.relative_to(ROOT)): list(faults(path.read_text())) for path in modules()}
    assert len(found) > 150
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.connection import Client",
        "import yaml as plain",
        "eval(text)",
        "torch.load(path)",
        "subprocess.run(line, shell=True)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_can_is_found(source: str) -> None:
    assert list(faults(source))
