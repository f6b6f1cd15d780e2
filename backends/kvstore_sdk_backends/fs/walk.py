"""Going through all records of a folder, in order, from any point on, with memory for one page and no more."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator

from kvstore_sdk.backend import Deadline, ListEntry, TimedOutError, is_valid_name

__all__ = ["walk"]


def walk(root: str, prefix: str, after: str, page: int, max_name_bytes: int, deadline: Deadline) -> Iterator[ListEntry]:
    """Records whose name starts with `prefix` and comes after `after`, in the order of their names' segments.

    The order does not change while records come and go, so `after` is all that a cursor needs to hold. Memory is bounded by
    `page` names for each level of folders. What is no record is passed over: other names, links, special files.

    Raises:
        TimedOutError: the deadline passed.
        OSError: a folder cannot be read.
    """
    return _walk(root, "", prefix, after.split("/") if after else [], page, max_name_bytes, deadline)


def _walk(root: str, above: str, prefix: str, after: list[str], page: int, max_name_bytes: int, deadline: Deadline) -> Iterator[ListEntry]:
    # A folder that is on the way to `after` is not finished yet, and comes first; a record of that name is.
    start, deeper = (after[0], after[1:]) if after else ("", [])
    inclusive = bool(deeper)
    while True:
        batch = _next_entries(f"{root}/{above}", start, inclusive, page)
        for segment, is_folder in batch:
            if deadline.expired:
                raise TimedOutError(f"fs walk {root}: the deadline passed at {above}{segment}")
            name = above + segment
            if not is_valid_name(name, max_name_bytes):
                continue
            if is_folder:
                folder = name + "/"
                if folder.startswith(prefix) or prefix.startswith(folder):
                    yield from _walk(root, folder, prefix, deeper if segment == start else [], page, max_name_bytes, deadline)
            elif name.startswith(prefix) and not (inclusive and segment == start):
                facts = _facts(f"{root}/{name}")
                if facts is not None:
                    yield ListEntry(name, facts.st_size, facts.st_mtime)
        if len(batch) < page:
            return
        start, inclusive, deeper = batch[-1][0], False, []


def _next_entries(folder: str, start: str, inclusive: bool, page: int) -> list[tuple[str, bool]]:
    """The first `page` files and folders from `start` on, sorted: (name, whether it is a folder)."""
    try:
        with os.scandir(folder) as entries:
            found = (
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if (entry.name >= start if inclusive else entry.name > start)
                and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
            )
            return heapq.nsmallest(page, found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _facts(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
