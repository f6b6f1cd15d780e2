"""`kvstore prune`: what was said goes, oldest first, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from damage import Filled, chunk_key, fill, identity_of, record_of
from hypothesis import given
from hypothesis import strategies as st
from places import Place, Ran

from kvstore_sdk.backend import Deadline, Failure, InvalidError, ListPage, Mode
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tools.facts import Kind
from kvstore_sdk.tools.prune import Ages, Prune, Rule
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk
from kvstore_sdk.tools.writing import Writer
from kvstore_sdk_backends.memory import open_memory

Kvstore = Callable[..., Ran]
RETRY = Retry(timeout_s=20.0)
DAY_S = 86400.0


def aged(place: Place, filled: Filled) -> list[str]:
    """The records from the oldest to the newest, a day apart and the newest a day old; manifests are as old as the newest."""
    names = sorted(filled.records, key=lambda name: hash_of(name))
    now_s = time.time()
    for age_days, name in enumerate(reversed(names), 1):
        place.tree.set_time(name, now_s - age_days * DAY_S)
    for name in filled.manifests:
        place.tree.set_time(name, now_s - DAY_S)
    return names


def hash_of(name: str) -> str:
    """Another order than that of the names."""
    return name[::-1]


def test_what_is_older_than_an_age_goes(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    place = make_folder()
    names = aged(place, filled := fill(place.tree))
    ran = kvstore("prune", place, "--older-than", "5d")
    assert ran.code == 0
    # The last four are 4, 3, 2 and 1 days old, and the fifth from the end 5 days and an instant.
    assert set(place.tree.names()) == {*names[-4:], *filled.manifests}
    assert len([line for line in ran.lines if line.startswith("removed")]) == len(names) - 4


def test_the_oldest_go_until_the_size_is_reached(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    place = make_folder()
    names = aged(place, filled := fill(place.tree))
    sizes = {name: len(content) for name, content in (filled.records | filled.manifests).items()}
    wanted_bytes = sum(sizes.values()) - sum(sizes[name] for name in names[:5]) + 1
    ran = kvstore("prune", place, "--to-bytes", str(wanted_bytes), "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    # Five would leave one byte too few gone; so exactly five go.
    assert {item["name"] for item in told["items"]} == set(names[:5])
    assert told["kept_bytes"] == sum(len(place.tree.read(name)) for name in place.tree.names()) == wanted_bytes - 1
    assert kvstore("prune", place, "--to-bytes", str(wanted_bytes)).lines[0].startswith("0 records")


def test_a_namespace_goes_with_its_manifest_and_the_others_stay(place: Place, kvstore: Kvstore) -> None:
    filled = fill(place.tree)
    one, two = (identity.namespace for identity in filled.identities)
    place.tree.write(f"v1/{one}/notes.txt", b"somebody's")
    ran = kvstore("prune", place, "--namespace", one, "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert (told["records"], told["manifests"], told["foreign"]) == (8, 1, 1)
    assert place.tree.names() == sorted([*(name for name in (filled.records | filled.manifests) if two in name), f"v1/{one}/notes.txt"])


def test_limits_combine(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    """Of one namespace: first by age, then by size."""
    place = make_folder()
    filled = fill(place.tree)
    names = aged(place, filled)
    one = filled.identities[0].namespace
    mine = [name for name in names if one in name]
    by_age = mine[:3]
    age_s = time.time() - place.tree.root.joinpath(by_age[-1]).stat().st_mtime - 60
    left_bytes = 4096 + sum(len(filled.records[name]) for name in mine[3:])
    ran = kvstore("prune", place, "--namespace", one, "--older-than", f"{age_s:.0f}s", "--to-bytes", str(left_bytes - 1))
    assert ran.code == 0
    assert set(names) - set(place.tree.names()) == set(mine[:4])


@pytest.mark.parametrize(
    "limit", [["--older-than", "6d"], ["--to-bytes", "50KiB"], ["--to-bytes", "0"], ["--older-than", "0"]], ids=" ".join
)
def test_a_dry_run_names_exactly_what_goes(make_folder: Callable[[], Place], kvstore: Kvstore, limit: list[str]) -> None:
    place = make_folder()
    aged(place, fill(place.tree))
    before = place.tree.names()
    dry = json.loads(kvstore("prune", place, *limit, "--dry-run", "--json").out)
    assert place.tree.names() == before
    real = json.loads(kvstore("prune", place, *limit, "--json").out)
    assert {item["result"] for item in dry["items"]} == {"would_remove"}
    assert [item["name"] for item in dry["items"]] == [item["name"] for item in real["items"]]
    assert set(before) - set(place.tree.names()) == {item["name"] for item in real["items"]}
    counted = ("records", "manifests", "used_bytes", "kept_records", "kept_bytes")
    assert {name: dry[name] for name in counted} == {name: real[name] for name in counted}


def test_pruned_to_nothing_a_store_has_nothing_but_what_is_foreign(place: Place, kvstore: Kvstore) -> None:
    fill(place.tree)
    place.tree.write("notes.txt", b"somebody's")
    assert kvstore("prune", place, "--to-bytes", "0").code == 0
    assert place.tree.names() == ["notes.txt"]


def test_the_manifest_of_an_empty_namespace_goes_when_it_is_old_enough(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    place = make_folder()
    filled = fill(place.tree)
    aged(place, filled)
    old, young = filled.manifests
    place.tree.set_time(old, time.time() - 30 * DAY_S)
    place.tree.set_time(young, time.time())
    assert kvstore("prune", place, "--older-than", "1h").code == 0
    assert place.tree.names() == [young]


@pytest.mark.parametrize("limit", [["--to-bytes", "0"], ["--older-than", "5d"], ["--to-bytes", "30KiB"]], ids=" ".join)
def test_what_goes_does_not_depend_on_how_many_namespaces_are_remembered(
    make_folder: Callable[[], Place], kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch, limit: list[str]
) -> None:
    left = []
    for most in (1, 2, 1000):
        monkeypatch.setattr("kvstore_sdk.tools.prune._MOST_NAMESPACES", most)
        place = make_folder()
        filled = fill(place.tree, [f"acme/{number}" for number in range(6)], chunks=2, payloads=(3000,))
        aged(place, filled)
        for name in filled.manifests:
            place.tree.set_time(name, time.time() - 9 * DAY_S)
        dry = json.loads(kvstore("prune", place, *limit, "--dry-run", "--json").out)
        real = json.loads(kvstore("prune", place, *limit, "--json").out)
        assert sorted(item["name"] for item in dry["items"]) == sorted(item["name"] for item in real["items"])
        left.append((place.tree.names(), dry["kept_bytes"], real["kept_bytes"]))
        assert real["kept_bytes"] == sum(len(place.tree.read(name)) for name in place.tree.names())
    assert left[0] == left[1] == left[2]


def test_namespaces_without_number_are_pruned_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_sdk.tools.prune._MOST_NAMESPACES", 10)
    backend = open_memory("")
    names = [manifest_name(identity_of(f"acme/{number}").namespace) for number in range(40)]
    _write(backend, names, 4096)
    prune = Prune(backend, Rule(to_bytes=0), RETRY, dry_run=False)
    most = 0
    for _ in prune:
        most = max(most, prune.namespaces)
    assert most <= 10
    assert list(walk(backend)) == []
    backend.close()


class Seen(BackendWrapper):
    """Does something before a listing of one prefix, or changes what listings say."""

    def __init__(self, inner: Any, prefix: str = "", do: Callable[[], object] = lambda: None, ages: bool = True) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._do = do
        self._ages = ages

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "list" and items[0] == self._prefix and self._prefix:
            self._do()
        found = proceed(items)
        if op == "list" and not self._ages:
            return ListPage([dataclasses.replace(entry, modified_s=None) for entry in found.entries], found.cursor)
        return found


def test_the_manifest_of_a_namespace_that_comes_to_life_meanwhile_stays(place: Place) -> None:
    """An engine stores a record first, and then looks after the manifest once."""
    filled = fill(place.tree)
    one = filled.identities[0]
    new = chunk_key(one, 99).name
    backend = place.open()
    try:
        living = Seen(backend, f"v1/{one.namespace}/", lambda: place.tree.write(new, record_of(chunk_key(one, 99), 5000)))
        removed = [item.name for item in Prune(living, Rule(to_bytes=0), RETRY, dry_run=False)]
    finally:
        backend.close()
    assert manifest_name(one.namespace) not in removed
    assert place.tree.names() == sorted([new, manifest_name(one.namespace)])


def test_a_store_that_knows_no_ages_is_not_pruned_by_age(make_folder: Callable[[], Place]) -> None:
    place = make_folder()
    filled = fill(place.tree)
    backend = place.open()
    try:
        ageless = Seen(backend, ages=False)
        for rule in (Rule(older_than_s=0.0), Rule(to_bytes=0)):
            prune = Prune(ageless, rule, RETRY, dry_run=False)
            assert list(prune) == []
            assert prune.unknown_age == prune.kept_records == len(filled.records)
        one = filled.identities[0].namespace
        assert len(list(Prune(ageless, Rule(namespaces=frozenset([one])), RETRY, dry_run=False))) == 9
    finally:
        backend.close()


def test_unknown_ages_end_with_exit_code_1_and_say_what_works(make_folder: Callable[[], Place], kvstore: Kvstore, monkeypatch: Any) -> None:
    place = make_folder()
    fill(place.tree)
    monkeypatch.setattr("kvstore_sdk.tools.prune._time", lambda entry: float("nan"))
    ran = kvstore("prune", place, "--older-than", "1s")
    assert ran.code == 1
    assert "--namespace" in ran.out


def test_records_of_the_future_are_young(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    place = make_folder()
    filled = fill(place.tree)
    for name in filled.records:
        place.tree.set_time(name, time.time() + DAY_S)
    assert kvstore("prune", place, "--older-than", "0").code == 0
    assert set(filled.records) <= set(place.tree.names())


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ([], "--older-than: say what is to go"),
        (["--older-than", "7 weeks"], "--older-than: '7 weeks' is not a number of seconds"),
        (["--older-than", "-1"], "is not a number of seconds"),
        (["--to-bytes", "100 apples"], "--to-bytes: '100 apples' is not a number of bytes"),
        (["--namespace", "acme/one"], "--namespace: 'acme/one' is not 32 lower-case hex digits"),
        (["--namespace", ""], "is not 32"),
    ],
)
def test_bad_input_is_refused_before_anything_is_removed(
    make_folder: Callable[[], Place], kvstore: Kvstore, given_: list[str], said: str
) -> None:
    place = make_folder()
    fill(place.tree)
    before = place.tree.names()
    ran = kvstore("prune", place, *[f"{flag}={value}" for flag, value in zip(given_[::2], given_[1::2], strict=True)])
    assert ran.code == 2
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert place.tree.names() == before


@given(
    st.lists(st.tuples(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), st.integers(1, 1000)), max_size=60),
    st.integers(0, 40_000),
)
def test_as_little_as_possible_goes_and_the_oldest_of_it(entries: list[tuple[int, int]], excess_bytes: int) -> None:
    """Whole seconds fall into buckets of their own, so the choice is exact but for entries of one second."""
    ages = Ages()
    for modified_s, size in entries:
        ages.add(float(modified_s), size)
    oldest = ages.oldest(excess_bytes)
    taken = [entry for entry in entries if oldest.takes(float(entry[0]), entry[1])]
    left = list(entries)
    for entry in taken:
        left.remove(entry)
    assert max((time_s for time_s, _ in taken), default=-1) <= min((time_s for time_s, _ in left), default=10**9)
    gone = sum(size for _, size in taken)
    assert gone >= min(excess_bytes, sum(size for _, size in entries))
    assert not taken or gone - max(size for time_s, size in taken if time_s == max(taken)[0]) < excess_bytes


def test_ages_are_told_apart_in_bounded_memory() -> None:
    """More times than buckets: what goes is still the oldest, to one part in 30,000 of the span."""
    ages = Ages()
    span = 300_000
    for number in range(span):
        ages.add(1e9 + number, 1)
    assert len(ages._bytes) <= 65_536
    oldest = ages.oldest(span // 2)
    taken = [number for number in range(span) if oldest.takes(1e9 + number, 1)]
    assert len(taken) == span // 2
    assert max(taken) <= span // 2 + span // 30_000


def _write(backend: Any, names: Sequence[str], size_bytes: int) -> None:
    writer = Writer(backend, RETRY)
    for name in names:
        assert writer.write(name, bytes(size_bytes), Mode.CREATE)
    writer.close()


def test_a_bounded_folder_in_use_learns_what_was_pruned_and_evicts_nothing_for_it(
    make_folder: Callable[[], Place], kvstore: Kvstore
) -> None:
    place = make_folder()
    options = {"max_bytes": "2MiB"}
    names = [chunk_key(identity_of("acme/one"), number).name for number in range(400)]
    engine = place.open(**options)
    try:
        _write(engine, names[:200], 8192)
        evicted = engine.evicted_records
        assert evicted == 0
        ran = kvstore("prune", Place(place.url, place.tree, options), "--to-bytes", "200KiB", "--json")
        assert ran.code == 0
        assert json.loads(ran.out)["kept_bytes"] <= 200 << 10
        # More than was free before, and less than is free now.
        _write(engine, names[200:380], 8192)
        assert engine.evicted_records == 0
        assert set(names[200:380]) <= set(place.tree.names())
    finally:
        engine.close()


def test_a_bounded_folder_stays_within_its_bound_while_others_prune_it_unasked(make_folder: Callable[[], Place], kvstore: Kvstore) -> None:
    """Without the bound nobody is told; then more may be evicted than had to be, and never less."""
    place = make_folder()
    names = [chunk_key(identity_of("acme/one"), number).name for number in range(900)]
    engine = place.open(max_bytes="2MiB")
    try:
        for start in range(0, 900, 300):
            _write(engine, names[start : start + 300], 8192)
            assert kvstore("prune", place, "--to-bytes", "1MiB").code == 0
            assert sum(len(place.tree.read(name)) for name in place.tree.names()) <= 1 << 20
        assert names[-1] in place.tree.names()
    finally:
        engine.close()


def test_a_manifest_that_cannot_be_removed_is_no_record_that_was_kept() -> None:
    class Pinned(BackendWrapper):
        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            return [Failure(InvalidError("delete: is immutable")) for _ in items] if op == "delete" else proceed(items)

    backend = open_memory("")
    _write(backend, [manifest_name(identity_of("acme/one").namespace)], 4096)
    prune = Prune(Pinned(backend), Rule(to_bytes=0), RETRY, dry_run=False)
    assert [str(item.error) for item in prune] == ["delete: is immutable"]
    assert (prune.kept_records, prune.kept_bytes) == (0, 4096)
    backend.close()


def test_names_are_told_by_kind() -> None:
    backend = open_memory("")
    identity = identity_of("acme/one")
    _write(backend, [chunk_key(identity, 0).name, manifest_name(identity.namespace)], 8192)
    kinds = [item.kind for item in Prune(backend, Rule(to_bytes=0), RETRY, dry_run=False)]
    assert kinds == [Kind.RECORD, Kind.MANIFEST]
    backend.close()
