"""Build what `make` runs in: environments that are too large for the repository, kept outside of it and shared by every clone.

    python3 tools/env.py engine      a real vLLM on CPU with the test tools, and `.venv` of this clone on top of it
    python3 tools/env.py overlays    Python files of other vLLM versions; prints their folder, which holds `<version>/vllm`
    python3 tools/env.py lint        the test tools without any engine; prints the folder of the environment
    python3 tools/env.py suites      what vendors run the suite with; prints a folder that holds an environment for each version of pytest
    python3 tools/env.py lmcache     LMCache on top of the engine, for `make bench-peers`; prints the folder of the environment
    python3 tools/env.py pins        resolve the engine anew and write `tools/pins/constraints.txt`

Everything lies in `$KVSTORE_ENV_DIR`, by default `~/.cache/kvstore-sdk`, in folders named after the pins that they were built from: a
changed pin is a new folder. A folder counts once its file `.complete` is there, so that an interrupted build is built again, and
builders of one folder wait for each other. Packages come from wherever this machine's pip is configured to look.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from email.parser import Parser
from pathlib import Path

OLDEST, TOO_NEW = (3, 11), (3, 15)  # of the engine's wheel
ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "pins"
ENGINE_PINS = ("engine.txt", "stores.txt", "peers.txt", "nixl.txt", "tools.txt", "constraints.txt")
LMCACHE_USED = ("lmcache.lmcache_fs", "lmcache.v1.distributed.l2_adapters.fs_l2_adapter", "lmcache.v1.storage_backend.local_disk_backend")
COMPLETE = ".complete"

# What an installation compiles, and how.
NATIVE = (ROOT / "tools" / "native.py", ROOT / "backends" / "kvstore_sdk_backends" / "fs" / "records.c")

BUILD_TIMEOUT_S = 3600.0  # one command of pip on a slow line; the whole engine takes 2 minutes on a fast one
LOCK_TIMEOUT_S = 2 * BUILD_TIMEOUT_S

# Variables that make pip or Python look at, or install to, another place than the environment they are called for.
MISLEADING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")

# What torch asks for in one version, and another in each of its builds.
OF_THE_BUILD = re.compile(r"(triton|cuda-|nvidia-)")

# The engine needs none of these for text models, and their builds conflict with the torch it was compiled against.
UNWANTED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


class SetupError(Exception):
    """Something this machine lacks, or a command that failed; one message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the environments of this repository.")
    parser.add_argument("what", choices=["engine", "overlays", "lint", "suites", "lmcache", "pins"])
    what = parser.parse_args(arguments).what
    try:
        if not OLDEST <= sys.version_info[:2] < TOO_NEW:
            found = sys.version.partition(" ")[0]
            raise SetupError(f"this is Python {found}, it must be 3.11 to 3.14; choose another one: make PYTHON=python3.12 ...")
        need_system_packages(engine=what in ("engine", "lmcache", "pins"))
        if what == "engine":
            link_clone(engine())
        elif what == "overlays":
            print(overlays())
        elif what == "lint":
            print(lint())
        elif what == "suites":
            print(suites())
        elif what == "lmcache":
            print(lmcache())
        else:
            write_constraints()
    except SetupError as problem:
        print(f"tools/env.py: {problem}", file=sys.stderr)
        return 1
    return 0


def cache() -> Path:
    """The folder that all environments lie in."""
    return Path(os.environ.get("KVSTORE_ENV_DIR") or "~/.cache/kvstore-sdk").expanduser().resolve()


def engine() -> Path:
    """The environment with the engine and the test tools."""
    path = cache() / f"engine-{key_of(ENGINE_PINS)}"
    what = "vLLM on CPU, clients of stores and the test tools, some minutes and 3.5 to 6.5 GB"
    return ensure(path, "bin/python", what, lambda: build_engine(path, constrained=True))


def lint() -> Path:
    """The environment with the test tools and no engine: proof that the core is typed and packaged without one."""
    path = cache() / f"lint-{key_of(('tools.txt',))}"

    def build() -> None:
        create_venv(path)
        pip_install(path, "-r", PINS / "tools.txt")

    return ensure(path, "bin/python", "linters", build)


