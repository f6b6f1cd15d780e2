"""A record is the same bytes under the same name in a bucket and in a folder, so that one can be carried over to the other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3_server import S3Server

from kvstore_sdk.backend import Deadline, GetResult, GetStatus, PutStatus

NAMES = ["a", "a-b", "a.b", "b/c", "b/c.d", "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0", "v1/" + "0" * 32 + "/manifest.json"]
RECORDS = {name: random.Random(name).randbytes(size) for name, size in zip(NAMES, [0, 1, 4095, 4096, 4097, 70_000, 8192], strict=True)}


def later() -> Deadline:
    return Deadline.after(30.0)


def store_all(backend: Any, desk: Any) -> None:
    puts = [desk.put_item(name, record) for name, record in RECORDS.items()]
    assert {result.status for result in backend.put(puts, later())} == {PutStatus.STORED}


def check_all(backend: Any, desk: Any) -> None:
    assert backend.exists([*NAMES, "none"], later()) == [*[True] * len(NAMES), False]
    for name, record in RECORDS.items():
        assert desk.get(backend, name, len(record)) == (GetResult(GetStatus.FOUND), record)
    assert sorted((entry.name, entry.size_bytes) for entry in backend.list("", later()).entries) == sorted(
        (name, len(record)) for name, record in RECORDS.items()
    )
    assert (backend.usage(later()).records, backend.usage(later()).used_bytes) == (len(RECORDS), sum(map(len, RECORDS.values())))


def test_a_bucket_that_was_copied_to_a_folder_is_read_by_fs(
    store: Any, desk: Any, open_folder: Callable[..., Any], folder: Path, s3_server: S3Server, bucket: str
) -> None:
    store_all(store, desk)
    objects = s3_server.objects(bucket)
    # A folder with anything in it and no mark of ours is refused, so it is opened before.
    open_folder().close()
    assert objects == {f"kv/{name}": record for name, record in RECORDS.items()}
    for key, record in objects.items():
        path = folder / key.removeprefix("kv/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)
    check_all(open_folder(), desk)


def test_a_folder_that_was_copied_to_a_bucket_is_read_from_there(
    store: Any, desk: Any, open_folder: Callable[..., Any], folder: Path, s3_server: S3Server, bucket: str
) -> None:
    """What fs keeps for itself beside the records comes along, and is no record."""
    backend = open_folder()
    store_all(backend, desk)
    copied = 0
    for where, _, files in os.walk(folder):
        for file in files:
            path = Path(where) / file
            s3_server.client().put_object(Bucket=bucket, Key=f"kv/{path.relative_to(folder)}", Body=path.read_bytes())
            copied += 1
    assert copied > len(RECORDS)
    check_all(store, desk)
