"""`kvstore repair`: what is corrupt goes, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash
from damage import DAMAGES, FOLDER_DAMAGES, PAYLOADS, Damage, chunk_key, fill, identity_of, record_of, wreck
from places import Place, Ran

from kvstore_sdk.backend import Deadline, DeleteStatus, Failure, InvalidError, UnavailableError, UnsupportedError
from kvstore_sdk.format import HEADER_BYTES, Flaw
from kvstore_sdk.identity import canonical_json
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tools.removal import remove
from kvstore_sdk.tools.repair import Outcome, Repair
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk_backends.memory import open_memory

Kvstore = Callable[..., Ran]
AT_ONCE = Retry(timeout_s=20.0, tries=1)


def test_what_is_corrupt_goes_and_what_is_good_stays_as_it_was(place: Place, kvstore: Kvstore) -> None:
    found = wreck(place.tree)
    ran = kvstore("repair", place, "--json")
    assert ran.code == 0, ran
    told = json.loads(ran.out)
    assert sorted(item["name"] for item in told["items"] if item["result"] == "removed") == found.corrupt
    assert {item["name"]: item["flaw"] for item in told["items"] if item["kind"] == "record"} == {
        name: verdict.value for name, verdict in found.damaged.items() if isinstance(verdict, Flaw)
    }
    assert told["outcomes"]["removed"] == len(found.corrupt)
    assert told["foreign"] == len(found.names("foreign"))
    assert {name: place.tree.read(name) for name in found.good} == found.good
    assert place.tree.names() == sorted([*found.good, *found.names("foreign")])


def test_a_dry_run_names_exactly_what_goes_and_removes_nothing(place: Place, kvstore: Kvstore) -> None:
    found = wreck(place.tree, DAMAGES[::4])
    before = place.tree.names()
    dry = kvstore("repair", place, "--dry-run", "--foreign")
    assert dry.code == 1
    assert place.tree.names() == before
    real = kvstore("repair", place, "--foreign")
    assert real.code == 0
    would, did = (
        sorted(re.findall(rf"^{words}(?: \(\w+\))?: ([^:]+)", ran.out, re.M)) for words, ran in (("would remove", dry), ("removed", real))
    )
    assert would == did == sorted([*found.corrupt, *found.names("foreign")])
    assert place.tree.names() == sorted(found.good)
    assert kvstore("repair", place, "--dry-run", "--foreign").code == 0


@pytest.mark.parametrize("damage", FOLDER_DAMAGES, ids=str)
def test_what_no_listing_shows_is_left_to_the_backend(make_folder: Callable[[], Place], kvstore: Kvstore, damage: Damage) -> None:
    place = make_folder()
    filled = fill(place.tree)
    [hurt] = damage.do(place.tree, filled)
    assert kvstore("repair", place).code == 0
    assert set(place.tree.names()) == {*filled.records, *filled.manifests} - {hurt.name}


def test_a_namespace_is_repaired_alone(place: Place, kvstore: Kvstore) -> None:
    filled = fill(place.tree)
    for name in filled.records:
        place.tree.write(name, filled.records[name][:-1])
    one = filled.identities[0].namespace
    assert kvstore("repair", place, "--namespace", one).code == 0
    assert [name for name in place.tree.names() if one in name] == [manifest_name(one)]
    assert len(place.tree.names()) == 2 + len(filled.records) // 2


def test_when_most_looks_corrupt_nothing_is_removed_unless_that_is_asked_for(place: Place, kvstore: Kvstore) -> None:
    """A machine that reads everything wrong must not empty a store that others read right."""
    filled = fill(place.tree, chunks=6)
    bad = sorted(filled.records)[:13]
    for name in bad:
        place.tree.write(name, bytes(len(filled.records[name])))
    before = place.tree.names()
    ran = kvstore("repair", place)
    assert ran.code == 1
    assert "nothing was removed" in ran.out
    assert "--even-most" in ran.out
    assert place.tree.names() == before
    assert kvstore("repair", place, "--even-most").code == 0
    assert set(before) - set(place.tree.names()) == set(bad)


def test_namespaces_and_records_of_another_version_are_left_alone(place: Place, kvstore: Kvstore) -> None:
    """Two versions may share a bucket; neither is to call the other's records corrupt."""
    filled = fill(place.tree)
    theirs = _of_version_7(place)
    ran = kvstore("repair", place, "--json")
    assert ran.code == 0, ran
    assert json.loads(ran.out)["outcomes"]["other_version"] == len([name for name in theirs if not name.endswith("json")])
    assert place.tree.names() == sorted([*filled.records, *filled.manifests, *theirs])