def suites() -> Path:
    """A folder that holds `<version>/bin/python` for every pinned version of pytest: what a vendor may have."""
    root = cache() / f"suites-{key_of(('suites.txt',))}"
    pins = read_pins("suites.txt")
    versions = [pin for pin in pins if pin.startswith("pytest==")]
    others = [pin for pin in pins if pin not in versions]

    def build(path: Path, requirement: str) -> None:
        create_venv(path)
        pip_install(path, requirement, *others)

    for requirement in versions:
        path = root / requirement.partition("==")[2]
        ensure(path, "bin/python", f"{requirement} and its plugins", functools.partial(build, path, requirement))
    return root


def lmcache() -> Path:
    """The environment with LMCache, which has the engine's packages behind it."""
    path = cache() / f"lmcache-{key_of((*ENGINE_PINS, 'lmcache.txt'))}"

    def build() -> None:
        base = engine()
        create_venv(path)
        put_behind(path, base)
        pip_install(path, "--no-deps", "-r", PINS / "lmcache.txt")
        # What it lacks it would say in the middle of a measurement.
        run([path / "bin" / "python", "-c", f"import {', '.join(LMCACHE_USED)}"])

    return ensure(path, "bin/python", "LMCache on the engine's packages, 0.1 GB", build)


def overlays() -> Path:
    """A folder that holds `<version>/vllm` for every pinned version: Python files and nothing compiled."""
    root = cache() / "vllm-overlays"
    for requirement in read_pins("overlays.txt"):
        path = root / requirement.partition("==")[2]
        what = f"Python files of {requirement}, 0.1 to 0.4 GB to download"
        ensure(path, "vllm/__init__.py", what, functools.partial(build_overlay, path, requirement))
    return root


def link_clone(base: Path) -> None:
    """Make `.venv`: this clone, installed editable, with the packages of `base` behind it. Done again when either changed."""
    path = ROOT / ".venv"
    stamp = path / ".kvstore-env.json"
    project = digest([ROOT / "pyproject.toml", *NATIVE])
    wanted = json.dumps({"base": str(base), "root": str(ROOT), "project": project})
    with locked(cache() / f"clone-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}.lock", "this clone's .venv"):
        if path.exists() and not stamp.exists():
            raise SetupError(f"{path} was not made by this tool; move it away")
        if stamp.exists() and stamp.read_text() == wanted and (path / "bin" / "python").exists():
            return
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        stamp.touch()  # marks the folder as ours also when this build is interrupted
        create_venv(path, with_pip=False)
        put_behind(path, base)
        pip_install(path, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        stamp.write_text(wanted)


def write_constraints() -> None:
    """Resolve the engine's requirements from scratch and pin every package that came of it."""
    target = PINS / "constraints.txt"
    with tempfile.TemporaryDirectory(prefix="pins-", dir=make_cache()) as scratch:
        path = Path(scratch) / "venv"
        build_engine(path, constrained=False)
        listed = run([path / "bin" / "python", "-m", "pip", "list", "--format=freeze", "--exclude", "pip"])
    names = ("engine.txt", "stores.txt", "peers.txt", "nixl.txt", "tools.txt")
    own = {re.split(r"[\[=]", requirement)[0] for name in names for requirement in read_pins(name)}
    found = (line for line in listed.splitlines() if "==" in line and not OF_THE_BUILD.match(line))
    # A local version such as +cpu names one builder's build; any build of the release will do.
    lines = sorted(line.partition("+")[0] for line in found if line.partition("==")[0] not in own)
    head = "# Every package behind the pins of engine.txt, stores.txt, peers.txt and tools.txt. Written by `python3 tools/env.py pins`.\n"
    target.write_text(head + "\n".join(lines) + "\n")
    say(f"wrote {target.relative_to(ROOT)}, {len(lines)} packages")


def build_engine(path: Path, *, constrained: bool) -> None:
    create_venv(path)
    pinned = read_pins("engine.txt")
    wheel_pin = next(pin for pin in pinned if pin.startswith("vllm"))
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=path) as scratch:
        wheel = download(path, wheel_pin, Path(scratch))
        wanted = Path(scratch) / "requirements.txt"
        others = [pin for pin in pinned if pin != wheel_pin]
        wanted.write_text("\n".join([*others, *requirements_of(wheel)]) + "\n")
        limits: list[str | Path] = ["-c", PINS / "constraints.txt"] if constrained else []
        pip_install(path, "-r", wanted, "-r", PINS / "stores.txt", "-r", PINS / "peers.txt", "-r", PINS / "tools.txt", *limits)
        pip_install(path, "--no-deps", wheel)
        pip_install(path, "--no-deps", "-r", PINS / "nixl.txt")
    # Half a minute now rather than a riddle in some test later.
    run([path / "bin" / "python", "-c", "import torch, vllm, vllm.v1.kv_offload.base, nixl._api, s3fs"])


