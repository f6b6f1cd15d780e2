"""Which scripts `run.py` runs, with what, and what each needs."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 900.0
# `quick` shows that a script runs; what it finds in so few rounds says little.
PROFILES = ("quick", "full")

# What a script may need besides the SDK: the modules that are looked for, and where they come from.
MODULES = {
    "vLLM": (("vllm",), "make bench installs it"),
    "the extra s3": (("s3fs",), "pip install 'kvstore-sdk[s3]'"),
    "the extra nixl": (("nixl",), "pip install 'kvstore-sdk[nixl]'"),
    "the extra p2p": (("zmq", "msgpack"), "pip install 'kvstore-sdk[p2p]'"),
    "moto's server": (("moto", "flask", "flask_cors"), "pip install 'moto[s3]' flask flask-cors"),
}
PROGRAMS = {"fio": "apt-get install fio"}
LMCACHE = "LMCache"


@dataclass(frozen=True)
class Script:
    """One file of this folder, and how it is run.

    Attributes:
        name: The file, without its ending.
        what: One line for the page.
        arguments: By profile, besides the files that it writes.
        needs: Of `MODULES`, `PROGRAMS` and `LMCACHE`.
        targets: Those of `targets.TARGETS` that it judges.
        outputs: Of json, markdown and svg, those that it takes.
        folders: Those of its outputs that are a folder and no file.
        disk_gb: What it has below the folder at one time, by profile; it takes `--folder` where this is given.
        memory_gb: What all its processes have at one time.
        limit_s: After that it is ended.
    """

    name: str
    what: str
    arguments: dict[str, tuple[str, ...]]
    needs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("json", "markdown", "svg")
    folders: tuple[str, ...] = ()
    disk_gb: dict[str, float] | None = None
    memory_gb: float = 2.0
    limit_s: float = LIMIT_S

    def files(self, out: Path) -> dict[str, Path]:
        """Where each of its outputs goes."""
        endings = {"json": ".json", "markdown": ".md", "svg": ".svg"}
        return {kind: out / (self.name if kind in self.folders else self.name + endings[kind]) for kind in self.outputs}

    def command(self, python: str, profile: str, out: Path, folder: Path, lmcache: Path | None) -> list[str]:
        """What runs it."""
        command = [python, "-u", str(HERE / f"{self.name}.py"), *self.arguments[profile]]
        if self.disk_gb is not None:
            command += ["--folder", str(folder)]
        if LMCACHE in self.needs:
            command += ["--lmcache", str(lmcache)]
        for kind, path in self.files(out).items():
            command += [f"--{kind}", str(path)]
        return command


def quickly(rounds: int, *more: str) -> dict[str, tuple[str, ...]]:
    """So many rounds, and with `more`; in full what the script does by itself."""
    return {"quick": ("--rounds", str(rounds), *more), "full": ()}


SCRIPTS = (
    Script(
        "fs",
        "the fs backend beside the C functions of vLLM's fs tier",
        quickly(2, "--sizes", "32KiB,1MiB", "--threads", "1,8", "--modes", "direct,warm"),
        needs=("vLLM",),
        targets=("fs", "fs-sizes", "fs-warm"),
        disk_gb={"quick": 6, "full": 16},
    ),
    Script(
        "fio",
        "the fs backend beside fio",
        quickly(2, "--sizes", "1MiB", "--threads", "1,8", "--engines", "psync"),
        needs=("fio",),
        targets=("fs-fio",),
        disk_gb={"quick": 6, "full": 12},
    ),
    Script(
        "peers",
        "the fs backend beside LMCache's ways to a disk; `make bench-peers` runs it",
        quickly(2, "--sizes", "32KiB,1MiB", "--threads", "1,8", "--l2-sizes", "1MiB"),
        needs=(LMCACHE,),
        targets=("fs-lmcache",),
        folders=("json", "svg"),
        disk_gb={"quick": 8, "full": 8},
        memory_gb=4,
    ),
    Script(
        "calls",
        "what a tier's calls and steps cost the scheduler's thread, beside vLLM's fs tier",
        quickly(3),
        needs=("vLLM",),
        targets=("calls",),
        disk_gb={"quick": 2, "full": 4},
    ),
    Script("scale", "10^3 to 10^6 known keys", quickly(1, "--sizes", "1000,10000,100000"), targets=("scale",), memory_gb=4),
    Script(
        "gil",
        "a main loop in pure Python beside a tier's I/O, in its process and in another",
        quickly(2, "--sizes", "1 MiB"),
        targets=("gil",),
        disk_gb={"quick": 2, "full": 2},
    ),
    Script("host", "the books of host memory beside vLLM's", quickly(2), needs=("vLLM",)),
    Script("device_copy", "taking a chunk apart beside one memcpy", quickly(2), needs=("vLLM",)),
    Script(
        "s3",
        "the s3 backend beside NIXL, vLLM's obj tier, boto3 and s3fs",
        quickly(1, "--sizes", "1MiB", "--concurrency", "1,8"),
        needs=("vLLM", "the extra s3", "the extra nixl", "moto's server"),
        targets=("s3",),
        folders=("json", "svg"),
        memory_gb=5,
    ),
    Script(
        "p2p_nixl",
        "the data plane of p2p beside NIXL",
        {"quick": ("--rounds", "2", "--seconds", "20", "--sizes", "1MiB", "--in-flight", "1,8"), "full": ("--seconds", "300")},
        needs=("the extra nixl", "the extra p2p"),
        targets=("p2p-nixl",),
        folders=("json", "svg"),
        memory_gb=3,
    ),
    Script(
        "p2p",
        "the p2p backend beside raw ZMQ, sockets and vLLM's p2p tier",
        quickly(2, "--sizes", "1MiB", "--in-flight", "8", "--chunks", "1024KiB", "--transports", "default"),
        needs=("vLLM", "the extra nixl", "the extra p2p"),
        targets=("p2p-vllm",),
        folders=("json", "svg"),
        memory_gb=6,
    ),
    Script(
        "tools",
        "kvstore verify beside plain reading",
        quickly(1, "--sizes", "1MiB", "--modes", "direct"),
        disk_gb={"quick": 1, "full": 1},
    ),
    Script(
        "fs_capacity",
        "what a bound of fs costs",
        {"quick": ("--records", "1000", "10000"), "full": ()},
        outputs=(),
        disk_gb={"quick": 1, "full": 8},
    ),
    Script(
        "isolation",
        "a backend in a child process, below a tier alone",
        quickly(1, "--ways", "direct", "--operations", "get") | {"full": ("--rounds", "3")},
        outputs=("json", "markdown"),
        disk_gb={"quick": 2, "full": 2},
    ),
    Script(
        "survive",
        "a store that is dead, slow, or back again",
        {"quick": ("--loads", "50", "--rounds", "3"), "full": ()},
        targets=("survive",),
        outputs=("json",),
    ),
    Script(
        "ttft",
        "time to first token of real engines on the CPU, with all chunks in each tier",
        quickly(1, "--lengths", ""),
        needs=("vLLM", "the extra s3", "the extra p2p", "moto's server"),
        targets=("ttft",),
        disk_gb={"quick": 4, "full": 8},
        memory_gb=12,
        limit_s=1800.0,
    ),
)


def lacks(script: Script, lmcache: Path | None) -> list[str]:
    """What `script` needs and this machine has not, with where it comes from."""
    missing = []
    for need in script.needs:
        if need == LMCACHE:
            there, comes = lmcache is not None, "make bench-peers"
        elif need in PROGRAMS:
            there, comes = shutil.which(need) is not None, PROGRAMS[need]
        else:
            modules, comes = MODULES[need]
            there = all(importlib.util.find_spec(module) is not None for module in modules)
        if not there:
            missing.append(f"{need} ({comes})")
    if (free_gb := available_gb()) < script.memory_gb:
        missing.append(f"{script.memory_gb:.0f} GB of memory ({free_gb:.0f} are to be had)")
    return missing


def available_gb() -> float:
    """Memory that the kernel says it could give; endless where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("MemAvailable")), float("inf"))
