"""Sequences of operations that hypothesis draws, judged by a dictionary of what may be there.

The model knows the contract and nothing else: a name has a record, or none; after an answer that was lost it may have either.
"""

from __future__ import annotations

import contextlib
import functools
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, configuration
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvstore_sdk.backend import (
    DeleteStatus,
    GetStatus,
    Mode,
    PutResult,
    PutStatus,
    SupportsDelete,
    SupportsList,
    SupportsUsage,
)
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import ConformanceFailure, require, show
from kvstore_sdk_conformance.pressing import took_s
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import Got, View
from kvstore_sdk_conformance.watched import CALL_S

__all__ = ["check_sequences"]

STEPS = 80
NAMES = 2
VIEWS = 2
BUDGET_S = 20.0
"""For all sequences together: a slow store gets fewer, but never less than `FEWEST`."""
FEWEST = 5
PROBES = 10
SHRINK_S = 4.0
"""After the first failure: what was found by then is as short as it gets."""

_PLAIN = {"shift": False, "cut": 0}
"""What is drawn last, and is often of no matter."""

_Drawn = tuple[str, dict[str, Any]]
"""A rule, and what was drawn for it."""
State = Record | None
"""What a name may have: a record, or none."""


def check_sequences(store: Store, seed: int, examples: int) -> None:
    """Draw so many sequences of operations in two views of a fresh location each.

    Raises:
        ConformanceFailure: one has an answer that is wrong; the calls of `store` are a short sequence that shows it.
    """
    trial = _Trial(store)
    examples = min(examples, max(FEWEST, int(BUDGET_S / (trial.call_s * STEPS))))
    store.figures["sequences"] = examples
    machine: type[_Sequences] = hypothesis.seed(seed)(type("Sequences", (_Sequences,), {"trial": trial}))
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        # It shrinks for minutes where a call is slow; `_shorten` knows what may be left out, and when to stop.
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        with _hypothesis_elsewhere():
            run_state_machine_as_test(machine, settings=settings)
    except (ConformanceFailure, Flaky):
        if trial.failure is None:
            raise
        failure = _shorten(machine, trial)
        store.calls.clear()
        store.calls.extend(trial.calls)
        raise failure from None


