"""Profile liveness: processes that fork while they have a backend open."""

from __future__ import annotations

from typing import Any

from kvstore_sdk.backend import Fork
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.children import Child
from kvstore_sdk_conformance.failure import ConformanceFailure, require
from kvstore_sdk_conformance.forks import FORKED_S
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

SHARES = (0.5, 0.1, 0.7, 0.3, 0.9)
"""Of a call of another thread, that are over when its process forks."""
ANSWER_S = 2 * FORKED_S + 10.0
_ANSWERS = {
    "exists": "True",
    "missing": "False",
    "get": "FOUND 1",
    "put": "STORED",
    "delete": "ABSENT",
    "list": "a page",
    "usage": "a number",
}
"""What each call of the forked child says where fork WORKS."""
_ERRORS = ("Failure", "FAILED", "CLOSED", "raised")
"""How an error begins, where fork REFUSES."""


@proves("KV-LIVE-11")
def test_every_call_of_a_forked_child_returns(store: Store, view: View) -> None:
    size, works = view.fit(4096), view.capabilities.fork is Fork.WORKS
    there, missing = store.names(2)
    # The process that forks is another one, which has the store alone.
    view.close()
    child = store.child()
    child.store([there], size, 1)
    for busy in (None, *SHARES):
        new = store.name()
        found = child.ask("fork", ANSWER_S, busy=busy, missing=missing, there=there, size=size, tag=1, new=new)
        how = "forked while nothing else used the backend" if busy is None else "forked while another thread used the backend"
        _check_ended(found, how)
        for call, said in found["answers"].items():
            require(not said.startswith("hung"), f"{call} to return in a forked child", said, note=how)
            if works:
                require(said == _ANSWERS[call], f"{_ANSWERS[call]} from {call} in a forked child, as fork WORKS", said, note=how)
            else:
                require(said.startswith(_ERRORS), f"an error from {call} in a forked child, as fork REFUSES", said, note=how)
        # In memory a child's record is its own: what fork WORKS means for others is asked where processes share a store.
        if not works:
            [seen] = child.exists([new])
            require(seen is False, "no effect of a put in a forked child, as fork REFUSES", f"{seen} from exists of its record", note=how)


@proves("KV-LIVE-12")
def test_a_forked_child_leaves_its_parent_alone(store: Store, view: View) -> None:
    size = view.fit(4096)
    there, missing = store.names(2)
    view.close()
    child = store.child()
    child.store([there], size, 1)
    use: dict[str, Any] = {"busy": None, "missing": missing, "there": there, "size": size, "tag": 1}
    for what, program, arguments in (
        ("used the backend", "fork", use | {"new": store.name()}),
        ("closed the backend", "fork_and_close", {}),
        ("ended without using the backend", "fork_and_exit", {}),
    ):
        found = child.ask(program, ANSWER_S, **arguments)
        if program != "fork":
            _check_ended(found, f"forked, and {what}")
        _check_as_before(store, child, there, size, f"after a forked child {what}, and was gone")


def _check_ended(found: dict[str, Any], how: str) -> None:
    if "suite" in found["answers"]:
        raise RuntimeError(found["answers"]["suite"])
    last = ", ".join(f"{call}: {said}" for call, said in found["answers"].items()) or "no answer at all"
    require(found["ended"], f"a forked child to end within {FORKED_S:g} s", last, note=how)


def _check_as_before(store: Store, child: Child, there: str, size: int, note: str) -> None:
    new = store.name()
    try:
        [said] = child.exists([there])
        require(said is True, f"True for {there}", said, note=note)
        [(status, tag)] = child.get([there], size, [1])
        require((status, tag) == ("FOUND", 1), f"FOUND for {there}, with its bytes", f"{status}, {tag}", note=note)
        [stored] = child.put([new], size, 7)
        require(stored == "STORED", f"STORED for {new}", stored, note=note)
        [(status, tag)] = child.get([new], size, [7])
        require((status, tag) == ("FOUND", 7), f"FOUND for {new}, with its bytes", f"{status}, {tag}", note=note)
    except ConformanceFailure as failure:
        # A call of the parent that hangs or raises now did not do so before.
        raise ConformanceFailure(failure.expected, failure.seen, note=note) from failure
