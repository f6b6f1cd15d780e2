"""`kvstore health` on the stores that people have."""

from __future__ import annotations

import json
from collections.abc import Callable

from damage import Tree, fill
from places import Place, Ran

Command = Callable[..., Ran]


def test_a_store_in_use_is_healthy_and_holds_the_same_afterwards(place: Place, tree: Tree, kvstore: Command) -> None:
    fill(tree, chunks=2)
    before = {name: tree.read(name) for name in tree.names()}
    for more in ((), ("--write",)):
        ran = kvstore("health", place, "--json", "--timeout", "20", *more)
        assert ran.code == 0, ran.out
        assert json.loads(ran.out)["healthy"] is True
        assert {name: tree.read(name) for name in tree.names()} == before


def test_a_store_that_was_opened_to_be_read_is_asked_and_not_written(place: Place, tree: Tree, kvstore: Command) -> None:
    fill(tree, chunks=1)
    before = sorted(tree.names())
    ran = kvstore("health", place, "--json", "--timeout", "20", "--write", "--option", "read_only=true")
    assert ran.code == 1
    problems = {item["call"]: item["problem"] for item in json.loads(ran.out)["items"]}
    assert [problems["exists"], problems["get"]] == ["", ""]
    assert "read" in problems["put"]
    assert sorted(tree.names()) == before
