"""`kvstore ls`: every name once, with what is known of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from damage import fill
from places import Place, Ran

Command = Callable[..., Ran]


def test_every_name_is_listed_once_with_its_size_and_age(place: Place, kvstore: Command) -> None:
    began_s = time.time()
    filled = fill(place.tree)
    place.tree.write("notes.txt", b"somebody's notes\n")
    sizes = {name: len(content) for name, content in (filled.records | filled.manifests).items()} | {"notes.txt": 17}
    ran = kvstore("ls", place, "--json")
    assert ran.code == 0
    found = [json.loads(line) for line in ran.lines]
    assert {one["name"]: one["size_bytes"] for one in found} == sizes
    assert len(found) == len(sizes)
    # A store of objects says whole seconds, by a clock of its own.
    assert all(began_s - 60 < one["modified_s"] < time.time() + 60 for one in found)
    texts = kvstore("ls", place).lines
    assert sorted(line.split()[-1] for line in texts) == sorted(sizes)


def test_json_says_what_a_name_is_of(place: Place, kvstore: Command) -> None:
    filled = fill(place.tree, ["acme/one"], chunks=1)
    place.tree.write("notes.txt", b"notes")
    namespace = filled.identities[0].namespace
    found = {one.pop("name"): one for one in map(json.loads, kvstore("ls", place, "--json").lines)}
    for name in filled.records:
        hash_, _, group = name.rsplit("/", 1)[1].partition("-g")
        assert {key: found[name][key] for key in ("kind", "namespace", "hash", "group")} == {
            "kind": "record",
            "namespace": namespace,
            "hash": hash_,
            "group": int(group),
        }
    manifest = found[f"v1/{namespace}/manifest.json"]
    assert (manifest["kind"], manifest["namespace"]) == ("manifest", namespace)
    assert found["notes.txt"]["kind"] == "foreign"
    assert "namespace" not in found["notes.txt"]


def test_filters_leave_what_was_asked_for(place: Place, kvstore: Command) -> None:
    filled = fill(place.tree)
    place.tree.write("notes.txt", b"notes")
    first, second = (identity.namespace for identity in filled.identities)

    def names(*more: str) -> set[str]:
        return {json.loads(line)["name"] for line in kvstore("ls", place, "--json", *more).lines}

    of_first = {name for name in (filled.records | filled.manifests) if name.startswith(f"v1/{first}/")}
    assert names("--namespace", first) == of_first
    assert first[:4] != second[:4]
    assert names("--namespace", first[:4]) == of_first
    assert names("--kind", "manifest") == set(filled.manifests)
    assert names("--kind", "manifest", "--kind", "foreign") == {*filled.manifests, "notes.txt"}
    assert names("--prefix", "no") == {"notes.txt"}
    assert names("--prefix", "x") == set()


def test_an_empty_store_is_no_failure(place: Place, kvstore: Command) -> None:
    assert kvstore("ls", place) == Ran(0, "", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--namespace", "xyz"], "argument --namespace: 'xyz' must be 1 to 32 lower-case hex digits"),
        (["--namespace", "a" * 33], "must be 1 to 32 lower-case hex digits"),
        (["--namespace", "a", "--prefix", "b"], "argument --prefix: not allowed with argument --namespace"),
        (["--timeout", "0"], "argument --timeout: '0' must be a number of seconds from 0.001 to 86400"),
        (["--timeout", "nan"], "argument --timeout: 'nan' must be a number of seconds"),
        (["--option", "hunter2"], "argument --option: must be NAME=VALUE"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    more: list[str], said: str, make_folder: Callable[[], Place], kvstore: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        kvstore("ls", make_folder(), *more)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "hunter2" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_looking_changes_nothing_and_makes_no_store(
    command: str, make_folder: Callable[[], Place], kvstore: Command, tmp_path: Any
) -> None:
    place = make_folder()
    fill(place.tree, chunks=1)

    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in place.tree.root.rglob("*") if path.is_file()}

    before = state()
    assert kvstore(command, place).code == 0
    assert state() == before
    nowhere = Place((tmp_path / "nowhere").as_uri(), None)
    ran = kvstore(command, nowhere)
    assert (ran.code, ran.out) == (2, "")
    assert "nowhere does not exist" in ran.err
    assert not (tmp_path / "nowhere").exists()
