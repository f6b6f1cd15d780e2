"""The probes that no call was made for yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore_sdk.backend import Hint
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.probe import Probe

__all__ = ["Questions"]

_LEAST_KEYS = 64
"""Names that are not worth a second call: a round trip costs as much as looking so many up."""


class _Question(NamedTuple):
    """Keys of a probe, for one call or several."""

    namespace: str
    probe: Probe
    keys: Sequence[bytes]
    hint: Hint | None


class Questions:
    """Used under the lock of its queue. Calls that may wait have a line of their own: nobody stands behind them."""

    def __init__(self, batch: int, *, whole: bool = False) -> None:
        """`batch`: most keys in a call. `whole`: as many as that are never spread over several."""
        self._batch = batch
        self._least = batch if whole else _LEAST_KEYS
        self._line: deque[_Question] = deque()
        self._patient: deque[_Question] = deque()

    def __len__(self) -> int:
        return len(self._line) + len(self._patient)

    @property
    def patient(self) -> int:
        """Calls to be made that may wait."""
        return len(self._patient)

    def put(self, namespace: str, probe: Probe, hint: Hint | None, threads: int) -> None:
        """Take in a probe: one call, or for many keys one for each of the threads where a store may look one name up after another."""
        patient = hint is not None and hint.wait_s > 0
        keys = probe.keys
        size = self._batch if patient else max(self._least, -(-len(keys) // threads))
        parts = [_Question(namespace, probe, keys[at : at + size], hint) for at in range(0, len(keys), size)]
        (self._patient if patient else self._line).extend(parts)

    def take(self, may_wait: bool) -> Batch | None:
        """The next call. `may_wait`: one that waits may be made."""
        for line in (self._line, self._patient) if may_wait else (self._line,):
            while line:
                question = line.popleft()
                keys = _wanted(question)
                if len(keys) > self._batch:
                    line.appendleft(question._replace(keys=keys[self._batch :]))
                if keys:
                    return Batch(
                        probe=question.probe,
                        keys=keys[: self._batch],
                        operation="exists",
                        namespace=question.namespace,
                        hint=question.hint,
                    )
        return None

    def clear(self) -> list[tuple[Probe, Sequence[bytes]]]:
        """Drop all of it. Returns it: somebody has to answer it."""
        dropped = [(question.probe, question.keys) for line in (self._line, self._patient) for question in line]
        self._line.clear()
        self._patient.clear()
        return dropped

    def forget_unwanted(self) -> None:
        """Drop the questions that have no key that somebody waits for."""
        self._line = deque(filter(_wanted, self._line))
        self._patient = deque(filter(_wanted, self._patient))


def _wanted(question: _Question) -> Sequence[bytes]:
    """The keys that somebody waits for. The others are to be dropped, and a trial hears that it gets no answer: its asker may ask again."""
    probe = question.probe
    if not probe.over:
        return question.keys
    wanted = [key for key in question.keys if key not in probe.over]
    if len(wanted) < len(question.keys):
        probe.answered = False
    return wanted
