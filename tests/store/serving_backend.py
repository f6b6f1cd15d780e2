"""A store below host memory through which others read what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from store_bench import Stand, payload

from kvstore_sdk.backend import Backend, Capabilities, Loan, RecordSource
from kvstore_sdk.format import HEADER_BYTES, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper

__all__ = ["ReadOnly", "Serving", "is_record", "names"]


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


class ReadOnly(Serving):
    """Stores nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=256, max_concurrency=8, read_only=True)


def names(stand: Stand, some: list[bytes]) -> list[str]:
    return [ChunkKey.from_engine(stand.store.identity.namespace, one).name for one in some]


def is_record(stand: Stand, loan: Loan | None, one: bytes, namespace: str = "") -> bool:
    """Whether what is lent is the whole record of the chunk, as a peer would check it."""
    assert loan is not None
    of = ChunkKey.from_engine(namespace or stand.store.identity.namespace, one)
    view = loan.buffer.view
    size = stand.sizes[int.from_bytes(one[-4:], "big")]
    whole = verify(view, of, stand.identity.layout, size) is None
    return whole and bytes(view[HEADER_BYTES : HEADER_BYTES + size]) == payload(one, size, stand.generation)
