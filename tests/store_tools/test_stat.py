"""`kvstore stat`: by namespace what a store holds, as its manifests say, and no more than they prove."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from damage import DAMAGES, PAYLOADS, chunk_key, fill, identity_of, record_of
from made_up import Listing
from places import Place, Ran

from kvstore_sdk.backend import ListEntry, ListPage
from kvstore_sdk.format import record_bytes
from kvstore_sdk.keys import manifest_name
from kvstore_sdk.tools import stat as stat_module
from kvstore_sdk.tools.retry import Retry

Command = Callable[..., Ran]


def stat_of(kvstore: Command, place: Place, *more: str) -> dict[str, Any]:
    ran = kvstore("stat", place, "--json", *more)
    assert ran.code == 0
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_each_namespace_says_what_it_is_of_and_how_much(place: Place, kvstore: Command) -> None:
    began_s = time.time()
    filled = fill(place.tree, chunks=3)
    place.tree.write("notes.txt", b"somebody's notes\n")
    found = stat_of(kvstore, place)
    sizes = [record_bytes(size) for size in PAYLOADS]
    assert (found["records"]["count"], found["records"]["size_bytes"]) == (12, 6 * sum(sizes))
    assert (found["manifests"]["count"], found["foreign"]["count"], found["foreign"]["size_bytes"]) == (2, 1, 17)
    assert found["foreign"]["names"] == ["notes.txt"]
    by_name = {one["namespace"]: one for one in found["namespaces"]}
    for identity in filled.identities:
        one = by_name[identity.namespace]
        assert one["manifest"]["problem"] is None
        assert {key: one[key] for key in ("model", "weights", "kv_dtype", "layout", "block_tokens", "tenant", "private")} == {
            "model": identity.model,
            "weights": identity.weights,
            "kv_dtype": "bfloat16",
            "layout": "lbhnc",
            "block_tokens": 16,
            "tenant": False,
            "private": False,
        }
        assert [(group["group"], group["kind"], group["payload_bytes"]) for group in one["groups"]] == [
            (0, "full", PAYLOADS[0]),
            (1, "full", PAYLOADS[1]),
        ]
        assert [(group["records"]["count"], group["records"]["size_bytes"]) for group in one["groups"]] == [(3, 3 * size) for size in sizes]
        assert began_s - 60 < one["records"]["oldest_s"] <= one["records"]["newest_s"] < time.time() + 60
    assert len(by_name) == 2


def test_ages_are_those_of_the_first_and_the_last_record(make_folder: Callable[[], Place], kvstore: Command) -> None:
    place = make_folder()
    filled = fill(place.tree, ["acme/one"], chunks=3)
    names = sorted(filled.records)
    for days, name in enumerate(names):
        place.tree.set_time(name, time.time() - 86400 * (days + 2))
    found = stat_of(kvstore, place)
    now_s = found["now_s"]
    assert round((now_s - found["records"]["newest_s"]) / 86400) == 2
    assert round((now_s - found["records"]["oldest_s"]) / 86400) == len(names) + 1
    assert f"oldest {len(names) + 1} d, newest 2 d" in kvstore("stat", place).out


def test_a_namespace_alone_is_asked_for_by_its_digits(place: Place, kvstore: Command) -> None:
    filled = fill(place.tree)
    namespace = filled.identities[1].namespace
    found = stat_of(kvstore, place, "--namespace", namespace[:8])
    assert [one["namespace"] for one in found["namespaces"]] == [namespace]
    assert found["records"]["count"] == 8


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if "manifest" in damage.name], ids=str)
def test_a_bad_manifest_says_nothing_and_hides_no_records(damage: Any, make_folder: Callable[[], Place], kvstore: Command) -> None:
    place = make_folder()
    filled = fill(place.tree)
    damage.do(place.tree, filled)
    found = {one["namespace"]: one for one in stat_of(kvstore, place)["namespaces"]}
    bad, good = (found[identity.namespace] for identity in filled.identities)
    assert bad["manifest"]["problem"]
    assert [bad[key] for key in ("model", "weights", "kv_dtype", "layout")] == [None] * 4
    assert (bad["records"]["count"], good["records"]["count"]) == (8, 8)
    assert good["model"] == "acme/two"
    # It may hold anything: nothing of it reaches a terminal but printable text.
    text = kvstore("stat", place).out
    assert all(" " <= char <= "~" or char == "\n" for char in text)
    assert bad["manifest"]["problem"] in text


def test_an_odd_but_true_manifest_is_shown_as_printable_text(place: Place, kvstore: Command) -> None:
    """An identity with a digest of its own proves itself, and still may hold anything."""
    identity = identity_of("\x1b[31mred\x07\u202e" + "x" * 5000)
    key = chunk_key(identity, 0)
    place.tree.write(key.name, record_of(key, PAYLOADS[0]))
    place.tree.write(manifest_name(identity.namespace), identity.manifest())
    text = kvstore("stat", place).out
    assert all(" " <= char <= "~" or char == "\n" for char in text)
    assert "\\x1b[31mred\\x07\\u202exxx" in text
    assert max(map(len, text.splitlines())) < 300
    assert stat_of(kvstore, place)["namespaces"][0]["model"] == identity.model[:300]


def test_namespaces_without_end_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the limit is counted as a whole, and told to be untold."""
    monkeypatch.setattr(stat_module, "_ROWS", 10)
    names = [chunk_key(identity_of(f"acme/{number}"), 0).name for number in range(20)]
    names += [f"v1/{'f' * 32}/00/00-g{number}" for number in range(20)]
    backend = Listing(lambda prefix, cursor, limit: ListPage([ListEntry(name, 8192) for name in names if name.startswith(prefix)], None))
    found = stat_module.stat(backend, "", Retry())
    assert (found.records.count, found.records.size_bytes) == (40, 40 * 8192)
    told = sum(group.records.count for one in found.namespaces.values() for group in one.groups.values())
    assert sum(1 + len(one.groups) for one in found.namespaces.values()) <= 11
    assert found.untold == 40 - told > 30