def _of_version_7(place: Place) -> list[str]:
    """A namespace with its manifest, and one without, whose records this version cannot read."""
    written = []
    for model, with_manifest in (("acme/new", True), ("acme/newer", False)):
        identity = json.loads(identity_of(model).canonical_json()) | {"format_version": 7}
        namespace = hashlib.sha256(canonical_json(identity)).hexdigest()[:32]
        if with_manifest:
            body = json.dumps({"format": "kvstore-sdk", "namespace": namespace, "identity": identity}).encode()
            written.append(manifest_name(namespace))
            place.tree.write(written[-1], body.ljust(4096))
        for number in range(3):
            key = chunk_key(identity_of(model), number)._replace(namespace=namespace)
            record = bytearray(record_of(key, PAYLOADS[0]))
            struct.pack_into("<I", record, 8, 7)
            record[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(record[: HEADER_BYTES - 16]))
            written.append(key.name)
            place.tree.write(key.name, bytes(record))
    return written


def test_a_manifest_without_a_version_does_not_stop_the_others(place: Place, kvstore: Kvstore) -> None:
    """Its digest names its namespace all the same, and whoever may write to a store can make one."""
    filled = fill(place.tree)
    identity = json.loads(identity_of("acme/odd").canonical_json())
    del identity["format_version"]
    namespace = hashlib.sha256(canonical_json(identity)).hexdigest()[:32]
    body = json.dumps({"format": "kvstore-sdk", "namespace": namespace, "identity": identity}).encode()
    place.tree.write(manifest_name(namespace), body.ljust(4096))
    bad = [chunk_key(identity_of("acme/odd"), 0)._replace(namespace=namespace).name, min(filled.records)]
    for name in bad:
        place.tree.write(name, bytes(12288))
    ran = kvstore("repair", place)
    assert ran.code == 0, ran
    assert place.tree.names() == sorted({*filled.records, *filled.manifests, manifest_name(namespace)} - set(bad))


def test_a_record_that_this_opening_cannot_take_is_left_and_the_way_out_is_said(place: Place, kvstore: Kvstore) -> None:
    """With a larger `max_record_bytes` an engine stored it, and finds it good."""
    filled = fill(place.tree, chunks=30, payloads=(60_000, 3000))
    for most in ("16KiB", "2KiB"):
        ran = kvstore("repair", place, "--option", f"max_record_bytes={most}", "--json")
        assert ran.code == 1
        told = json.loads(ran.out)
        assert told["corrupt"] == 0
        assert {item["name"]: item["result"] for item in told["items"]} == dict.fromkeys(
            [name for name, content in (filled.records | filled.manifests).items() if len(content) > (16384 if most == "16KiB" else 2048)],
            "too_large",
        )
        assert all("max_record_bytes" in item["problem"] for item in told["items"])
        assert place.tree.names() == sorted([*filled.records, *filled.manifests])
    assert kvstore("repair", place).code == 0


class Meanwhile(BackendWrapper):
    """Does something when one name is listed alone: between the two looks at it."""

    def __init__(self, inner: Any, name: str, do: Callable[[], object]) -> None:
        super().__init__(inner)
        self._name = name
        self._do = do

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "list" and items[0] == self._name:
            self._do()
        return proceed(items)


def _repair_while(place: Place, name: str, do: Callable[[], object]) -> Any:
    backend = place.open()
    try:
        [item] = Repair(Meanwhile(backend, name, do), AT_ONCE)
    finally:
        backend.close()
    assert item.name == name
    return item.outcome


def test_a_record_that_became_good_meanwhile_is_kept(place: Place) -> None:
    filled = fill(place.tree)
    name = sorted(filled.records)[3]
    place.tree.write(name, bytes(8192))
    assert _repair_while(place, name, lambda: place.tree.write(name, filled.records[name])) is Outcome.RECOVERED
    assert place.tree.read(name) == filled.records[name]


def test_a_truncated_record_that_became_good_meanwhile_is_kept(place: Place) -> None:
    """Its length alone was enough to tell that it is bad, so the one that was listed must not count."""
    filled = fill(place.tree)
    name = sorted(filled.records)[3]
    place.tree.write(name, filled.records[name][:100])
    assert _repair_while(place, name, lambda: place.tree.write(name, filled.records[name])) is Outcome.RECOVERED
    assert place.tree.read(name) == filled.records[name]


