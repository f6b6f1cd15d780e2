"""Profile core: names."""

from __future__ import annotations

from kvstore_sdk.backend import PutStatus, is_valid_name
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import require
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View


@proves("KV-CORE-09")
def test_every_valid_name_is_a_record_of_its_own(store: Store, view: View) -> None:
    longest = view.capabilities.max_name_bytes
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
    stem = store.name()
    # What a store that folds case, drops characters, cuts names or reads them as paths, patterns or numbers would confuse.
    names = [
        "a",
        "A",
        "0",
        "00",
        "1e2",
        "100",
        "-",
        "_",
        "a-b",
        "a_b",
        "a.b",
        "ab",
        "a.",
        "a..b",
        "d/a",
        "d_a",
        "d.a",
        "da",
        "d/A",
        "d/a.b",
        "d-a",
        "d/e/a",
        "d/e/A",
    ]
    names += [
        letters,
        letters[::-1],
        "x/" + "/".join("abcdefgh"),
        stem,
        stem[:-1] + "1",
        stem + "1",
        f"{stem}.tmp",
        f"{stem}-",
        "k.lock",
        "k.json",
    ]
    for length in (longest, longest - 1):
        segments = "/".join([letters[:50]] * (length // 51 + 1))
        full = (segments + "q" * length)[:length].rstrip("/")
        full += "q" * (length - len(full))
        names += [full, full[:-1] + "Q"]
    # As many folders as a name has room for.
    deep = "/".join("s" * ((longest + 1) // 2))
    names += [deep, f"{deep[:-1]}t"]
    names = list(dict.fromkeys(name for name in names if is_valid_name(name, longest) and not _is_folder_of_another(name, names)))
    records = {name: Record(view.fit(64), tag) for tag, name in enumerate(names)}
    for name, record in records.items():
        [there] = view.exists(name)
        require(there is False, f"False for {name!r}, which was not stored yet", there, note=f"stored were {names[: names.index(name)]}")
        result = view.put(name, record)
        require(result.status is PutStatus.STORED, f"STORED for {name!r} ({len(name)} bytes)", result)
    for name, record in records.items():
        view.check_found(name, record)


def _is_folder_of_another(name: str, names: list[str]) -> bool:
    # The SDK has no name that another one continues after a slash: a filesystem cannot have both.
    return any(other.startswith(f"{name}/") for other in names)
