"""Build what the package has in C: `python tools/native.py` for this tree, and the hook by which an installation does it.

A C compiler (`$CC`, or cc) is all it takes. Without one, or when it fails, the installation succeeds and moves records in Python.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("backends/kvstore_sdk_backends/fs/records.c")
LIBRARY = Path("backends/kvstore_sdk_backends/fs/_librecords.so")
TIMEOUT_S = 120.0


class NativeHook(BuildHookInterface[Any]):
    """Builds the library into the tree that is installed, and into a wheel that then is for this platform and any Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        problem = build(Path(self.root))
        if problem:
            self.app.display_warning(f"{LIBRARY.name} is not built, records are moved by Python alone: {problem}")
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build(root: Path) -> str:
    """Compile the library below `root`. Returns what went wrong, or ""; there is no library then.

    Equal sources and compilers make equal bytes, wherever they lie.
    """
    target = root / LIBRARY
    # Never written over: a process may have it mapped.
    made = target.with_suffix(f".{os.getpid()}")
    given = os.environ.get("CC") or "cc"
    try:
        compiler = shlex.split(given)
        subprocess.run(
            [*compiler, "-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-o", made, root / SOURCE],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        made.replace(target)
    except subprocess.CalledProcessError as failed:
        problem = f"{given} ended with {failed.returncode}: {failed.stderr.strip()[-2000:]}"
    except (OSError, ValueError, subprocess.SubprocessError) as cause:
        problem = str(cause)
    else:
        return ""
    # One of an older source must not go into a wheel, nor be used. A tree that is read-only, or another's, stays as it is.
    for path in (made, target):
        with contextlib.suppress(OSError):
            path.unlink()
    return problem


if __name__ == "__main__":
    sys.exit(build(Path(__file__).resolve().parent.parent) or 0)
