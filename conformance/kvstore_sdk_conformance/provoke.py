"""Calls that are bound to go wrong, and names that lead elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvstore_sdk.backend import SupportsDelete, SupportsList, SupportsUsage
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.target import Place
from kvstore_sdk_conformance.view import View

__all__ = ["Provoked", "names_outside", "path_of", "provoke", "texts_of"]


@dataclass(frozen=True, slots=True)
class Provoked:
    """One answer to a call that asked for too much.

    Attributes:
        op: The method.
        name: Of the record; empty if the call has none.
        how: What was asked, in words.
        error: What came with the answer, or was raised.
        text: All that the answer shows: of the error and of everything that caused it.
    """

    op: str
    name: str
    how: str
    error: BaseException | None
    text: str


def provoke(store: Store, view: View) -> list[Provoked]:
    """Ask for what is missing, badly named, of another size or too late."""
    size = view.fit(4096)
    there = store.name()
    writable = not view.capabilities.read_only
    if writable:
        view.put(there, Record(size, 1))
    names = {store.name(): "what is not there", "../x": "a bad name", "a b\n": "a bad name", "q" * 5000: "a long name"}
    found: list[Provoked] = []

    def ask(op: str, name: str, how: str, call: Callable[[], Any]) -> None:
        error: BaseException | None
        try:
            answer = call()
        except CallRaised as raised:
            error, answer = raised.error, None
        else:
            error = getattr(getattr(answer, "result", answer), "error", None)
        found.append(Provoked(op, name, f"{op} of {how}", error, "\n".join([repr(answer), *texts_of(error)])))

    def ask_for(name: str, how: str) -> None:
        ask("exists", name, how, lambda: view.exists(name)[0])
        ask("get", name, how, lambda: view.get(name, size))
        if writable and how != "what is not there":
            ask("put", name, how, lambda: view.put(name, Record(size, 1)))
        if isinstance(view.backend, SupportsDelete):
            ask("delete", name, how, lambda: view.delete(name)[0])

    for name, how in names.items():
        ask_for(name, how)
    ask("get", there, "another size", lambda: view.get(there, view.fit(2 * size)))
    ask("exists", there, "what is there, too late", lambda: view.exists(there, timeout_s=-1.0)[0])
    ask("get", there, "what is there, too late", lambda: view.get(there, size, timeout_s=-1.0))
    if writable:
        ask("put", there, "a record, too late", lambda: view.put(there, Record(size, 1), timeout_s=-1.0))
    if isinstance(view.backend, SupportsList):
        ask("list", "", "what is there, too late", lambda: view.page(timeout_s=-1.0))
        ask("list", "", "what is there, from a cursor that was never given", lambda: view.page("", "no such cursor"))
    if isinstance(view.backend, SupportsUsage):
        ask("usage", "", "the store, too late", lambda: view.usage(timeout_s=-1.0))
    return found


def texts_of(error: BaseException | None) -> list[str]:
    """What an error says, and all that it was caused by: what its traceback would show."""
    found: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        found += [str(error), repr(error), *getattr(error, "__notes__", ())]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def path_of(place: Place) -> str:
    """The location as a path: what stands for it in a URL."""
    if place.location is not None:
        return place.location
    parts = urlsplit(place.target)
    return f"{parts.netloc}{parts.path}"


def names_outside(own: Place, other: Place, record: str) -> list[str]:
    """Names that mean `record` of the other location to whoever joins paths, folds dots, or decodes names."""
    here, there = path_of(own), path_of(other)
    up = os.path.relpath(os.path.join("/", there), os.path.join("/", here))
    found = [
        f"../{record}",
        f"{up}/{record}",
        f"../{up}/{record}",
        f"./{up}/{record}",
        f"x/../{up}/{record}",
        f"x//../{up}/{record}",
        f"{up}//{record}",
        f"{up}/{record}/",
        f"{up}/{record}\0",
        f"{up}/{record}\0.x",
        f"{up}/{record}".replace("/", "\\"),
        f"{up}/{record}".replace("..", "%2e%2e"),
        f"{up}/{record}".replace("/", "%2f"),
        f"{there}/{record}",
        f"//{there}/{record}".replace("///", "//"),
        f"file://{there}/{record}",
    ]
    if not there.startswith("/"):
        found.append(f"/{there}/{record}")
    return list(dict.fromkeys(found))
