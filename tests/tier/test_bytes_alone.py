"""The check of a record lies in its bytes, so it holds on a store that keeps nothing beside them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_bench import Engine, Shop, key, keys

from kvstore_sdk_backends.fs import open_fs

NewEngine = Callable[..., Engine]


def test_a_changed_byte_is_found_where_files_have_no_attributes(
    tmp_path: Path, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT-09: nor are any asked for."""
    asked: list[str] = []

    def refuse(name: str) -> Callable[..., None]:
        def refusing(*arguments: object, **options: object) -> None:
            asked.append(name)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        return refusing

    for name in ("setxattr", "getxattr", "listxattr", "removexattr"):
        monkeypatch.setattr(os, name, refuse(name))
    root = tmp_path / "kv"
    engine = new_engine(open_fs(str(root)))
    assert engine.store(keys(3)).success
    path = root / Shop(engine.backend).name(key(1))
    record = bytearray(path.read_bytes())
    record[5000] ^= 1
    path.write_bytes(record)
    # Another engine, which knows nothing but what the files hold.
    reader = new_engine(open_fs(str(root)))
    result = reader.load(keys(3))
    assert (result.done, result.failed) == ((key(0), key(2)), (key(1),))
    assert reader.total("corrupt", "payload") == 1
    assert asked == []
