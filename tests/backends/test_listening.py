"""But for nodes that talk to peers nothing here waits for connections: whoever can reach the machine reaches no port and no socket of an
engine's storage."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

SCRIPT = """
import json, os, socket, sys
from kvstore_sdk.backend import Deadline, Get, Put, Region, SupportsRegions, open_backend

def family():
    # This process, and all that it started.
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found

def listening():
    own = set()
    for pid in family():
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if link.startswith("socket:["):
                own.add(link[8:-1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            words = line.split()
            # A datagram socket that is bound and connected to nobody takes whatever comes.
            if words[9] in own and (words[3] == "0A" or table.startswith("udp") and set(words[2].split(":")[0]) == {"0"}):
                found.append([table, words[1]])
    for line in open("/proc/self/net/unix").readlines()[1:]:
        words = line.split()
        if words[6] in own and int(words[3], 16) & 0x10000:
            found.append(["unix", words[-1]])
    return found

region = Region(1 << 16)
told = []
for target, options in json.loads(sys.argv[1]):
    backend = open_backend(target, options)
    if isinstance(backend, SupportsRegions):
        backend.register_region(region)
    record = region.buffer(0, 8192)
    backend.put([Put("a", (record,))], Deadline.after(30))
    backend.get([Get("a", (record,))], Deadline.after(30))
    backend.exists(["a", "b"], Deadline.after(30))
    told.append([target.partition(":")[0], listening()])
    backend.close()
with socket.create_server(("127.0.0.1", 0)) as server:
    told.append(["a server", [table for table, _ in listening()]])
print(json.dumps(told))
"""


def test_no_backend_listens_while_it_is_used(tmp_path: Path, s3_server: S3Server) -> None:
    """SEC-07: that this would be seen is shown by a socket that does."""
    targets: list[tuple[str, dict[str, str]]] = [
        ("memory:", {}),
        (f"file://{tmp_path}/kv", {}),
        (f"file://{tmp_path}/bounded", {"max_bytes": "64MiB"}),
    ]
    for engine in ("s3fs", "nixl"):
        if importlib.util.find_spec(engine) is not None:
            bucket = s3_server.make_bucket(f"listening-{engine}")
            keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
            targets.append((f"s3://{bucket}/kv", {"engine": engine, "endpoint": s3_server.endpoint, "region": REGION, **keys}))
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(targets)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == [[target.partition(":")[0], []] for target, _ in targets] + [["a server", ["tcp"]]]
