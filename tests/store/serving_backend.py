"""A store below host memory through which others read what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_sdk.backend import Backend, Loan, RecordSource
from kvstore_sdk.testing import BackendWrapper

__all__ = ["Serving"]


class Serving(BackendWrapper):
    """Keeps its source, and what a test lent through it until it gives it back. Whatever is left at `close` is given back there.

    Attributes:
        heard: What it was told, in order: ("identity", namespace, layout) and ("serve",).
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.heard: list[tuple[str, ...]] = []
        self.source: RecordSource
        self.loans: list[Loan] = []
        self.gives_back = True

    def use_identity(self, namespace: str, layout: str) -> None:
        self.heard.append(("identity", namespace, layout))

    def serve(self, source: RecordSource) -> None:
        self.heard.append(("serve",))
        self.source = source

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        loans = self.source.lend(names)
        self.loans += [loan for loan in loans if loan is not None]
        return loans

    def give_back(self, loans: Sequence[Loan | None]) -> None:
        given: list[Any] = [loan for loan in loans if loan is not None]
        self.loans = [loan for loan in self.loans if loan not in given]
        self.source.give_back(given)

    def close(self) -> None:
        if self.gives_back and self.heard:
            self.give_back(list(self.loans))
        super().close()
