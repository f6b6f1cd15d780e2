"""A vendor's folder with one module in it, and the suite run there as a vendor does: by commands, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ACME", "Done", "Vendor"]

TIMEOUT_S = 300.0
QUICK = ("core", "64KiB", "5")

# `fault` makes it wrong in one way, so that one file serves all tests.
ACME = '''
"""A dictionary for each location, as little as a backend can be."""

from pathlib import Path

from kvstore_sdk.backend import (
    BackendError, Capabilities, GetResult, GetStatus, InvalidError, Mode, PutResult, PutStatus, is_valid_name
)

PLACES = {}


class AcmeStore:
    capabilities = Capabilities(max_record_bytes=65536)

    def __init__(self, records, fault):
        self.records, self.fault = records, fault

    def exists(self, names, deadline):
        return [self.fault == "says yes" or name in self.records for name in names]

    def put(self, puts, deadline):
        if self.fault == "changes its mind":
            self.capabilities = Capabilities(max_record_bytes=65536, max_batch=63)
        return [self.put_one(put) for put in puts]

    def put_one(self, put):
        if put.size_bytes > 65536 and self.fault != "takes all":
            return PutResult(PutStatus.FAILED, InvalidError(f"{put.name}: {put.size_bytes} bytes are too many"))
        if not is_valid_name(put.name):
            return PutResult(PutStatus.FAILED, InvalidError(f"{put.name!r} is no name"))
        if put.mode is Mode.CREATE and put.name in self.records:
            return PutResult(PutStatus.EXISTS)
        self.records[put.name] = b"".join(bytes(part.view) for part in put.parts)
        return PutResult(PutStatus.STORED)

    def get(self, gets, deadline):
        return [self.get_one(get) for get in gets]

    def get_one(self, get):
        if self.fault == "in doubt":
            return GetResult(GetStatus.IN_DOUBT, ticket=get.name)
        record = self.records.get(get.name)
        if record is None:
            return GetResult(GetStatus.MISSING)
        if len(record) != get.size_bytes:
            return GetResult.wrong_size(len(record), get.size_bytes)
        for part in get.into:
            part.view[:], record = record[: part.length], record[part.length :]
        return GetResult(GetStatus.FOUND)

    def close(self):
        pass


def open_store(location, *, fault="", secret_key=""):
    print(f"opening with {secret_key}")
    if fault == "cannot open":
        raise BackendError(f"no connection with {secret_key}")
    if fault == "crashes":
        return {}[secret_key]
    if fault == "wants a secret" and secret_key != "hunter2":
        raise BackendError("the secret did not arrive")
    if fault == "wants a secret" and "hunter2" in Path("/proc/self/cmdline").read_text():
        raise BackendError("every user can read the secret")
    if fault == "leaves":
        raise SystemExit(0)
    return AcmeStore(PLACES.setdefault(location, {}), fault)
'''


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The only line on standard error; pytest puts an empty one below it."""
        [line] = self.err.strip().splitlines()
        return line


@dataclass(frozen=True)
class Vendor:
    """A folder, the Python that is used in it, and where that finds the SDK.

    Attributes:
        folder: Where the commands are started.
        python: The interpreter of an environment with some version of pytest.
        sdk: A folder with the installed SDK, entry points included.
    """

    folder: Path
    python: Path
    sdk: Path

    def write(self, **files: str) -> None:
        """Write files: `acme_store_py=...` is `acme_store.py`."""
        for name, text in files.items():
            stem, _, suffix = name.rpartition("_")
            (self.folder / f"{stem}.{suffix}").write_text(text)

    def pytest(self, *arguments: str, target: str | None = "acme_store:open_store", env: Mapping[str, str] | None = None) -> Done:
        """The suite by pytest: the profile core with small records unless `arguments` say more."""
        profile, largest, examples = QUICK
        backend = ["--kvstore-backend", target] if target is not None else []
        command = ["--pyargs", "kvstore_sdk_conformance", *backend, f"--kvstore-largest={largest}", f"--kvstore-examples={examples}"]
        command += [] if any("profile" in argument for argument in arguments) else [f"--kvstore-profile={profile}"]
        return self.plain_pytest(*command, *arguments, env=env)

    def plain_pytest(self, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        # Installed everywhere here, and would shuffle every run.
        calm = [] if "--randomly-seed=7" in arguments else ["-p", "no:randomly"]
        return self.run("-m", "pytest", "-p", "no:cacheprovider", *calm, *arguments, env=env)

    def kvstore(self, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        """The command `kvstore`."""
        return self.run("-m", "kvstore_sdk", *arguments, env=env)

    def conformance(self, *arguments: str, target: str = "acme_store:open_store", env: Mapping[str, str] | None = None) -> Done:
        """The suite by `kvstore conformance`, as small as by `pytest`."""
        profile, largest, examples = QUICK
        quick = [f"--profile={profile}", f"--largest={largest}", f"--examples={examples}"]
        return self.kvstore("conformance", target, *quick, *arguments, env=env)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        # Compiled once for all runs, and nothing in the folder of the vendor.
        environment = clean | {"PYTHONPATH": str(self.sdk), "PYTHONPYCACHEPREFIX": str(self.sdk.parent / "compiled")} | dict(env or {})
        done = subprocess.run(
            [self.python, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def report(self, name: str = "report.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found
