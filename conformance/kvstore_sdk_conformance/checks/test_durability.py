"""Profile durability: what is there after the process that stored it was killed, or ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore_sdk.backend import Advice, ConfigError, Mode, PutResult, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.counting import is_counted
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import ConformanceFailure, require
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.steps import is_lost, look, until
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

AGAIN_S = 10.0
"""After a kill: until others can open the location and store, and what is left of the dead is out of listings and counts."""
SMALL, LARGE = 65536, 8 << 20
"""One that is written at once, and one that takes long enough to be killed in the middle of it."""
FRACTIONS = (0.5, 0.9, 0.1, 0.7, 0.3)
"""Of the time that a large put takes. With few kills the first ones are tried."""
AIMS = 4
"""Processes of which one has to be killed in the middle of a large put: a kill that comes too late is tried again, and sooner."""
WARM = 2
"""Large puts before the one that is killed: how long the last of them took says when. The first is slower than others."""
EXAMPLES_A_KILL = 8
_GOOD = ("STORED", "EXISTS")


@proves("KV-DUR-01")
def test_what_is_stored_survives_kill_9(store: Store, run: Run) -> None:
    first = store.open()
    batch = min(4, first.capabilities.max_batch)
    sizes = [(first.fit(SMALL), batch), (first.fit(LARGE), 1), (first.fit(1), 1), (first.fit(SMALL), 1)]
    watching = _only_if_shared(store, first)
    for size, at_once in sizes[: max(2, _kills(run))]:
        names = store.names(2 * at_once)
        killed = _kill(store, names, size, batch=at_once, puts=2, fraction=None)
        _require_there(store, watching, names, killed, size)


@proves("KV-DUR-02")
def test_after_kill_9_every_record_is_whole_or_missing(store: Store, run: Run) -> None:
    first = store.open()
    small, large = first.fit(SMALL), first.fit(LARGE)
    watching = _only_if_shared(store, first)
    for turn in range(_kills(run)):
        puts, batch = store.random.randint(2, 8), store.random.choice([1, min(2, first.capabilities.max_batch)])
        names = store.names((puts + 2) * batch)
        killed = _kill(store, names, small, batch=batch, puts=puts, fraction=store.random.uniform(0.0, 1.5))
        _require_whole(store, watching, names, small, killed)
        for aim in _aims(FRACTIONS[turn]):
            names = store.names(4)
            killed = aim.killed = _kill(store, names, large, batch=1, puts=WARM, fraction=aim.fraction)
            _require_whole(store, watching, names, large, killed)


@proves("KV-DUR-03")
def test_kill_9_in_a_replace_leaves_the_old_record_or_the_new_one(store: Store, run: Run) -> None:
    first = store.open()
    small, large = first.fit(SMALL), first.fit(LARGE)
    # Names of its own for each kill: what the killed leave locked is another requirement's.
    turns = [_records(store, small) for _ in range((1 + AIMS) * _kills(run))]
    first.store(*(item for records in turns for item in records.items()))
    watching, at_once = _only_if_shared(store, first), first.capabilities.read_after_write
    for turn in range(_kills(run)):
        # The same few names again and again, then large records over small ones, and over each other.
        puts, fraction = store.random.randint(3, 9), store.random.uniform(0.0, 1.5)
        _replace_until_killed(store, watching, turns.pop(), 4, small, puts, fraction, at_once)
        for aim in _aims(FRACTIONS[turn]):
            aim.killed = _replace_until_killed(store, watching, turns.pop(), 2, large, WARM + turn % 2, aim.fraction, at_once)


@proves("KV-DUR-04")
def test_others_store_the_same_names_after_kill_9(store: Store, run: Run) -> None:
    first = store.open()
    large = first.fit(LARGE)
    watching = _only_if_shared(store, first)
    for aim in (aim for turn in range(min(3, _kills(run))) for aim in _aims(FRACTIONS[turn])):
        names = store.names(3)
        aim.killed = _kill(store, names, large, batch=1, puts=WARM, fraction=aim.fraction)
        end_s = time.monotonic() + AGAIN_S
        view = _open_again(store)
        for name in names[WARM - 1 :]:
            for mode in Mode:
                for one, whose in ((watching, "that was open all the time"), (view, "that was opened afterwards")):
                    if one is not None:
                        _store_by(one, name, Record(large, 50), mode, end_s, whose)
        view.close()


@proves("KV-DUR-05")
def test_what_is_stored_is_there_after_close(store: Store) -> None:
    first = store.open()
    sizes = [first.fit(size) for size in (1, SMALL, LARGE)]
    first.close()
    names = {size: store.names(3) for size in sizes}
    child = store.child()
    for size, some in names.items():
        child.store(some, size, 1)
    child.stop()
    view = store.open()
    for size, some in names.items():
        for number, name in enumerate(some):
            note = "stored by a process that closed the location and ended"
            [there] = view.exists(name)
            require(there is True, f"True for {name}", there, note=note)
            view.check_found(name, Record(size, 1 + number), note=note)


@proves("KV-DUR-06")
def test_what_killed_writers_left_is_not_listed(store: Store, run: Run) -> None:
    first = store.open()
    small, large = first.fit(SMALL), first.fit(LARGE)
    sizes = dict.fromkeys(store.names(3), small)
    first.store(*((name, Record(small, 1)) for name in sizes))
    watching = _only_if_shared(store, first)
    for aim in (aim for turn in range(_kills(run)) for aim in _aims(FRACTIONS[turn])):
        names = store.names(4)
        aim.killed = _kill(store, names, large, batch=1, puts=WARM, fraction=aim.fraction)
        view = _open_again(store)
        sizes |= {name: large for name in names if look(view, name, [Record(large, 1 + n) for n in range(4)], breaks="KV-DUR-02")}
        for one in (watching, view):
            if one is not None:
                listed = {entry.name: entry.size_bytes for entry in one.walk()}
                late = {} if one.capabilities.read_after_write else dict.fromkeys(names, large)
                strange = [f"{name} ({size} bytes)" for name, size in listed.items() if size not in (sizes.get(name), late.get(name))]
                require(not strange, "the records that are there, after a writer was killed", f"also {strange}")
                require(late or listed == sizes, "every record that is there", f"{len(listed)} of {len(sizes)}", breaks="KV-LIST-01")
        view.close()


@proves("KV-DUR-07")
def test_what_killed_writers_left_is_not_counted(store: Store, run: Run) -> None:
    first = store.open()
    small, large = first.fit(SMALL), first.fit(LARGE)
    empty_bytes = first.usage().used_bytes
    sizes = dict.fromkeys(store.names(3), small)
    first.store(*((name, Record(small, 1)) for name in sizes))
    _only_if_shared(store, first)
    for aim in (aim for turn in range(_kills(run)) for aim in _aims(FRACTIONS[turn])):
        names = store.names(4)
        aim.killed = _kill(store, names, large, batch=1, puts=WARM, fraction=aim.fraction)
        view = _open_again(store)
        sizes = _require_counted(view, sizes, dict.fromkeys(names, large), empty_bytes)
        view.close()


@dataclass
class _Killed:
    """What a process that was killed had said.

    Attributes:
        answered: Of each put that was answered, by its number: the name of the status.
        begun: Numbers of those that had begun.
    """

    answered: dict[int, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def read(self, line: dict[str, list[int] | list[tuple[int, str]]]) -> None:
        self.begun |= set(line.get("putting", []))  # type: ignore[arg-type]
        self.answered |= dict(line.get("put", []))  # type: ignore[arg-type]

    @property
    def in_a_put(self) -> bool:
        """Whether it was in the middle of one when it died."""
        return bool(self.begun - self.answered.keys())


@dataclass
class _Aim:
    """When a process is to be killed; `killed` takes what became of that."""

    fraction: float
    killed: _Killed = field(default_factory=_Killed)


def _aims(fraction: float) -> Iterator[_Aim]:
    """One, and others while none has hit: on a busy machine a kill may come when the put is done."""
    for number in range(AIMS):
        aim = _Aim(fraction / 3**number)
        yield aim
        if aim.killed.in_a_put:
            return


def _kill(
    store: Store,
    names: Sequence[str],
    size: int,
    *,
    batch: int,
    puts: int,
    fraction: float | None,
    mode: Mode = Mode.CREATE,
    tag: int = 1,
) -> _Killed:
    """Let a process put `Record(size, tag)`, `Record(size, tag + 1)`, ... under the names, in calls of `batch`, and kill it.

    Args:
        puts: Calls that it may finish first.
        fraction: Of the time that the last of them took: when the next call has run for so long, it is killed. None: at once.
    """
    child = store.child()
    killed = _Killed()
    child.post(do="stream", names=list(names), size=size, tag=tag, mode=mode.value, batch=batch)
    begun_s = took_s = 0.0
    while True:
        line = child.receive()
        if "failure" in line:
            raise ConformanceFailure(**line["failure"])
        killed.read(line)
        if "putting" in line:
            begun_s = time.monotonic()
            if not puts:
                break
        elif "put" in line:
            took_s = time.monotonic() - begun_s
            puts -= 1
            if not puts and fraction is None:
                break
        else:
            break
    if fraction is not None:
        time.sleep(fraction * took_s)
    child.kill()
    for line in child.left():
        # What it had answered by then counts, read or not.
        killed.read(line)
    bad = [status for status in killed.answered.values() if status not in _GOOD and not is_lost(PutResult(PutStatus[status]))]
    require(not bad, "STORED from every put of another process", bad, breaks="KV-CORE-01")
    return killed


def _require_whole(store: Store, watching: View | None, names: Sequence[str], size: int, killed: _Killed) -> None:
    """Of the records that were being created, those that are there are whole, and those that were STORED are there."""

    def check(view: View) -> None:
        for number, name in enumerate(names):
            how = "answered" if number in killed.answered else "begun" if number in killed.begun else "not begun"
            note = f"its put was {how} when its process was killed"
            record = Record(size, 1 + number)
            there = look(view, name, [record], note=note)
            if there is None and killed.answered.get(number) in _GOOD:
                view.check_found(name, record, breaks="KV-DUR-01", note=note)

    _with_each(store, watching, check)


def _replace_until_killed(
    store: Store,
    watching: View | None,
    records: dict[str, Record],
    times: int,
    size: int,
    puts: int,
    fraction: float,
    at_once: bool,
) -> _Killed:
    """Replace these records, each so many times, until the process is killed. `at_once`: the store declares read_after_write."""
    names, tag = list(records) * times, 2000
    killed = _kill(store, names, size, batch=1, puts=puts, fraction=fraction, mode=Mode.REPLACE, tag=tag)
    may_be = {name: [record] for name, record in records.items()}
    for number in sorted(killed.begun):
        new = Record(size, tag + number)
        # What was STORED has taken the place of all before it.
        taken = killed.answered.get(number) == PutStatus.STORED.name and at_once
        may_be[names[number]] = [new] if taken else [*may_be[names[number]], new]

    def check(view: View) -> None:
        for name, some in may_be.items():
            there = look(view, name, some[::-1], note="a process was killed that replaced it again and again")
            require(there is not None, f"{name} as it was, or as it was to be", "MISSING")

    _with_each(store, watching, check)
    return killed


def _require_there(store: Store, watching: View | None, names: Sequence[str], killed: _Killed, size: int) -> None:
    def check(view: View) -> None:
        for number, status in killed.answered.items():
            if status in _GOOD:
                note = f"its put of {size} bytes was answered {status}, and its process killed at once"
                view.check_found(names[number], Record(size, 1 + number), note=note)
                [there] = view.exists(names[number])
                require(there is True, f"True for {names[number]}", there, note=note)

    _with_each(store, watching, check)


def _with_each(store: Store, watching: View | None, check: Callable[[View], None]) -> None:
    """Look with a view that was open all the time, and with one that is opened now."""
    if watching is not None:
        check(watching)
    view = _open_again(store)
    check(view)
    view.close()


def _open_again(store: Store) -> View:
    end_s = time.monotonic() + AGAIN_S
    while True:
        try:
            return store.open()
        except ConformanceFailure as failure:
            # What its user has to set right does not come right by itself.
            if time.monotonic() < end_s and not isinstance(failure.__cause__, ConfigError):
                time.sleep(0.1)
                continue
            wanted = f"the location to open within {AGAIN_S:g} s of kill -9 of a process that had it open"
            raise ConformanceFailure(wanted, failure.seen, breaks="KV-DUR-04") from failure


def _store_by(view: View, name: str, record: Record, mode: Mode, end_s: float, whose: str) -> None:
    """The record has to be stored by then; a failure that says it may be tried again is."""
    while True:
        result = view.put(name, record, mode)
        if result.status.name in _GOOD:
            break
        again = is_lost(result) or (result.error is not None and result.error.advice is Advice.RETRY)
        expected = f"STORED within {AGAIN_S:g} s of kill -9 of the process that was putting {name}, in a view {whose}"
        require(again and time.monotonic() < end_s, expected, result, note=f"{mode}")
        time.sleep(0.05)
    # What CREATE found there may be the dead one's.
    if mode is Mode.REPLACE:
        view.check_found(name, record)


def _require_counted(view: View, sizes: dict[str, int], others: dict[str, int], empty_bytes: int) -> dict[str, int]:
    """Usage counts these records, and of the others those that are there. Returns all of them."""

    def there() -> dict[str, int]:
        return sizes | {name: size for name, size in others.items() if view.exists(name) == [True]}

    until(lambda: is_counted(view.usage(), there(), empty_bytes), AGAIN_S)
    usage, found = view.usage(), there()
    expected = f"{len(found)} records of together {sum(found.values())} bytes in usage, after a writer was killed"
    require(is_counted(usage, found, empty_bytes), expected, usage)
    return found


def _only_if_shared(store: Store, first: View) -> View | None:
    """A view that stays open while others write, where a location may be open in two processes."""
    if first.capabilities.shared:
        return first
    first.close()
    return None


def _records(store: Store, size: int) -> dict[str, Record]:
    """Some to be replaced."""
    return {name: Record(size, 1000 + number) for number, name in enumerate(store.names(3))}


def _kills(run: Run) -> int:
    return min(len(FRACTIONS), max(2, run.examples // EXAMPLES_A_KILL))
