"""Whatever changes the meaning of bytes turns a hit into a miss, in every backend that the package registers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import types
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from scripted_fs import ScriptedFileSystem
from scripted_fs import Store as FsspecStore

from kvstore_sdk.backend import Backend, Deadline, GetResult, GetStatus, PutStatus, SupportsList, registered_backends
from kvstore_sdk.format import HEADER_BYTES, Flaw, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory
from kvstore_sdk_backends.p2p import open_p2p
from kvstore_sdk_backends.s3 import open_s3
from kvstore_sdk_backends.s3.fsspec_client import FileSystemKind
from kvstore_sdk_backends.s3.fsspec_opening import open_fsspec
from kvstore_sdk_backends.s3.settings import S3Settings

LIMIT_S = 30.0
PAYLOAD_BYTES = 3000
HASH = hashlib.sha256(b"the same tokens").digest()


def matrix() -> types.ModuleType:
    """The module that has another value of every field of an identity, and fails when a field lacks one."""
    spec = importlib.util.spec_from_file_location("identity_matrix", Path(__file__).parents[1] / "test_identity.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MATRIX = matrix()
FIELDS = [(cls, field) for cls, fields in MATRIX.OTHER.items() for field in fields]


def in_memory(request: pytest.FixtureRequest) -> Backend:
    return open_memory("")


def in_a_folder(request: pytest.FixtureRequest) -> Backend:
    return open_fs(str(request.getfixturevalue("tmp_path") / "kv"))


def in_a_bucket(request: pytest.FixtureRequest) -> Backend:
    if importlib.util.find_spec("s3fs") is None:
        pytest.skip("s3fs is not installed")
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = server.make_bucket("identity-in-every-backend")
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    return open_s3(f"{bucket}/kv", engine="s3fs", endpoint=server.endpoint, region=REGION, **keys)


def in_a_file_system(request: pytest.FixtureRequest) -> Backend:
    objects = FsspecStore()
    kind = FileSystemKind("any", "fsspec", lambda **options: ScriptedFileSystem(store=objects, **options), objects.end)
    return open_fsspec(kind, "buck/kv", json.dumps({}), S3Settings(concurrency=4, retries=0))


class AtAPeer:
    """Stored by one node, and looked for by another that asks it."""

    def __init__(self) -> None:
        owner = open_p2p("127.0.0.1:0", serve_bytes=32 << 20, data="zmq")
        asker = open_p2p("127.0.0.1:0", peers=str(owner.address), data="zmq", answer_timeout_s=20.0)
        self.capabilities = owner.capabilities
        self.put, self.exists, self.get = owner.put, asker.exists, asker.get
        self._nodes = (asker, owner)

    def close(self) -> None:
        for node in self._nodes:
            node.close()


def at_a_peer(request: pytest.FixtureRequest) -> Backend:
    if importlib.util.find_spec("msgpack") is None:
        pytest.skip("the extra p2p is not installed")
    return AtAPeer()


OPENERS: dict[str, Callable[[pytest.FixtureRequest], Backend]] = {
    "memory": in_memory,
    "fs": in_a_folder,
    "file": in_a_folder,
    "s3": in_a_bucket,
    "p2p": at_a_peer,
    # One code for both; what differs is the file system of fsspec below.
    "gs": in_a_file_system,
    "abfs": in_a_file_system,
}


@pytest.fixture(params=OPENERS)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = OPENERS[request.param](request)
    yield made
    made.close()


def sealed(key: ChunkKey, layout: str) -> bytes:
    record = bytearray(record_bytes(PAYLOAD_BYTES))
    record[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = hashlib.shake_128(key.name.encode()).digest(PAYLOAD_BYTES)
    seal(memoryview(record), key, layout, PAYLOAD_BYTES)
    return bytes(record)


def test_every_backend_of_the_package_is_in_the_matrix() -> None:
    """KEY-11: one that is registered without being opened here fails."""
    ours = {point.name for point in registered_backends().values() if point.value.startswith("kvstore_sdk_backends.")}
    assert set(OPENERS) == ours
    assert {point.name for point in entry_points(group="kvstore_sdk.backends")} >= ours


def test_the_same_tokens_under_another_identity_are_a_miss(backend: Any, desk: Any) -> None:
    """KEY-11, SEC-01: each field of the identity, tenant and adapters among them: not found, not read, not listed, and never good."""
    pairs = [MATRIX.changed(cls, field, value) for cls, field in FIELDS for value in MATRIX.OTHER[cls][field]]
    bases = {base.namespace: base for base, _ in pairs}
    others = {other.namespace: other for _, other in pairs}
    assert not set(bases) & set(others)
    stored: dict[str, bytes] = {}
    for base in bases.values():
        key = ChunkKey(base.namespace, HASH, 0)
        stored[key.name] = sealed(key, base.layout)
        assert desk.put(backend, key.name, stored[key.name]).status is PutStatus.STORED
    limit = Deadline.after(LIMIT_S)
    wanted = [ChunkKey(space, HASH, 0) for space in others]
    assert backend.exists([key.name for key in wanted], limit) == [False] * len(wanted)
    size = record_bytes(PAYLOAD_BYTES)
    for key in wanted:
        assert desk.get(backend, key.name, size)[0] == GetResult(GetStatus.MISSING)
        if isinstance(backend, SupportsList):
            assert backend.list(f"v1/{key.namespace}", limit).entries == []
        # And if it stood in the other's place, it would be found out.
        assert all(
            verify(memoryview(record), key, others[key.namespace].layout, PAYLOAD_BYTES) is Flaw.NAMESPACE for record in stored.values()
        )
    assert backend.exists(list(stored), limit) == [True] * len(stored)
