"""Which rows of the engine's memory open jobs use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore_sdk.tier.jobs import Kind

__all__ = ["Rows"]


class Rows:
    """A row is loaded into by one job alone; several may store from it. Used by one thread at a time.

    Sets of rows, and not a count for each, so that the usual job costs the engine's thread nothing for each row.
    """

    def __init__(self) -> None:
        self._loading: set[int] = set()
        self._storing: set[int] = set()
        # Of rows that several jobs store from: how many besides the first.
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._loading) + len(self._storing)

    @property
    def storing(self) -> int:
        """Rows that open jobs store from."""
        return len(self._storing)

    def conflicts(self, kind: Kind, rows: Sequence[int]) -> Collection[int]:
        """Places of the rows that a job of this kind may not use now."""
        loading, storing = self._loading, self._storing
        if kind is Kind.STORE:
            return () if loading.isdisjoint(rows) else {place for place, row in enumerate(rows) if row in loading}
        if loading.isdisjoint(rows) and storing.isdisjoint(rows) and len(set(rows)) == len(rows):
            return ()
        return {place for place, row in enumerate(rows) if row in loading or row in storing or row in rows[:place]}

    def hold(self, kind: Kind, rows: Sequence[int]) -> None:
        """A job uses these rows, which are free for it."""
        if kind is Kind.LOAD:
            self._loading.update(rows)
            return
        storing = self._storing
        if storing.isdisjoint(rows) and len(set(rows)) == len(rows):
            storing.update(rows)
            return
        for row in rows:
            if row in storing:
                self._shared[row] = self._shared.get(row, 0) + 1
            else:
                storing.add(row)

    def release(self, kind: Kind, rows: Sequence[int]) -> None:
        """The job that used these rows was reported."""
        if kind is Kind.LOAD:
            self._loading.difference_update(rows)
            return
        if not self._shared:
            self._storing.difference_update(rows)
            return
        for row in rows:
            others = self._shared.pop(row, 0)
            if not others:
                self._storing.discard(row)
            elif others > 1:
                self._shared[row] = others - 1
