"""`kvstore copy`: what is good arrives as it was, what is bad stays where it is, and a second run has nothing to do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from damage import Filled, chunk_key, fill, identity_of, record_of, wreck
from places import Place, Ran

from kvstore_sdk.backend import Deadline, ListPage
from kvstore_sdk.cli import main
from kvstore_sdk.format import record_bytes
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tools.copy import Copy, Outcome
from kvstore_sdk.tools.retry import Retry

RETRY = Retry(timeout_s=20.0, tries=2)
RunCopy = Callable[..., Ran]


@pytest.fixture
def copy(capsys: pytest.CaptureFixture[str]) -> RunCopy:
    """Runs the command from one place to another."""

    def run(source: Place, destination: Place, *more: str) -> Ran:
        code = main(["copy", source.url, destination.url, *source.arguments(), *destination.arguments("--to-option"), *more])
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture(params=["fs to s3", "s3 to fs"])
def pair(request: pytest.FixtureRequest) -> tuple[Place, Place]:
    """Two empty stores."""
    source, destination = (
        request.getfixturevalue({"fs": "make_folder", "s3": "make_bucket"}[kind])() for kind in request.param.split(" to ")
    )
    return source, destination


@pytest.fixture
def folders(make_folder: Callable[[], Place]) -> tuple[Place, Place]:
    return make_folder(), make_folder()


def contents(place: Place) -> dict[str, bytes]:
    return {name: place.tree.read(name) for name in place.tree.names()}


def everything(filled: Filled) -> dict[str, bytes]:
    return filled.records | filled.manifests


def test_what_is_good_arrives_as_it_was(pair: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = pair
    filled = fill(source.tree)
    ran = copy(source, destination, "--json")
    assert ran.code == 0, ran
    assert contents(destination) == everything(filled)
    told = json.loads(ran.out)
    assert told["copied_bytes"] == sum(map(len, everything(filled).values()))
    again = json.loads(copy(source, destination, "--json").out)
    assert again["outcomes"]["there"] == told["outcomes"]["copied"] == len(everything(filled))
    assert again["copied_bytes"] == again["outcomes"]["copied"] == 0


def test_what_is_damaged_stays_where_it_is_and_is_told(place: Place, make_folder: Callable[[], Place], copy: RunCopy) -> None:
    found = wreck(place.tree)
    destination = make_folder()
    ran = copy(place, destination, "--json")
    assert ran.code == 1
    told = json.loads(ran.out)
    assert contents(destination) == found.good
    assert sorted(item["name"] for item in told["items"]) == found.corrupt
    assert {item["result"] for item in told["items"]} == {"corrupt"}
    assert told["outcomes"]["foreign"] == len(found.names("foreign"))


def test_a_namespace_is_copied_alone(folders: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = folders
    filled = fill(source.tree)
    one = filled.identities[0].namespace
    assert copy(source, destination, "--namespace", one).code == 0
    assert contents(destination) == {name: content for name, content in everything(filled).items() if one in name}


def test_a_record_of_another_length_is_replaced(pair: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = pair
    filled = fill(source.tree)
    for name in sorted(filled.records)[:3]:
        destination.tree.write(name, filled.records[name][:-4096])
    destination.tree.write(next(iter(filled.manifests)), b"{")
    assert copy(source, destination).code == 0
    assert contents(destination) == everything(filled)


def test_a_bad_record_of_the_right_length_is_replaced_when_asked_to_check(pair: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = pair
    filled = fill(source.tree)
    bad = sorted(filled.records)[1]
    destination.tree.write(bad, bytes(len(filled.records[bad])))
    assert copy(source, destination).code == 0
    assert contents(destination) == everything(filled) | {bad: bytes(len(filled.records[bad]))}
    ran = copy(source, destination, "--check", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["outcomes"]["copied"] == 1
    assert contents(destination) == everything(filled)


def test_a_check_compares_with_the_manifest_of_the_source(folders: tuple[Place, Place], copy: RunCopy) -> None:
    """In its place and whole, but with its bytes in another order: alone it looks good."""
    source, destination = folders
    filled = fill(source.tree)
    key = chunk_key(filled.identities[0], 0)
    destination.tree.write(key.name, record_of(key, 5000, "nhdlb"))
    assert copy(source, destination, "--check").code == 0
    assert contents(destination) == everything(filled)


def test_a_manifest_that_is_spelled_in_another_way_is_left(folders: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = folders
    filled = fill(source.tree)
    name, content = next(iter(filled.manifests.items()))
    other = json.dumps(json.loads(content)).encode().ljust(2 * 4096)
    destination.tree.write(name, other)
    assert copy(source, destination, "--check").code == 0
    assert contents(destination) == everything(filled) | {name: other}


def test_a_dry_run_names_exactly_what_would_be_copied_and_stores_nothing(folders: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = folders
    filled = fill(source.tree)
    names = sorted(filled.records)
    destination.tree.write(names[0], filled.records[names[0]])
    source.tree.write(names[1], bytes(8192))
    dry = copy(source, destination, "--dry-run", "--json")
    assert dry.code == 1
    would = {item["name"] for item in json.loads(dry.out)["items"] if item["result"] == "would_copy"}
    assert destination.tree.names() == [names[0]]
    copy(source, destination)
    assert would == set(destination.tree.names()) - {names[0]} == set(everything(filled)) - {names[0], names[1]}


def test_what_the_destination_does_not_take_is_told_and_the_rest_arrives(folders: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = folders
    filled = fill(source.tree)
    small = record_bytes(3000)
    ran = copy(source, destination, "--to-option", f"max_record_bytes={small}")
    assert ran.code == 1
    large = {name: content for name, content in filled.records.items() if len(content) > small}
    assert len(large) == 8
    assert contents(destination) == {name: content for name, content in everything(filled).items() if name not in large}
    assert sum(line.startswith("refused") and "max_record_bytes" in line for line in ran.lines) == len(large)


def test_what_the_source_was_not_opened_for_is_told_and_the_rest_arrives(folders: tuple[Place, Place], copy: RunCopy) -> None:
    """However many they are, they are not corrupt, and the source is not down."""
    source, destination = folders
    filled = fill(source.tree, chunks=20, payloads=(60_000, 3000))
    ran = copy(source, destination, "--option", "max_record_bytes=16KiB", "--json")
    assert ran.code == 1
    told = json.loads(ran.out)
    assert "error" not in told
    large = {name for name, content in filled.records.items() if len(content) > 16384}
    assert {item["name"]: item["result"] for item in told["items"]} == dict.fromkeys(large, "failed")
    assert all("max_record_bytes" in item["problem"] for item in told["items"])
    assert set(contents(destination)) == set(everything(filled)) - large


class Short(BackendWrapper):
    """A store that takes short names only."""

    @property
    def capabilities(self) -> Any:
        return dataclasses.replace(self.inner.capabilities, max_name_bytes=100)


def test_names_that_are_too_long_for_the_destination_are_told(folders: tuple[Place, Place]) -> None:
    source, destination = folders
    filled = fill(source.tree)
    first, second = source.open(), destination.open()
    try:
        items = list(Copy(first, Short(second), RETRY))
    finally:
        first.close()
        second.close()
    assert {item.name for item in items if item.outcome is Outcome.REFUSED} == set(filled.records)
    assert {item.name for item in items if item.outcome is Outcome.COPIED} == set(filled.manifests)


def test_two_engines_of_one_bucket_copy_between_prefixes(make_bucket: Callable[[], Place], copy: RunCopy) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    source = make_bucket()
    filled = fill(source.tree, ("acme/one",), chunks=2)
    tree = dataclasses.replace(source.tree, prefix="elsewhere/kv")
    destination = Place(f"s3://{tree.bucket}/{tree.prefix}", tree, source.options | {"engine": "nixl"})
    ran = copy(source, destination)
    assert ran.code == 0, ran
    assert contents(source) == contents(destination) == everything(filled)


def test_a_store_that_is_copied_onto_itself_has_all_of_it_already(place: Place, copy: RunCopy) -> None:
    filled = fill(place.tree)
    ran = copy(place, place, "--check", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["outcomes"]["there"] == len(everything(filled))
    assert contents(place) == everything(filled)


def test_a_destination_that_is_full_ends_it_in_one_line_and_the_rest_follows_when_there_is_room(
    make_folder: Callable[[], Place], copy: RunCopy, request: pytest.FixtureRequest
) -> None:
    source = make_folder()
    filled = fill(source.tree)
    name = f"full-{request.node.name[:20]}"
    full = Place(f"memory:{name}?max_bytes=50000", None)
    ran = copy(source, full)
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "max_bytes 50000 is reached" in ran.err
    assert "kvstore prune" in ran.err
    assert "run the same command again" in ran.err
    ran = copy(source, Place(f"memory:{name}", None), "--json")
    assert ran.code == 0
    outcomes = json.loads(ran.out)["outcomes"]
    assert outcomes["there"] > 0
    assert outcomes["there"] + outcomes["copied"] == len(everything(filled))


def test_json_stays_json_when_the_copy_is_broken_off(make_folder: Callable[[], Place], copy: RunCopy) -> None:
    source = make_folder()
    fill(source.tree)
    ran = copy(source, Place("memory:?max_bytes=50000", None), "--json")
    assert ran.code == 1
    assert "is reached" in json.loads(ran.out)["error"]


def test_a_destination_that_takes_nothing_is_refused_before_anything_is_read(folders: tuple[Place, Place], copy: RunCopy) -> None:
    source, destination = folders
    fill(source.tree)
    ran = copy(source, destination, "--to-option", "read_only=true")
    assert ran.code == 1
    assert "read-only" in ran.err


def test_a_source_is_opened_to_be_read_and_a_misspelt_one_is_not_created(make_folder: Callable[[], Place], copy: RunCopy) -> None:
    destination = make_folder()
    wrong = Place(f"{destination.url}-misspelt", None)
    ran = copy(wrong, destination)
    assert ran.code == 2
    assert "does not exist" in ran.err


class Shuffled(BackendWrapper):
    """Lists in an order of its own, all on one page; or not at all."""

    def __init__(self, inner: Any, *, lists: bool = True) -> None:
        super().__init__(inner)
        if not lists:
            del self.list

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        found = proceed(items)
        if op == "list":
            return ListPage(sorted(found.entries, key=lambda entry: entry.name[::-1]), None)
        return found


@pytest.mark.parametrize("odd", ["source", "destination", "both", "destination does not list"])
def test_the_order_of_listings_does_not_matter(pair: tuple[Place, Place], odd: str) -> None:
    source, destination = pair
    filled = fill(source.tree)
    names = sorted(filled.records)
    for name in names[:4]:
        destination.tree.write(name, filled.records[name])
    for name in names[4:8]:
        destination.tree.write(name, filled.records[name][:-4096])
    first, second = source.open(), destination.open()
    try:
        one = Shuffled(first) if odd in ("source", "both") else first
        other = second if odd == "source" else Shuffled(second, lists="not" not in odd)
        outcomes = {item.name: item.outcome for item in Copy(one, other, RETRY)}
    finally:
        first.close()
        second.close()
    assert contents(destination) == everything(filled)
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.THERE} == set(names[:4])


class Restless(BackendWrapper):
    """A source whose records change once, just before they are read."""

    def __init__(self, inner: Any, changes: dict[str, Callable[[], object]]) -> None:
        super().__init__(inner)
        self._changes = changes

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "get" and (change := self._changes.pop(items[0].name, None)):
            change()
        return proceed(items)


def test_records_that_go_come_and_change_meanwhile(folders: tuple[Place, Place]) -> None:
    source, destination = folders
    identity = identity_of("acme/one")
    keys = [chunk_key(identity, number) for number in range(4)]
    filled = fill(source.tree, ("acme/one",))
    # Without the manifest any length is as good as another.
    source.tree.remove(manifest_name(identity.namespace))
    longer = record_of(keys[1], 9000)
    changes: dict[str, Callable[[], object]] = {
        keys[0].name: lambda: source.tree.remove(keys[0].name),
        keys[1].name: lambda: source.tree.write(keys[1].name, longer),
        keys[2].name: lambda: source.tree.write(keys[2].name, bytes(12288)),
    }
    first, second = source.open(), destination.open()
    try:
        outcomes = {item.name: item.outcome for item in Copy(Restless(first, changes), second, RETRY)}
    finally:
        first.close()
        second.close()
    assert [outcomes[key.name] for key in keys] == [Outcome.GONE, Outcome.COPIED, Outcome.CORRUPT, Outcome.COPIED]
    wanted = filled.records | {keys[1].name: longer}
    assert contents(destination) == {name: content for name, content in wanted.items() if name not in (keys[0].name, keys[2].name)}
