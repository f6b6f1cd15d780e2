"""The probes that no call was made for yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore_sdk.backend import Hint
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.lookups import Probe

__all__ = ["Questions"]

_LEAST_PROBES = 64
"""Names that are not worth a second call: a round trip costs as much as looking so many up."""


class _Question(NamedTuple):
    """Probes of one request, for one call or several."""

    namespace: str
    probes: Sequence[Probe]
    hint: Hint | None


class Questions:
    """Used under the lock of its queue. Calls that may wait have a line of their own: nobody stands behind them."""

    def __init__(self, batch: int, *, whole: bool = False) -> None:
        """`batch`: most probes in a call. `whole`: as many as that are never spread over several."""
        self._batch = batch
        self._least = batch if whole else _LEAST_PROBES
        self._line: deque[_Question] = deque()
        self._patient: deque[_Question] = deque()

    def __len__(self) -> int:
        return len(self._line) + len(self._patient)

    @property
    def patient(self) -> int:
        """Calls to be made that may wait."""
        return len(self._patient)

    def put(self, namespace: str, probes: Sequence[Probe], hint: Hint | None, threads: int) -> int:
        """Take in a request's probes: one call, or for many of them one for each of the threads where a store may look one name up after
        another. Returns how many calls."""
        patient = hint is not None and hint.wait_s > 0
        size = self._batch if patient else max(self._least, -(-len(probes) // threads))
        parts = [_Question(namespace, probes[at : at + size], hint) for at in range(0, len(probes), size)]
        (self._patient if patient else self._line).extend(parts)
        return len(parts)

    def take(self, may_wait: bool) -> Batch | None:
        """The next call. `may_wait`: one that waits may be made."""
        for line in (self._line, self._patient) if may_wait else (self._line,):
            while line:
                namespace, waiting, hint = line.popleft()
                probes = _wanted(waiting)
                if len(probes) > self._batch:
                    line.appendleft(_Question(namespace, probes[self._batch :], hint))
                if probes:
                    return Batch(probes=probes[: self._batch], operation="exists", namespace=namespace, hint=hint)
        return None

    def clear(self) -> list[Probe]:
        """Drop all of it. Returns it: somebody has to answer them."""
        probes = [probe for line in (self._line, self._patient) for question in line for probe in question.probes]
        self._line.clear()
        self._patient.clear()
        return probes

    def forget_unwanted(self) -> None:
        """Drop the probes that nobody waits for, where all of a question's are."""
        self._line = deque(question for question in self._line if _wanted(question.probes))
        self._patient = deque(question for question in self._patient if _wanted(question.probes))


def _wanted(probes: Sequence[Probe]) -> list[Probe]:
    """Those that somebody waits for. The others, which are to be dropped, hear that they get no answer: their asker may ask again."""
    for probe in probes:
        if probe.over:
            probe.answered = False
    return [probe for probe in probes if not probe.over]
