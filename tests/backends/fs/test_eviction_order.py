"""What goes first, and what that costs in hits."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_sdk_backends.fs.victims import EMPTY_S, FUTURE_S, Victims

NOW_S = 1_700_000_000.0
HOUR = 3600.0


@pytest.fixture
def root(memory_folder: Path) -> Path:
    made = memory_folder / "kv"
    made.mkdir()
    return made


def victims(root: Path, now_s: Callable[[], float] = lambda: NOW_S) -> Victims:
    made = Victims(str(root), now_s)
    assert sum(made.count()) >= 0
    return made


def store(root: Path, name: str, at_s: float, size: int = 1) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (at_s, at_s))


def evict(from_: Victims, oldest: Iterator[object], count: int) -> int:
    """Remove so many records, if there are; how many it were."""
    before = from_.records
    for victim in oldest:
        if victim is not None:
            from_.remove(victim)  # type: ignore[arg-type]
        if from_.records - before == count:
            break
    return from_.records - before


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink())


def test_the_oldest_go_first_whatever_folder_they_are_in(root: Path) -> None:
    chance = random.Random(4)
    order = [f"{number % 7:02x}/{number}" for number in range(200)]
    chance.shuffle(order)
    for place, name in enumerate(order):
        store(root, name, NOW_S - 1000 + place)
    some = victims(root)
    assert evict(some, some.oldest(), 100) == 100
    left = {place for place, name in enumerate(order) if (root / name).exists()}
    # The last pass is not over: of the oldest tenth that it is after, some are still there, and as many went that are younger.
    assert set(range(111, 200)) <= left
    assert not left & set(range(90))
    assert (some.records, some.bytes) == (100, 100)


def test_all_of_one_instant_can_go_too(root: Path) -> None:
    """Copied, or restored: no time tells them apart."""
    for number in range(300):
        store(root, f"{number % 3}/{number}", NOW_S)
    some = victims(root)
    oldest = some.oldest()
    assert evict(some, oldest, 120) == 120
    assert evict(some, oldest, 1000) == 180
    assert names_in(root) == []
    assert [victim for victim in oldest if victim] == []


def test_what_was_used_meanwhile_stays(root: Path) -> None:
    for number in range(100):
        store(root, f"a/{number}", NOW_S - 1000 + number)
    some = victims(root)
    oldest = some.oldest()
    victim = next(victim for victim in oldest if victim)
    os.utime(root / "a" / victim.name, (NOW_S, NOW_S))
    assert some.remove(victim) is None
    assert (root / "a" / victim.name).exists()
    gone = next(victim for victim in oldest if victim)
    (root / "a" / gone.name).unlink()
    assert some.remove(gone) is None
    assert some.refused is None


def test_when_all_were_used_since_the_last_pass_the_oldest_of_them_go(root: Path) -> None:
    for number in range(100):
        store(root, f"a/{number}", NOW_S - 1000 + number)
    some = victims(root)
    for number in range(100):
        os.utime(root / f"a/{number}", (NOW_S - number, NOW_S - number))
    assert evict(some, some.oldest(), 10) == 10
    assert names_in(root) == sorted(f"a/{number}" for number in range(90))


def test_a_record_from_the_future_is_older_than_all(root: Path) -> None:
    """The clock was set back: what was stored before that has later times."""
    for number in range(20):
        store(root, f"a/{number}", NOW_S - 1000 + number)
        store(root, f"b/{number}", NOW_S + FUTURE_S + 1000 + number)
        # Hosts differ by as much.
        store(root, f"c/{number}", NOW_S + FUTURE_S - 1000 + number)
    some = victims(root)
    oldest = some.oldest()
    assert evict(some, oldest, 20) == 20
    assert not any(name.startswith("b/") for name in names_in(root))
    assert evict(some, oldest, 16) == 16
    assert len([name for name in names_in(root) if name.startswith("a/")]) == 4


def test_what_is_no_record_is_not_counted_and_stays(root: Path, tmp_path: Path) -> None:
    store(tmp_path, "precious/a", 0.0, 100)
    (root / "link").symlink_to(tmp_path / "precious")
    (root / "a").mkdir()
    (root / "a/link").symlink_to(tmp_path / "precious/a")
    os.mkfifo(root / "a/fifo")
    for name in (".hidden", "a/.hidden", "lost+found/x", "a/\udcff", f"{'d' * 200}/{'d' * 100}"):
        store(root, name, 0.0, 100)
    store(root, "a/b", 0.0, 7)
    some = victims(root)
    assert sum(some.count()) == 7
    before = names_in(root)
    assert evict(some, some.oldest(), 1000) == 1
    assert names_in(root) == [name for name in before if name != "a/b"]
    assert (tmp_path / "precious/a").exists()


def test_a_link_in_a_folder_s_place_leads_nowhere(root: Path, tmp_path: Path) -> None:
    """Swapped between the look at the record and its removal."""
    for number in range(10):
        store(root, f"a/{number}", NOW_S - number)
        store(tmp_path, f"precious/{number}", NOW_S - number)
    some = victims(root)
    oldest = some.oldest()
    victim = next(victim for victim in oldest if victim)
    (root / "a").rename(root / "b")
    (root / "a").symlink_to(tmp_path / "precious")
    assert some.remove(victim) == 1
    assert evict(some, oldest, 1000) == 9
    assert len(names_in(tmp_path / "precious")) == 10


def test_temporary_files_are_counted_and_not_evicted(root: Path) -> None:
    store(root, ".kvstore/tmp/x/0/1", 0.0, 1000)
    store(root, "a", 0.0, 10)
    store(root, ".kvstore/tmp/x/1/2", 0.0, 5)
    store(root, ".kvstore/tmp/y/0/1", 0.0, 100)
    some = victims(root)
    assert sum(some.count()) == 10
    assert {name: size for name, size in some.temporary().items() if size} == {"x": 1005, "y": 100}
    assert evict(some, some.oldest(), 1000) == 1
    assert len(names_in(root)) == 3


def test_folders_that_are_empty_for_long_go(root: Path) -> None:
    for name in ("old/a", "old/b/c", "new/d", "full/e"):
        (root / name).mkdir(parents=True)
    store(root, "full/e/record", NOW_S)
    for _ in range(3):
        # Removing what is in a folder makes it new.
        for folder in [path for path in root.rglob("*") if path.is_dir()]:
            os.utime(folder, (NOW_S if "new" in folder.parts else NOW_S - EMPTY_S - 10,) * 2)
        victims(root)
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["full", "full/e", "full/e/record", "new", "new/d"]


def test_a_folder_that_vanishes_during_a_pass_is_passed_over(root: Path) -> None:
    for number in range(100):
        store(root, f"{number % 10}/{number}", NOW_S - number)
    some = victims(root)
    oldest = some.oldest()
    assert evict(some, oldest, 3) == 3
    for number in range(5):
        shutil.rmtree(root / str(number), ignore_errors=True)
    left = len(names_in(root))
    assert evict(some, oldest, 1000) == left


def zipf(keys: int, length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    weights = [*itertools.accumulate(1 / (rank + 1) for rank in range(keys))]
    ranks = [*range(keys)]
    chance.shuffle(ranks)
    return [ranks[bisect.bisect_left(weights, chance.random() * weights[-1])] for _ in range(length)]


def lru_hits(trace: list[int], size: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in trace:
        if key in held:
            hits += 1
            held.move_to_end(key)
        else:
            held[key] = None
            if len(held) > size:
                held.popitem(last=False)
    return hits


@pytest.mark.parametrize("refresh_s", [0.0, 60.0, 600.0, HOUR])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_zipf_trace_hits_nearly_as_often_as_with_an_exact_lru(root: Path, refresh_s: float, seed: int) -> None:
    """One access a second, 400 of 4,000 records held: an LRU keeps one that is not used for some twenty minutes.

    A time that is refreshed at most every `refresh_s` makes a record look that much older than it is. An hour is more than the whole
    life of a record here: what is left then is first in, first out, and it still has to be near.
    """
    size, trace = 400, zipf(4000, 12_000, seed)
    clock = itertools.count(int(NOW_S))
    now = NOW_S
    times: dict[int, float] = {}
    some = victims(root, lambda: now)
    oldest = some.oldest()
    hits = 0
    for key in trace:
        now = float(next(clock))
        name = f"{key % 16:x}/{key}"
        if key in times:
            hits += 1
            if now - times[key] >= refresh_s:
                os.utime(root / name, (now, now))
                times[key] = now
        else:
            store(root, name, now)
            times[key] = now
        while len(times) > size:
            victim = next(oldest)
            if victim and some.remove(victim):
                del times[int(victim.name)]
    exact = lru_hits(trace, size)
    assert hits >= 0.9 * exact
    assert len(names_in(root)) == size


def test_a_pass_looks_at_some_ten_records_for_each_that_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 6000
    for number in range(count):
        store(root, f"{number % 32:02x}/{number}", NOW_S - number)
    some = victims(root)
    looked = 0
    real = Victims._look

    def look(self: Victims, entries: list[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
        nonlocal looked
        looked += len(entries)
        return real(self, entries)

    monkeypatch.setattr(Victims, "_look", look)
    assert evict(some, some.oldest(), 2000) == 2000
    assert looked < 14 * 2000
