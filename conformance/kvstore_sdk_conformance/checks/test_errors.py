"""Profile errors: what a backend says when something is wrong, and what it must not say."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from kvstore_sdk.backend import (
    Failure,
    Get,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutStatus,
    SupportsDelete,
)
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, NotApplicable, require
from kvstore_sdk_conformance.pressing import whatever_it_answers
from kvstore_sdk_conformance.provoke import Provoked, names_outside, path_of, provoke, texts_of
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.secrecy import MIN_CHARACTERS, canary, given, logged, open_with, text_options
from kvstore_sdk_conformance.store import OPEN_S, FixtureError, Store
from kvstore_sdk_conformance.unusable import error_of_opening, is_foreign, unusable
from kvstore_sdk_conformance.view import View

TRIES = 3
"""For a put whose answer is lost."""


@proves("KV-ERR-01")
def test_what_failed_comes_with_an_error_of_the_tree(store: Store, view: View) -> None:
    # Each answer is looked at by the view.
    provoke(store, view)
    with whatever_it_answers(), view.lend([view.fit(1)]) as arena:
        view.close()
        view.raw("exists", store.names(1))
        view.raw("get", [Get(store.name(), tuple(arena.buffers))])


@proves("KV-ERR-02")
def test_no_name_reaches_another_location(store: Store, view: View) -> None:
    size = view.fit(64)
    other = store.elsewhere()
    theirs = other.open()
    victim, probe = "victim", "probe"
    theirs.store((victim, Record(size, 1)))
    for name in names_outside(store.place, other.place, victim):
        with whatever_it_answers():
            [there] = view.exists(name)
            require(there is not True, f"{name!r} to mean nothing here", "True from exists: a record of another location")
        with whatever_it_answers():
            got = view.get(name, size)
            found = got.result.status is GetStatus.FOUND
            require(not found, f"{name!r} to mean nothing here", "FOUND from get: a record of another location")
        with whatever_it_answers():
            view.put(name, Record(size, 2), Mode.REPLACE)
        if isinstance(view.backend, SupportsDelete):
            with whatever_it_answers():
                view.delete(name)
        theirs.check_found(victim, Record(size, 1), note=f"after a put and a delete of {name!r} in another location")
    before = _beside(store, other)
    for name in names_outside(store.place, other.place, probe):
        with whatever_it_answers():
            view.put(name, Record(size, 2))
        theirs.check_missing(probe, size, note=f"after a put of {name!r} in another location")
        new = _beside(store, other) - before
        require(not new, f"nothing outside the location by a put of {name!r}", f"{', '.join(sorted(new))} beside it")


@proves("KV-ERR-03")
def test_a_name_that_is_not_valid_is_refused(store: Store, view: View) -> None:
    size = view.fit(1)
    names = ["", ".", "..", "../x", "/x", "x/", "a//b", ".hidden", "a/.b", "a b", "a\0b", "a\nb", "é", "a*", "a\\b", "%2e%2e", "\ud800"]
    names.append("x" * (view.capabilities.max_name_bytes + 1))
    ops = ["exists", "get"] + ["put"] * (not view.capabilities.read_only) + ["delete"] * isinstance(view.backend, SupportsDelete)
    for name in names:
        shown = repr(name) if len(name) < 40 else f"a name of {len(name)} bytes"
        for op in ops:
            answer = _refusal(view, op, name, size)
            error = getattr(answer, "error", None)
            require(isinstance(error, InvalidError), f"InvalidError from {op} of {shown}", answer)


@proves("KV-ERR-04")
def test_a_secret_is_shown_nowhere(store: Store, view: View, run: Run) -> None:
    secrets = given(run.target)
    options = text_options(run.target)
    if not secrets and not options:
        raise NotApplicable(f"no secret option takes text, or was given {MIN_CHARACTERS} characters and more that are nowhere else")
    with logged() as lines:
        if secrets:
            said = [("repr", repr(view.backend)), *((what.how, what.text) for what in provoke(store, view))]
            for name, secret in secrets.items():
                _check_hidden(name, secret, [*said, *(("a log line", line) for line in lines)])
        for name in options:
            lines.clear()
            secret = canary(store.random)
            said = []
            try:
                opened = open_with(store, name, secret)
            except FixtureError as error:
                said += [("an error of opening", text) for text in texts_of(error)]
            else:
                said.append(("repr", repr(opened.backend)))
                # Whether it works with a wrong secret is not what this is about.
                with contextlib.suppress(ConformanceFailure):
                    said += [(what.how, what.text) for what in provoke(store, opened)]
                with contextlib.suppress(ConformanceFailure):
                    opened.close()
            _check_hidden(name, secret, [*said, *(("a log line", line) for line in lines)])


@proves("KV-ERR-05")
def test_an_error_names_what_it_is_about(store: Store, view: View) -> None:
    for what in provoke(store, view):
        if what.error is not None:
            message = str(what.error).lower()
            require(
                _names(message, what),
                f"the record or the operation ({what.op}) in the message of an error",
                f"{what.error!r}",
                note=what.how,
            )


@proves("KV-ERR-06")
def test_what_cannot_be_opened_is_told_by_an_error_of_the_tree(store: Store, run: Run) -> None:
    raised = 0
    for how, place in unusable(store.place, run.target):
        error = error_of_opening(place, OPEN_S)
        raised += error is not None
        expected = f"ConfigError or a BackendError from opening with {how}, or that it opens"
        # What opens has a use for it, and what any other exception is made into here says whose fault it is.
        require(error is None or not is_foreign(error), expected, f"{type(error).__name__}: {error}")
        for name, secret in given(run.target).items():
            _check_hidden(name, secret, [(f"an error of opening with {how}", text) for text in texts_of(error)])
    if not raised:
        raise NotApplicable("it opens with whatever location and text options it is given")


def _refusal(view: View, op: str, name: str, size: int) -> Any:
    answer: Any = None
    for _ in range(TRIES):
        try:
            answer = _one(view, op, name, size)
        except CallRaised as raised:
            return Failure(raised.error) if isinstance(raised.error, InvalidError) else raised.seen
        if getattr(answer, "status", None) is not PutStatus.UNKNOWN:
            break
    return answer


def _one(view: View, op: str, name: str, size: int) -> Any:
    if op in ("exists", "delete"):
        return view.raw(op, [name])[0]
    with view.lend([size]) as arena:
        buffers = tuple(arena.buffers)
        return view.raw(op, [Put(name, buffers) if op == "put" else Get(name, buffers)])[0]


def _beside(*stores: Store) -> set[str]:
    """What lies beside the locations, where the suite made the folders that they lie in."""
    found = set()
    for place in (store.place for store in stores if store.place.folder is not None):
        own = os.path.basename(path_of(place))
        # What begins like the location is its own: journals and locks are often put beside a file.
        found |= {entry.path for entry in os.scandir(place.folder) if not entry.name.startswith(own)}
    return found


def _check_hidden(name: str, secret: str, said: list[tuple[str, str]]) -> None:
    for how, text in said:
        # Never with the secret itself: a report goes to people who may not have it.
        if secret in text:
            seen = f"it in {how}: {text.replace(secret, '<the value>')}"
            raise ConformanceFailure(f"the value of {name} nowhere", seen)


_WORDS = {
    "exists": re.compile(r"\b(exists?|look(s|ed|ing)?([ -]?up)?|stat|head|find(s|ing)?)\b"),
    "put": re.compile(r"\b(put(s|ting)?|stor(e|es|ed|ing)|writ(e|es|ten|ing)|upload(s|ed|ing)?|sav(e|es|ed|ing))\b"),
    "get": re.compile(r"\b(get(s|ting)?|load(s|ed|ing)?|read(s|ing)?|download(s|ed|ing)?|fetch(es|ed|ing)?)\b"),
    "delete": re.compile(r"\b(delet(e|es|ed|ing)|remov(e|es|ed|ing)|unlink(s|ed|ing)?)\b"),
    "list": re.compile(r"\b(list(s|ed|ing)?|scan(s|ned|ning)?|walk(s|ed|ing)?|enumerat(e|es|ed|ing))\b"),
    "usage": re.compile(r"\b(usage|count(s|ed|ing)?|walk(s|ed|ing)?)\b"),
}
"""What vendors call the operations, as whole words."""


def _names(message: str, what: Provoked) -> bool:
    named = bool(what.name) and (what.name.lower() in message or repr(what.name)[1:-1].lower() in message)
    return named or _WORDS[what.op].search(message) is not None
