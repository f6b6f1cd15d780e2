"""tools/env.py: what it builds is whole, built once, and built again when it has to be."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ENV = Path(__file__).resolve().parent.parent.parent / "tools" / "env.py"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("KVSTORE_ENV_DIR", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("repository_env", ENV)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Builder:
    """Builds a folder with a file in it, and counts how often."""

    def __init__(self, path: Path, *, fails: bool = False) -> None:
        self.path = path
        self.fails = fails
        self.builds = 0

    def __call__(self) -> None:
        self.builds += 1
        self.path.mkdir(parents=True)
        (self.path / "python").touch()
        if self.fails:
            raise KeyboardInterrupt
        time.sleep(0.05)


def test_a_complete_folder_is_not_built_again(env: ModuleType) -> None:
    build = Builder(env.cache() / "thing")
    for _ in range(2):
        assert env.ensure(build.path, "python", "a thing", build) == build.path
    assert build.builds == 1


def test_an_interrupted_build_is_built_again_from_nothing(env: ModuleType) -> None:
    path = env.cache() / "thing"
    with pytest.raises(KeyboardInterrupt):
        env.ensure(path, "python", "a thing", Builder(path, fails=True))
    (path / "left over").touch()
    build = Builder(path)
    env.ensure(path, "python", "a thing", build)
    assert build.builds == 1
    assert not (path / "left over").exists()


def test_a_folder_whose_python_is_gone_is_built_again(env: ModuleType) -> None:
    build = Builder(env.cache() / "thing")
    env.ensure(build.path, "python", "a thing", build)
    (build.path / "python").unlink()
    (build.path / "python").symlink_to("/nowhere/python3")
    env.ensure(build.path, "python", "a thing", build)
    assert build.builds == 2


def test_builders_of_one_folder_wait_for_each_other(env: ModuleType) -> None:
    build = Builder(env.cache() / "thing")
    threads = [threading.Thread(target=env.ensure, args=(build.path, "python", "a thing", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert build.builds == 1


def test_another_pin_is_another_environment(env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PINS", tmp_path)
    (tmp_path / "tools.txt").write_text("pytest==9.2.0\n")
    before = env.key_of(("tools.txt",))
    assert env.key_of(("tools.txt",)) == before
    (tmp_path / "tools.txt").write_text("pytest==9.2.1\n")
    assert env.key_of(("tools.txt",)) != before


def test_every_pin_is_exact(env: ModuleType) -> None:
    for file in env.PINS.glob("*.txt"):
        pins = env.read_pins(file.name)
        assert pins
        assert all(pin.count("==") == 1 and "*" not in pin for pin in pins), file


def test_every_pinned_pytest_gets_an_environment_with_the_same_plugins(env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, set[str]] = {}

    def create(path: Path) -> None:
        (path / "bin").mkdir(parents=True)
        (path / "bin" / "python").touch()

    monkeypatch.setattr(env, "create_venv", create)
    monkeypatch.setattr(env, "pip_install", lambda path, *pins: installed.update({path.name: set(pins)}))
    root = env.suites()
    assert env.suites() == root
    assert {path.name for path in root.iterdir() if path.is_dir()} == set(installed)
    plugins = [pins - {f"pytest=={version}"} for version, pins in installed.items()]
    assert len(plugins) > 1
    assert all(pins == plugins[0] and not any(pin.startswith("pytest==") for pin in pins) for pins in plugins)


def test_lmcache_has_the_engines_packages_behind_it_and_brings_none_of_its_own(env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    base = env.cache() / "engine"
    calls: list[tuple[object, ...]] = []

    def create(path: Path) -> None:
        (path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        (path / "bin").mkdir()
        (path / "bin" / "python").touch()

    create(base)
    monkeypatch.setattr(env, "engine", lambda: base)
    monkeypatch.setattr(env, "create_venv", create)
    monkeypatch.setattr(env, "pip_install", lambda path, *arguments: calls.append(arguments))
    monkeypatch.setattr(env, "run", lambda command: calls.append(tuple(command)))
    path = env.lmcache()
    assert env.lmcache() == path
    assert calls[0] == ("--no-deps", "-r", env.PINS / "lmcache.txt")
    assert calls[1][0] == path / "bin" / "python"
    assert len(calls) == 2
    behind = path / "lib" / "python3.11" / "site-packages" / "engine.pth"
    assert str(base / "lib" / "python3.11" / "site-packages") in behind.read_text()


def test_another_engine_is_another_lmcache(env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PINS", tmp_path)
    for name in (*env.ENGINE_PINS, "lmcache.txt"):
        (tmp_path / name).write_text(f"{name.partition('.')[0]}==1\n")
    monkeypatch.setattr(env, "ensure", lambda path, *_: path)
    before = env.lmcache()
    (tmp_path / "engine.txt").write_text("engine==2\n")
    assert env.lmcache() != before


def test_a_failed_command_shows_what_it_printed(env: ModuleType) -> None:
    with pytest.raises(env.SetupError, match=r"(?s)exit code 3.*no such package"):
        env.run([sys.executable, "-c", "import sys; print('no such package', file=sys.stderr); sys.exit(3)"])


def test_the_engine_is_installed_without_what_conflicts_with_its_torch(env: ModuleType, tmp_path: Path) -> None:
    lines = [
        "numpy>=2",
        "torch==2.13.0+cpu",
        "torchaudio==2.13.0",
        "torchvision; platform_machine == 'x86_64'",
        "torchao",
        "boto3; extra == 's3'",
    ]
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.dist-info/METADATA", "Name: engine\n" + "".join(f"Requires-Dist: {line}\n" for line in lines) + "\n")
    assert env.requirements_of(wheel) == ["numpy>=2", "torchao"]


def test_an_unfit_python_is_refused_with_what_to_do(
    env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "OLDEST", (3, 99))
    assert env.main(["lint"]) == 1
    assert "make PYTHON=" in capsys.readouterr().err
    assert not env.cache().exists()


def test_missing_system_packages_are_named(env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env, "loads", lambda library: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert env.main(["engine"]) == 1
    assert "apt-get install libnuma1" in capsys.readouterr().err
    assert not env.cache().exists()


def test_a_venv_of_somebody_else_is_left_alone(env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "mine").touch()
    with pytest.raises(env.SetupError, match="move it away"):
        env.link_clone(tmp_path / "engine")
    assert (tmp_path / ".venv" / "mine").exists()
