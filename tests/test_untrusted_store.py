"""A folder that somebody hostile filled: it costs misses, and neither memory nor anything outside of it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tier"))

from tier_bench import LIMIT_S, PAYLOAD_BYTES, Engine, Shop, identity, key, keys

from kvstore_sdk.backend import Deadline, open_backend
from kvstore_sdk.format import record_bytes
from kvstore_sdk.keys import manifest_name
from kvstore_sdk_backends.fs import open_fs

HUGE_BYTES = 1 << 38
"""More than any machine has memory; a file of that length takes no room."""
MOST_BYTES = 8 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(open_fs(str(folder)))
    yield made
    made.close()


@pytest.fixture
def traced() -> Iterator[None]:
    """Fails when more Python memory was taken at a time than a few records need. Regions are no Python memory, and of a fixed size."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES


def grow(path: Path, size_bytes: int = HUGE_BYTES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(size_bytes)


def test_a_record_of_any_length_is_a_miss_and_is_not_read(folder: Path, engine: Engine, traced: None) -> None:
    assert engine.store(keys(3)).success
    path = folder / Shop(engine.backend).name(key(1))
    grow(path)
    result = engine.load(keys(3))
    assert (result.done, result.failed) == ((key(0), key(2)), (key(1),))
    assert engine.total("corrupt", "length") == 1
    assert engine.store([key(1)]).success
    assert engine.load([key(1)]).success
    assert path.stat().st_size == record_bytes(PAYLOAD_BYTES[0])


def test_a_manifest_of_any_length_is_rewritten_and_not_read(folder: Path, engine: Engine, traced: None) -> None:
    path = folder / manifest_name(identity().namespace)
    grow(path)
    assert engine.store(keys(1)).success
    engine.wait(lambda: engine.total("manifests", "rewritten") == 1)
    assert json.loads(path.read_bytes())["namespace"] == identity().namespace


def test_a_manifest_is_never_parsed_by_an_engine(folder: Path, engine: Engine) -> None:
    """Deep enough to end a parser, and an identity that is another's: the records of the namespace are as good as before."""
    assert engine.store(keys(2)).success
    path = folder / manifest_name(identity().namespace)
    for body in (b"[" * 1_000_000, json.dumps({"format": "kvstore-sdk", "namespace": "0" * 32, "identity": {}}).encode()):
        path.write_bytes(body)
        reader = Engine(open_fs(str(folder)))
        try:
            assert reader.load(keys(2)).success
            assert reader.store(keys(2)).success
        finally:
            reader.close()


@pytest.mark.parametrize("what", ["marker", "records"])
def test_opening_takes_no_memory_for_what_lies_there(folder: Path, traced: None, what: str) -> None:
    folder.mkdir()
    if what == "marker":
        grow(folder / ".kvstore/format.json")
    else:
        for number in range(50):
            digest = hashlib.sha256(b"%d" % number).hexdigest()
            grow(folder / f"v1/{'0' * 32}/{digest[:2]}/{digest}-g0")
    backend = open_backend("fs", location=str(folder))
    try:
        assert backend.exists(["v1/none"], Deadline.after(LIMIT_S)) == [False]
    finally:
        backend.close()


def test_names_that_are_none_are_neither_found_nor_touched(folder: Path, tmp_path: Path, engine: Engine) -> None:
    """Listed, counted, evicted and swept is what has a name of the SDK's form; nothing above or beside the folder is reached by any."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    assert engine.store(keys(1)).success
    strange = ["v1/..", "v1/.hidden", "v1/%2e%2e", "v1/with space", "v1/new\nline", "v1/\x1b[2J", "v1/é", "v1/-g0"]
    for name in strange:
        if name != "v1/..":
            (folder / name).write_bytes(b"x")
    backend = engine.backend
    listed = {entry.name for entry in backend.list("", Deadline.after(LIMIT_S)).entries}  # type: ignore[attr-defined]
    assert listed >= {Shop(backend).name(key(0))}
    assert listed & set(strange) <= {"v1/-g0"}
    for name in ["../outside", "v1/../../outside", "/etc/passwd", "v1//x", "", *strange[:-1]]:
        assert backend.exists([name], Deadline.after(LIMIT_S))[0] is not True
        [answer] = backend.delete([name], Deadline.after(LIMIT_S))  # type: ignore[attr-defined]
        assert "DELETED" not in repr(answer), name
    assert outside.read_bytes() == b"precious"
    assert os.path.lexists(folder / "v1/.hidden")
