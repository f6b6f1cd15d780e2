"""Profile core: any sequence of operations."""

from __future__ import annotations

from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.machine import check_sequences
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store


@proves("KV-CORE-24")
def test_any_sequence_of_operations_is_answered_like_a_dictionary(store: Store, run: Run) -> None:
    check_sequences(store, run.seed, run.examples)