def build_overlay(path: Path, requirement: str) -> None:
    path.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=path) as scratch:
        wheel = download(engine(), requirement, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(path, wanted)


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires without extras, less what it does not need here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    return [line for line in required if "extra ==" not in line and not UNWANTED.match(line)]


def ensure(path: Path, proof: str, what: str, build: Callable[[], None]) -> Path:
    """Return `path`, built completely: by this call when it was absent, unfinished, or `proof` in it is gone."""
    if is_complete(path, proof):
        return path
    make_cache()
    path.parent.mkdir(exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), what):
        if not is_complete(path, proof):
            if path.exists():
                shutil.rmtree(path)
            say(f"building {path} ({what})")
            began = time.monotonic()
            build()
            (path / COMPLETE).touch()
            say(f"built {path.name} in {time.monotonic() - began:.0f} s")
    return path


def is_complete(path: Path, proof: str) -> bool:
    # The proof fails too when the Python that an environment points to was removed from the machine.
    return (path / COMPLETE).exists() and (path / proof).exists()


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`. It stays behind: removing it would let two builders in."""
    make_cache()
    with open(path, "w") as file:
        give_up_at = time.monotonic() + LOCK_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise SetupError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                if not told:
                    say(f"another process builds {what}; waiting for it")
                    told = True
                time.sleep(0.5)
        yield


def key_of(pins: Sequence[str]) -> str:
    """Names an environment after its pins and the Python it is made with."""
    python = f"{sys.base_prefix} {sys.version}".encode()
    return f"{sys.version_info[0]}.{sys.version_info[1]}-{digest([PINS / name for name in pins], python)}"


def digest(files: Sequence[Path], more: bytes = b"") -> str:
    return hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), more])).hexdigest()[:12]


def read_pins(name: str) -> list[str]:
    lines = (line.strip() for line in (PINS / name).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def create_venv(path: Path, *, with_pip: bool = True) -> None:
    # A process of its own, so that it starts without the variables that `run` takes away.
    run([sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), path])


def put_behind(environment: Path, base: Path) -> None:
    """Let `environment` import what `base` has, after its own."""
    site = next(environment.glob("lib/python3.*/site-packages"))
    behind = next(base.glob("lib/python3.*/site-packages"))
    # addsitedir and not a bare path, so that the .pth files over there count as well.
    (site / "engine.pth").write_text(f"import site; site.addsitedir({str(behind)!r})\n")


def pip_install(environment: Path, *arguments: str | Path) -> None:
    # Not --quiet: what it prints is shown only when it fails, and then it has to say why.
    options = ["--no-input", "--no-warn-script-location", "--progress-bar", "off"]
    run([environment / "bin" / "python", "-m", "pip", "install", *options, *arguments])


def download(environment: Path, requirement: str, folder: Path) -> Path:
    """Fetch one wheel without what it requires."""
    options = ["--no-input", "--progress-bar", "off", "--no-deps", "--only-binary", ":all:"]
    run([environment / "bin" / "python", "-m", "pip", "download", *options, "-d", folder, requirement])
    return next(folder.glob("*.whl"))


def run(command: Sequence[str | Path]) -> str:
    """Run a command, silent unless it fails. Returns what it printed on standard output."""
    clean = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"this took longer than {BUILD_TIMEOUT_S:.0f} s: {shown}") from None
    if done.returncode:
        raise SetupError(f"this failed with exit code {done.returncode}: {shown}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
    return done.stdout


def need_system_packages(*, engine: bool) -> None:
    """Install Debian packages that are missing where this may be done, else say which.

    Raises:
        SetupError: packages are missing and this process cannot install them.
    """
    missing = []
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(f"python3.{sys.version_info[1]}-venv")
    if engine and not loads("libnuma.so.1"):
        missing.append("libnuma1")  # the engine's kernels link to it
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"missing on this machine; as root: apt-get install {' '.join(missing)}")
    say(f"installing {', '.join(missing)}")
    run(["apt-get", "update", "-qq"])
    run(["apt-get", "install", "-y", "-qq", *missing])


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def make_cache() -> Path:
    cache().mkdir(parents=True, exist_ok=True)
    return cache()


def say(text: str) -> None:
    # Standard output is for the answer, which a shell may read.
    print(f"tools/env.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
