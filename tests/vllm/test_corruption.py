"""Records that went bad while nobody looked: right answers, each fault counted as what it is, and the record good again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vllm_engines import Engine, Stored, fs_entry
from vllm_faulty import OPENED, faulty_entry
from vllm_records import is_good, put, record_paths

from kvstore_sdk.testing import Fault, WrongBytes

FAULTS = ("flip", "swap", "truncate", "append", "directory", "other version", "zeros", "vanish")


def spoil(fault: str, path: Path, other: Path) -> None:
    data = path.read_bytes()
    if fault == "flip":
        put(path, data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif fault == "swap":
        theirs = other.read_bytes()
        put(other, data)
        put(path, theirs)
    elif fault == "truncate":
        put(path, data[:-4096])
    elif fault == "append":
        put(path, data + bytes(4096))
    elif fault == "directory":
        path.unlink()
        path.mkdir()
    elif fault == "vanish":
        path.unlink()
    elif fault == "other version":
        put(path, data[:8] + b"\x63" + data[9:])
    else:
        put(path, bytes(len(data)))


def test_each_spoiled_record_is_found_counted_and_repaired(stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """INT-01, KEY-04, ATM-10, API-05: one prompt for each fault, in one engine."""
    engine = start(stored.model, fs_entry(folder))
    paths = record_paths(folder)
    chunk = engine.block_tokens
    for fault, prompt, answer, keys in zip(FAULTS, stored.prompts, stored.answers, stored.keys, strict=True):
        spoiled, other = keys[len(keys) // 2], keys[0]
        spoil(fault, paths[spoiled], paths[other])
        before = {name: engine.metrics.total(*name) for name in _COUNTED.values()}
        (found,) = engine.ask([prompt])
        assert found.differs(answer) == 0.0, fault
        # What comes before the first bad chunk is still good; which one that is, the order of the hashes does not tell.
        assert found.reused % chunk == 0
        assert found.reused < stored.reuse, fault
        counted = {name for name, value in before.items() if engine.metrics.total(*name) > value}
        assert _COUNTED[fault] in counted, (fault, counted)
        assert counted <= {_COUNTED[fault]}, (fault, counted)
        engine.settle()
        for key in {spoiled, other} if fault == "swap" else {spoiled}:
            assert paths[key].is_file(), fault
            assert is_good(key, paths[key]), fault
    engine.stop()

    # And from now on everything is reused.
    again = start(stored.model, fs_entry(folder))
    answers = again.ask(stored.prompts)
    assert [found.reused for found in answers] == [stored.reuse] * len(stored.prompts)
    assert [found.differs(answer) for found, answer in zip(answers, stored.answers, strict=True)] == [0.0] * len(stored.prompts)


_COUNTED = {
    "flip": ("corrupt", "payload"),
    "swap": ("corrupt", "key"),
    "truncate": ("corrupt", "length"),
    "append": ("corrupt", "length"),
    # It is no record, so none is there: found out before anything is loaded.
    "directory": ("lookups", "miss"),
    "vanish": ("lookups", "miss"),
    "other version": ("corrupt", "header"),
    "zeros": ("corrupt", "header"),
}


def test_a_host_that_reads_nothing_right_does_not_empty_the_shared_folder(
    stored: Stored, folder: Path, start: Callable[..., Engine]
) -> None:
    """Its memory may be at fault: it answers right, removes nothing, and others still find everything."""
    before = {key: path.read_bytes() for key, path in record_paths(folder).items()}
    engine = start(stored.model, faulty_entry(folder, Fault("get", WrongBytes(offset=5000))))
    answers = engine.ask(stored.prompts)
    engine.settle()
    assert [found.differs(answer) for found, answer in zip(answers, stored.answers, strict=True)] == [0.0] * len(stored.prompts)
    assert engine.metrics.total("corrupt") > 0
    assert engine.metrics.total("removals") == 0
    assert engine.metrics.total("breaker_opened", "read") > 0
    engine.stop()
    assert {key: path.read_bytes() for key, path in record_paths(folder).items()} == before
    assert str(folder) in OPENED
    healthy = start(stored.model, fs_entry(folder))
    assert [found.reused for found in healthy.ask(stored.prompts)] == [stored.reuse] * len(stored.prompts)


def test_a_record_that_was_removed_by_hand_is_computed_again(stored: Stored, folder: Path, start: Callable[..., Engine]) -> None:
    """ATM-10, CAP-01: an evictor works behind the engine's back."""
    engine = start(stored.model, fs_entry(folder))
    for path in record_paths(folder).values():
        os.unlink(path)
    answers = engine.ask(stored.prompts)
    assert [found.reused for found in answers] == [0] * len(stored.prompts)
    assert [found.differs(answer) for found, answer in zip(answers, stored.answers, strict=True)] == [0.0] * len(stored.prompts)
    engine.settle()
    assert set(record_paths(folder)) == {key for keys in stored.keys for key in keys}
