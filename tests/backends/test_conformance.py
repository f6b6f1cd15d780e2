"""The backends of this repository are CONFORMANT in all that they claim, by the command that operators use."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from s3_server import REGION, S3Server

IN_ONE_PROCESS = {"core", "atomicity", "concurrency", "liveness", "errors", "deletion", "listing", "capacity", "tier"}
SHARED = IN_ONE_PROCESS | {"sharing", "durability"}
PEER = IN_ONE_PROCESS - {"deletion", "listing", "capacity"} | {"regions"}

RUNS = {
    "memory": (["memory:", "--largest=1GiB"], IN_ONE_PROCESS),
    "fs": (["fs"], SHARED),
    # What only a bound changes. The records of the other profiles are not many.
    "bounded fs": (
        ["fs", "--option=max_bytes=64MiB", "--profile=core,deletion,listing,capacity,tier"],
        {"core", "deletion", "listing", "capacity", "tier"},
    ),
    "bounded memory": (["memory:{fresh}?max_bytes=64MiB", "--profile=core,capacity"], {"core", "capacity"}),
}


def check(arguments: Sequence[str], claimed: set[str], folder: Path, timeout_s: float = 1100, modules: Path | None = None) -> str:
    """Run the suite, which finds targets among `modules`. Returns all that it wrote."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "kvstore_sdk", "conformance", *arguments, f"--report={report}"]
    environment = os.environ | ({"PYTHONPATH": str(modules)} if modules is not None else {})
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {profile: found["verdict"] for profile, found in json.loads(report.read_text())["verdicts"].items()}
    assert {profile for profile, verdict in verdicts.items() if verdict == "CONFORMANT"} == claimed, done.stdout
    assert set(verdicts.values()) <= {"CONFORMANT", "NOT CLAIMED"}, done.stdout
    return done.stdout + done.stderr + report.read_text()


# Three minutes is what the whole suite may take on a folder, on a machine that does nothing else.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("arguments", "claimed"), RUNS.values(), ids=RUNS)
def test_it_is_conformant_in_all_that_it_claims(arguments: Sequence[str], claimed: set[str], tmp_path: Path) -> None:
    check(arguments, claimed, tmp_path)


@pytest.mark.timeout(1200)
def test_a_folder_is_conformant_where_the_package_was_built_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_FS_NATIVE", "0")
    claimed = {"core", "atomicity", "errors"}
    check(["fs", f"--profile={','.join(sorted(claimed))}"], claimed, tmp_path)


# With NIXL a process takes seconds to start, and a child of its own as well, and the suite starts many: most of it is for the long run.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engine", "claimed"),
    [
        ("s3fs", SHARED),
        ("nixl", {"core"}),
        pytest.param("nixl", SHARED, marks=pytest.mark.long),
    ],
    ids=["s3fs", "nixl core", "nixl"],
)
def test_object_stores_are_conformant_and_their_keys_shown_nowhere(
    engine: str, claimed: set[str], s3_server: S3Server, tmp_path: Path
) -> None:
    """Fewer sequences of operations than elsewhere, and no large records: a server answers in milliseconds, and keeps all in memory."""
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    bucket = s3_server.make_bucket(f"conformance-{engine}-{len(claimed)}")
    keys = {"access_key_id": "AKIAOFTHECONFORMANCE", "secret_access_key": "secret/of+the/conformance0run"}
    arguments = [f"s3://{bucket}/{{fresh}}/kv?endpoint={s3_server.endpoint}&region={REGION}&engine={engine}"]
    arguments += [f"--option={name}={value}" for name, value in keys.items()]
    if claimed != SHARED:
        arguments.append(f"--profile={','.join(claimed)}")
    written = check([*arguments, "--largest=4MiB", "--examples=5"], claimed, tmp_path, timeout_s=1700)
    assert not [name for name, value in keys.items() if value in written]


# As above: with NIXL each node has a child that takes seconds to start.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("factory", "data", "claimed"),
    [
        ("open_node", "zmq", PEER | {"capacity"}),
        ("open_asker", "zmq", PEER),
        ("open_asker", "nixl", {"regions"}),
        pytest.param("open_asker", "nixl", PEER, marks=pytest.mark.long),
        pytest.param("open_node", "nixl", PEER | {"capacity"}, marks=pytest.mark.long),
    ],
    ids=["node", "asker over zmq", "asker over nixl, regions", "asker over nixl", "node with nixl"],
)
def test_nodes_are_conformant_with_what_they_have_and_with_what_a_peer_has(
    factory: str, data: str, claimed: set[str], tmp_path: Path
) -> None:
    """An asker has nothing of its own: what is put in these runs goes to its peer, what is looked up and loaded comes from there."""
    for needed in ("zmq", "nixl") if data == "nixl" else ("zmq",):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    arguments = [f"p2p_targets:{factory}", f"--option=data={data}", "--largest=16MiB", "--examples=10"]
    if claimed == {"regions"}:
        arguments.append("--profile=regions")
    check(arguments, claimed, tmp_path, timeout_s=1700, modules=Path(__file__).parent / "p2p")