def test_a_manifest_that_was_written_again_meanwhile_is_kept(place: Place) -> None:
    filled = fill(place.tree)
    name, content = next(iter(filled.manifests.items()))
    place.tree.write(name, b"{" * 4096)
    looks = []

    def write_at_the_last_look() -> None:
        looks.append(name)
        # Those before are of the records' own checks.
        if len(looks) == 2:
            place.tree.write(name, content)

    outcome = _repair_while(place, name, write_at_the_last_look)
    assert outcome is Outcome.RECOVERED
    assert place.tree.read(name) == content


def test_a_record_that_is_gone_meanwhile_is_nobodys_fault(place: Place) -> None:
    filled = fill(place.tree)
    name = sorted(filled.records)[3]
    place.tree.write(name, bytes(8192))
    assert _repair_while(place, name, lambda: place.tree.remove(name)) is Outcome.GONE


def test_a_foreign_name_that_is_gone_is_not_looked_for_among_all_that_begin_like_it(make_folder: Callable[[], Place]) -> None:
    place = make_folder()
    for number in range(20):
        place.tree.write(f"a{number}", b"")
    place.tree.write("a", b"")
    listed: list[str] = []

    class Going(BackendWrapper):
        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            if op == "list" and items[0] == "":
                page = proceed(items)
                place.tree.remove("a")
                return page
            listed.extend(items[:1] if op == "list" else [])
            return proceed(items)

    backend = place.open()
    try:
        outcomes = {item.name: item.outcome for item in Repair(Going(backend), AT_ONCE, foreign=True)}
    finally:
        backend.close()
    assert outcomes == {"a": Outcome.GONE} | {f"a{number}": Outcome.REMOVED for number in range(20)}
    assert "a" not in listed


def test_a_record_that_is_bad_in_another_way_each_time_is_kept(place: Place) -> None:
    """Memory that flips bits, or a line that does, shows like this."""
    filled = fill(place.tree)
    name = sorted(filled.records)[3]
    record = bytearray(filled.records[name])
    record[-1] ^= 1
    place.tree.write(name, bytes(record))
    assert _repair_while(place, name, lambda: place.tree.write(name, bytes(len(record)))) is Outcome.CHANGED
    assert name in place.tree.names()


def test_what_cannot_be_removed_is_told_and_the_rest_goes(make_folder: Callable[[], Place]) -> None:
    place = make_folder()
    filled = fill(place.tree)
    pinned, other = sorted(filled.records)[3:5]
    for name in (pinned, other):
        place.tree.write(name, bytes(8192))

    class Pinned(BackendWrapper):
        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            if op == "delete" and items[0] == pinned:
                return [Failure(InvalidError(f"delete {pinned}: is immutable"))]
            return proceed(items)

    backend = place.open()
    try:
        outcomes = {item.name: item.outcome for item in Repair(Pinned(backend), AT_ONCE)}
    finally:
        backend.close()
    assert outcomes == {pinned: Outcome.FAILED, other: Outcome.REMOVED}
    assert pinned in place.tree.names()
    assert other not in place.tree.names()


@pytest.mark.parametrize("lacks", ["list", "delete"])
def test_a_backend_that_lacks_a_surface_is_refused_in_one_line(lacks: str) -> None:
    backend = BackendWrapper(open_memory(""))
    delattr(backend, lacks)
    with pytest.raises(UnsupportedError, match="BackendWrapper does not") as raised:
        Repair(backend, AT_ONCE)
    assert "\n" not in str(raised.value)


def test_deletions_that_fail_for_now_are_tried_again() -> None:
    asked: list[list[str]] = []

    class Flaky:
        def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
            asked.append(list(names))
            if len(asked) == 1:
                return [DeleteStatus.DELETED, Failure(UnavailableError("delete b: not now")), Failure(InvalidError("delete c: no"))]
            return [DeleteStatus.ABSENT]

    answers = remove(Flaky(), ["a", "b", "c"], Retry(timeout_s=20.0, tries=2))
    assert asked == [["a", "b", "c"], ["b"]]
    assert answers[:2] == [DeleteStatus.DELETED, DeleteStatus.ABSENT]
    assert isinstance(answers[2], InvalidError)


def test_names_and_problems_are_shown_as_one_printable_line(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    place = make_folder()
    fill(place.tree)
    place.tree.write("v1/\x1b[2Jred\n", b"")
    place.tree.write("v1/odd-but-valid.txt", b"")
    ran = kvstore("repair", place, "--foreign")
    assert "v1/odd-but-valid.txt" in ran.out
    assert all(line.isprintable() for line in ran.lines)
