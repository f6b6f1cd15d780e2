"""What `pip install` gives to people: built here, installed into an environment of its own, and used there."""

from __future__ import annotations

import configparser
import importlib.metadata
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvstore_sdk": ROOT / "kvstore_sdk",
    "kvstore_sdk_backends": ROOT / "backends" / "kvstore_sdk_backends",
    "kvstore_sdk_conformance": ROOT / "conformance" / "kvstore_sdk_conformance",
}


LIBRARY = "kvstore_sdk_backends/fs/_librecords.so"


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    # Not this environment's variables: PYTHONPATH would make everything importable.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the wheel and its one dependency."""
    environment = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = next(environment.glob("lib/python3.*/site-packages"))
    # Copied rather than downloaded, so that this test needs no network.
    source = importlib.metadata.distribution("xxhash")
    for file in source.files or ():
        if ".." not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source.locate_file(file), site / file)
    return environment


def test_the_wheel_holds_three_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in contents(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_holds_every_file_of_the_packages_and_says_that_they_are_typed(wheel: Path) -> None:
    expected = {
        f"{name}/{file.relative_to(folder)}": file.read_bytes()
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    assert {f"{name}/py.typed" for name in PACKAGES} <= set(expected)
    found = contents(wheel)
    assert {name: data for name, data in found.items() if ".dist-info/" not in name and name != LIBRARY} == expected


def test_the_wheel_holds_the_library_and_is_for_this_platform_and_any_python(wheel: Path) -> None:
    assert contents(wheel)[LIBRARY].startswith(b"\x7fELF")
    assert wheel.stem.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}")


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_without_a_compiler_that_works_the_wheel_is_pure_and_holds_all_but_the_library(
    dist: Path, wheel: Path, tmp_path: Path, compiler: str
) -> None:
    """An installation never fails for it. From the sdist, so that this clone keeps the library that it has."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(path for path in tmp_path.iterdir() if path.is_dir())
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, CC=compiler)
    pure = next(tmp_path.glob("*.whl"))
    assert pure.stem.endswith("-py3-none-any")
    assert {name for name in contents(wheel) if ".dist-info/" not in name} - {LIBRARY} == {
        name for name in contents(pure) if ".dist-info/" not in name
    }


@pytest.mark.parametrize(
    "why", ["no compiler", "a compiler that cannot be parsed", "a compiler that fails", "a place that cannot be written"]
)
def test_a_library_that_cannot_be_built_is_a_reason_and_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """From a tree that is read-only or somebody else's too; and no library of an older source stays where it can be removed."""
    native = runpy.run_path(str(ROOT / "tools" / "native.py"))
    source, library = tmp_path / native["SOURCE"], tmp_path / native["LIBRARY"]
    library.parent.mkdir(parents=True)
    shutil.copy(ROOT / native["SOURCE"], source)
    assert native["build"](tmp_path) == ""
    assert library.read_bytes().startswith(b"\x7fELF")
    if why == "a place that cannot be written":
        library.unlink()
        library.mkdir()
    else:
        monkeypatch.setenv("CC", {"no compiler": "/nonexistent/cc", "a compiler that fails": "false"}.get(why, "cc '"))
    assert native["build"](tmp_path)
    assert library.is_dir() == (why == "a place that cannot be written")
    assert sorted(path.name for path in library.parent.iterdir() if path.is_file()) == ["records.c"]


def test_the_wheel_is_the_same_from_the_sdist_and_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    assert contents(next(tmp_path.glob("*.whl"))) == contents(wheel)


def test_the_sdist_holds_what_its_tests_need_and_nothing_that_was_not_named(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "PKG-INFO", ".gitignore"}
    assert tops == files | {"kvstore_sdk", "backends", "conformance", "tests", "tools", "docs", "benchmarks", "examples"}


def test_the_entry_points_name_functions_that_are_in_the_wheel(wheel: Path) -> None:
    found = contents(wheel)
    parser = configparser.ConfigParser()
    parser.read_string(next(data for name, data in found.items() if name.endswith("/entry_points.txt")).decode())
    assert set(parser.sections()) == {"console_scripts", "kvstore_sdk.backends", "pytest11", "vllm.general_plugins"}
    for group in parser.sections():
        for target in parser[group].values():
            module, _, function = target.partition(":")
            path = module.replace(".", "/")
            source = (found.get(f"{path}.py") or found[f"{path}/__init__.py"]).decode()
            if group == "pytest11":
                # A module, whose functions pytest finds by their names.
                function = "pytest_addoption"
            assert f"def {function}(" in source or f" {function}\n" in source or f'"{function}"' in source, target


def test_the_metadata_carries_the_license_and_asks_for_one_package(wheel: Path) -> None:
    found = contents(wheel)
    metadata = importlib.metadata.PathDistribution(zipfile.Path(wheel) / next(n for n in found if n.endswith("METADATA")).split("/")[0])
    assert [line for line in metadata.requires or () if "extra ==" not in line] == ["xxhash>=3.5"]
    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_the_installed_command_runs_and_lists_the_backends(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "kvstore"
    assert "demo" in run(command, "--help", cwd=tmp_path)
    version = importlib.metadata.PathDistribution(next(installed.glob("lib/python3.*/site-packages/kvstore_sdk-*.dist-info"))).version
    assert run(command, "--version", cwd=tmp_path) == f"kvstore-sdk {version}\n"
    listed = run(command, "backends", cwd=tmp_path)
    assert "kvstore_sdk_backends.fs:open_fs" in listed
    assert "cannot be used" not in listed


def test_the_installed_backend_uses_the_library(installed: Path, tmp_path: Path) -> None:
    code = "from kvstore_sdk_backends.fs import native; print(native.load() is not None)"
    assert run(installed / "bin" / "python", "-c", code, cwd=tmp_path) == "True\n"


def test_the_installed_demo_stores_and_loads(installed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    printed = run(installed / "bin" / "kvstore", "demo", "--no-vllm", "--prompts", "1", "--store", f"file://{store}", cwd=tmp_path)
    assert str(store) in printed
    assert list(store.rglob("*-g0"))


def test_without_pytest_everything_but_the_suite_works_and_the_suite_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    command = [installed / "bin" / "kvstore", "conformance", "memory:"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 4
    [line] = done.stderr.splitlines()
    assert "pip install pytest hypothesis" in line


def test_an_installation_has_no_module_called_like_a_folder_of_the_repository(installed: Path, tmp_path: Path) -> None:
    folders = ["backends", "conformance", "tests", "tools", "docs", "benchmarks", "examples"]
    code = f"import importlib.util as util; print([name for name in {folders} if util.find_spec(name)])"
    assert run(installed / "bin" / "python", "-c", code, cwd=tmp_path) == "[]\n"


def test_importing_the_core_imports_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import kvstore_sdk, kvstore_sdk.tier, kvstore_sdk.testing, kvstore_sdk.cli;"
        "print(sorted({n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert run(installed / "bin" / "python", "-c", code, cwd=tmp_path) == "['kvstore_sdk', 'xxhash']\n"
