"""Records to serve, and accounts of what was lent."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvstore_sdk.backend import Buffer, Loan, Region

__all__ = ["CountingSource", "content"]


def content(name: str, size_bytes: int) -> bytes:
    """What the record of that name holds."""
    return random.Random(name).randbytes(size_bytes)


class _Loan:
    def __init__(self, name: str, buffer: Buffer, source: CountingSource) -> None:
        self.name = name
        self.buffer = buffer
        self._source = source

    def seal(self) -> bool:
        self._source.sealed.append(self.name)
        return self.name not in self._source.spoilt


class CountingSource:
    """A source that holds its borrower to the contract: what was not lent, or was given back before, is an error.

    Attributes:
        out: What is lent now.
        lent: How many loans there were.
        most_loans: No more at a time.
        spoilt: Names of records that are no good any more when they are sealed.
        sealed: Names in the order in which they were sealed.
    """

    def __init__(self, sizes: Mapping[str, int], *, most_loans: int = 1 << 30, namespace: str = "", layout: str = "") -> None:
        self.namespace = namespace
        self.layout = layout
        self.region = Region(max(1, sum(sizes.values())))
        self.buffers: dict[str, Buffer] = {}
        self.most_loans = most_loans
        self.spoilt: set[str] = set()
        self.sealed: list[str] = []
        self.out: list[_Loan] = []
        self.lent = 0
        self._end = 0
        for name, size_bytes in sizes.items():
            self.add(name, size_bytes)

    def add(self, name: str, size_bytes: int) -> None:
        """One more record. Room for it was made by the constructor, or by `remove`."""
        buffer = self.region.buffer(self._end, size_bytes)
        buffer.view[:] = content(name, size_bytes)
        self.buffers[name] = buffer
        self._end += size_bytes

    def remove(self, name: str) -> None:
        """The record is not there any more, and its room is none."""
        del self.buffers[name]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [self.buffers[name].length if name in self.buffers else 0 for name in names]

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        loans: list[Loan | None] = []
        for name in names:
            if name in self.buffers and len(self.out) < self.most_loans:
                self.out.append(loan := _Loan(name, self.buffers[name], self))
                loans.append(loan)
                self.lent += 1
            else:
                loans.append(None)
        return loans

    def give_back(self, loans: Sequence[Loan]) -> None:
        for loan in loans:
            self.out.remove(loan)  # type: ignore[arg-type]