def _shorten(machine: type[_Sequences], trial: _Trial) -> ConformanceFailure:
    """The failure of the shortest sequence that is found in a few seconds; its calls are `trial.calls` then."""
    assert trial.failure is not None
    until_s = time.monotonic() + (0.0 if trial.hung else SHRINK_S)
    shortest, failure, calls = trial.steps, trial.failure, trial.calls
    again, length = True, len(shortest)
    while again or length > 1:
        length, again = max(1, length // 2), False
        start = 0
        while start < len(shortest) and time.monotonic() < until_s:
            shorter = [*shortest[:start], *shortest[start + length :]]
            if shorter and machine.fails(shorter):
                shortest, failure, calls, again = trial.steps, trial.failure, trial.calls, True
            else:
                start += length
    plain = [(act, drawn | {name: _PLAIN[name] for name in drawn.keys() & _PLAIN.keys()}) for act, drawn in shortest]
    if plain != shortest and time.monotonic() < until_s and machine.fails(plain):
        failure, calls = trial.failure, trial.calls
    trial.calls = calls
    return failure


@contextlib.contextmanager
def _hypothesis_elsewhere() -> Iterator[None]:
    """Keep hypothesis from leaving a folder where the vendor works: it writes down what it finds in their modules."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    with tempfile.TemporaryDirectory(prefix="kvstore-conformance-") as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(before)


class _Trial:
    """What all sequences have in common.

    Attributes:
        names: Of records; the same in every sequence.
        sizes: Of records, as the backend takes them.
        call_s: About what a call takes.
        failure: The last one; `steps` and `calls` led to it, and `hung` says whether a call of them did not return.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        # Short ones: they are read by people, and lie in a location of their own.
        self.names = [f"v1/{letter}" for letter in string.ascii_lowercase[:NAMES]]
        self.failure: ConformanceFailure | None = None
        self.steps: list[_Drawn] = []
        self.calls: list[str] = []
        self.hung = False
        view = store.open()
        self.capabilities = view.capabilities
        self.align = view.capabilities.align_bytes
        self.sizes = sorted({view.fit(size) for size in (1, 4097, 20_000)})
        self.surfaces = {surface for surface in (SupportsDelete, SupportsList, SupportsUsage) if isinstance(view.backend, surface)}
        name = store.name()
        # The quickest of each: how many sequences there are must not depend on what else the machine does.
        put_s = took_s(lambda: view.put(name, Record(self.sizes[-1], 1), Mode.REPLACE), PROBES)
        self.call_s = (put_s + took_s(lambda: view.get(name, self.sizes[-1]), PROBES)) / 2


def _step(act: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(act)
    def do(self: _Sequences, **drawn: Any) -> None:
        self.steps.append((act.__name__, drawn))
        try:
            act(self, **drawn)
        except ConformanceFailure as failure:
            trial = self.trial
            trial.failure, trial.steps, trial.calls = failure, list(self.steps), list(trial.store.calls)
            trial.hung = any(view.hung for view in self.views)
            raise

    return do


_views = st.integers(0, VIEWS - 1)
_names = st.integers(0, NAMES - 1)
_several = st.lists(_names, min_size=1, max_size=NAMES, unique=True)
_modes = st.sampled_from((Mode.REPLACE, Mode.REPLACE, Mode.CREATE))
_records = st.tuples(st.integers(0, 2), st.integers(1, 3))
"""Number of a size, and a tag."""


class _Sequences(RuleBasedStateMachine):
    """One sequence."""

    trial: ClassVar[_Trial]

    def __init__(self) -> None:
        super().__init__()
        trial = self.trial
        self.steps: list[_Drawn] = []
        self.reopened = False
        trial.store.calls.clear()
        self.place = trial.store.elsewhere()
        # The same in every sequence, whatever was drawn before.
        self.place.random = random.Random(0)
        self.views = [self.place.open() for _ in range(VIEWS)]
        self.may_be: dict[str, set[State]] = {name: {None} for name in trial.names}
        self.may_come: dict[str, set[State]] = {name: set() for name in trial.names}

    def teardown(self) -> None:
        self.place.discard()

    @classmethod
    def fails(cls, steps: Sequence[_Drawn]) -> bool:
        """Run these steps, whatever hypothesis would draw, and see."""
        sequence = cls()
        try:
            for act, drawn in steps:
                getattr(sequence, act)(**drawn)
        except ConformanceFailure:
            return True
        finally:
            sequence.teardown()
        return False

    # What is drawn.

    @rule(view=_views, name=_names, record=_records, mode=_modes, cut=st.integers(0, 3), shift=st.booleans())
    @_step
    def put(self, view: int, name: int, record: tuple[int, int], mode: Mode, cut: int, shift: bool) -> None:
        trial, [(called, made)] = self.trial, self._made([name], [record])
        units = made.size // trial.align
        cuts = [units * cut // 4 * trial.align] if trial.capabilities.max_parts > 1 and 0 < units * cut // 4 < units else []
        offset = trial.align % 4096 if shift else 0
        result = self.views[view].put(called, made, mode, cuts=cuts, shift=offset, timeout_s=self._timeout_s)
        self._after_put(called, made, mode, result)

    @rule(view=_views, names=_several, records=st.lists(_records, min_size=NAMES, max_size=NAMES), mode=_modes)
    @_step
    def put_all(self, view: int, names: list[int], records: list[tuple[int, int]], mode: Mode) -> None:
        for batch in self.views[view].batches(self._made(names, records)):
            results = self.views[view].put_all(batch, mode, timeout_s=self._timeout_s)
            for (called, made), result in zip(batch, results, strict=True):
                self._after_put(called, made, mode, result)

    @rule(view=_views, name=_names, right=st.sampled_from((True, True, False)), other=st.integers(0, 2), cut=st.booleans())
    @_step
    def get(self, view: int, name: int, right: bool, other: int, cut: bool) -> None:
        called, align = self.trial.names[name], self.trial.align
        asked = self._size_of(called) if right else self.trial.sizes[other % len(self.trial.sizes)]
        parts = [align, asked - align] if cut and asked > align and self.trial.capabilities.max_parts > 1 else [asked]
        self._after_get(called, asked, self.views[view].get(called, *parts))

    @rule(view=_views, names=_several)
    @_step
    def get_all(self, view: int, names: list[int]) -> None:
        wanted = [(self.trial.names[name], self._size_of(self.trial.names[name])) for name in names]
        for batch in self.views[view].batches(wanted):
            for (called, asked), got in zip(batch, self.views[view].get_all(batch), strict=True):
                self._after_get(called, asked, got)

    @rule(view=_views, names=_several)
    @_step
    def exists(self, view: int, names: list[int]) -> None:
        for batch in self.views[view].batches([self.trial.names[name] for name in names]):
            for called, there in zip(batch, self.views[view].exists(*batch), strict=True):
                self._see(called, show(there), functools.partial(_is_there, there))

    @precondition(lambda self: SupportsDelete in self.trial.surfaces)
    @rule(view=_views, names=_several)
    @_step
    def delete(self, view: int, names: list[int]) -> None:
        for batch in self.views[view].batches([self.trial.names[name] for name in names]):
            for called, gone in zip(batch, self.views[view].delete(*batch), strict=True):
                answer = gone.name if isinstance(gone, DeleteStatus) else show(gone)
                wanted = {DeleteStatus.DELETED: True, DeleteStatus.ABSENT: False}.get(gone) if isinstance(gone, DeleteStatus) else None
                self._see(called, answer, functools.partial(_is_there, wanted))
                self.may_be[called] = {None}
                self._wait_for(called, None)

    @precondition(lambda self: SupportsList in self.trial.surfaces)
    @rule(view=_views, limit=st.sampled_from((1000, 1, 2)))
    @_step
    def walk(self, view: int, limit: int) -> None:
        found = [(entry.name, entry.size_bytes) for entry in self.views[view].walk(limit=limit)]
        strange = [name for name, _ in found if name not in self.trial.names]
        require(not strange and len(set(found)) == len(found), "every record once, and no others", found, note=self._state())
        sizes = dict(found)
        for called in self.trial.names:
            size = sizes.get(called)
            self._see(
                called,
                "no entry" if size is None else f"an entry with size_bytes={size}",
                functools.partial(_has_size, size),
            )

    @precondition(lambda self: SupportsUsage in self.trial.surfaces)
    @rule(view=_views)
    @_step
    def usage(self, view: int) -> None:
        usage = self.views[view].usage()
        if any(len(self._possible(called)) > 1 for called in self.trial.names):
            return
        there = [state for states in self.may_be.values() for state in states if state is not None]
        size = sum(record.size for record in there)
        good = usage.records == len(there) and usage.used_bytes >= size
        require(good, f"{len(there)} records with at least {size} bytes", usage, note=self._state())

    # Once, and when there is something to lose: to open a store costs more than all else.
    @precondition(lambda self: not self.reopened and len(self.steps) > STEPS // 2)
    @rule(view=_views)
    @_step
    def reopen(self, view: int) -> None:
        self.reopened = True
        self.views[view].close()
        self.views[view] = self.place.open()

    # What may be there.

    @property
    def _timeout_s(self) -> float | None:
        # Without read_after_write the view itself waits for the effect, and repeats what was lost.
        return CALL_S if self.trial.capabilities.read_after_write else None

    def _made(self, names: list[int], records: list[tuple[int, int]]) -> list[tuple[str, Record]]:
        sizes = self.trial.sizes
        return [
            (self.trial.names[name], Record(sizes[number % len(sizes)], tag)) for name, (number, tag) in zip(names, records, strict=False)
        ]

    def _possible(self, name: str) -> set[State]:
        return self.may_be[name] | self.may_come[name]

    def _size_of(self, name: str) -> int:
        return next((state.size for state in self.may_be[name] if state is not None), self.trial.sizes[0])

    def _state(self) -> str:
        said = []
        for name in self.trial.names:
            states = sorted(map(_named, self._possible(name)))
            said.append(f"{name}: {' or '.join(states)}")
        return "Of the calls before it should be left:\n" + "\n".join(said)

    def _see(self, name: str, seen: object, fits: Callable[[State], bool], wanted: str = "") -> None:
        possible = self._possible(name)
        fitting = {state for state in possible if fits(state)}
        expected = wanted or f"an answer for {name} that fits {' or '.join(sorted(map(_named, possible)))}"
        require(fitting, expected, seen, note=self._state())
        # Without read_after_write an older state may be seen again.
        if self.trial.capabilities.read_after_write:
            self.may_be[name] = fitting

    def _after_put(self, name: str, record: Record, mode: Mode, result: PutResult) -> None:
        if result.status in (PutStatus.UNKNOWN, PutStatus.IN_DOUBT):
            self.may_come[name].add(record)
        elif result.status is PutStatus.EXISTS:
            require(mode is Mode.CREATE, f"STORED for {name}, from REPLACE", result, note=self._state())
            self._see(name, result, lambda state: state is not None)
        else:
            require(result.status is PutStatus.STORED, f"STORED for {name}", result, note=self._state())
            self.may_be[name] = {record}
            self._wait_for(name, record)

    def _after_get(self, name: str, asked: int, got: Got) -> None:
        result = got.result
        if result.status is GetStatus.IN_DOUBT:
            return

        def fits(state: State) -> bool:
            if state is None:
                return result.status is GetStatus.MISSING
            if state.size != asked:
                return result.status is GetStatus.WRONG_SIZE and (result.size_bytes, result.asked_bytes) == (state.size, asked)
            return result.status is GetStatus.FOUND and got.bytes == state.bytes

        seen = f"FOUND with {show(got.bytes)}" if result.status is GetStatus.FOUND else show(result)
        self._see(name, seen, fits)

    def _wait_for(self, name: str, state: State) -> None:
        if self.trial.capabilities.read_after_write:
            return
        for view in self.views:
            view.wait_until(functools.partial(_shows, view, name, state))


def _shows(view: View, name: str, state: State) -> bool:
    with contextlib.suppress(ConformanceFailure):
        if state is None:
            return view.exists(name) == [False]
        got = view.get(name, state.size)
        return got.result.status is GetStatus.FOUND and got.bytes == state.bytes
    return False


def _named(state: State) -> str:
    return "no record" if state is None else str(state)


def _is_there(answer: object, state: State) -> bool:
    return answer is (state is not None)


def _has_size(size: int | None, state: State) -> bool:
    return size == (None if state is None else state.size)
