"""A backend that is told where a request says its chunks are: `"backend": "vllm_hinting:open_hinting"`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import Backend, Capabilities, Deadline, Hint, open_backend
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.vllm import compat

__all__ = ["OPENED", "HintingBackend", "check_hints", "hinting_entry", "open_hinting"]


class HintingBackend(BackendWrapper):
    """Memory that writes down what it is told and asked.

    Attributes:
        heard: Of each call of `hint` the names and the hint, of each call of `exists` the names and None, in their order.
        held: Where it is set, questions for names that it had a hint with a wait for are answered when it is set, or their time is up.
        replica: As the adapter gave it.
    """

    def __init__(self, inner: Backend, replica: int) -> None:
        super().__init__(inner)
        self.replica = replica
        self.heard: list[tuple[list[str], Hint | None]] = []
        self.held: threading.Event | None = None
        self._waits: dict[str, float] = {}

    @property
    def capabilities(self) -> Capabilities:
        """With room for calls that wait."""
        return dataclasses.replace(self.inner.capabilities, max_concurrency=256)

    @property
    def hints(self) -> list[Hint]:
        """Those it was told."""
        return [hint for _, hint in self.heard if hint is not None]

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        self.heard.append((list(names), hint))
        self._waits.update(dict.fromkeys(names, hint.wait_s))

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "exists" and deadline is not None:
            self.heard.append((list(items), None))
            wait_s = max(self._waits.get(name, 0.0) for name in items)
            if self.held is not None and wait_s:
                self.held.wait(min(wait_s, deadline.remaining_s()))
        return proceed(items)


OPENED: dict[str, HintingBackend] = {}
"""The last one that was opened at a location."""


def open_hinting(location: str, *, data_parallel_index: int = -1) -> HintingBackend:
    """The memory that the process has under this name."""
    OPENED[location] = HintingBackend(open_backend("memory", location=location), data_parallel_index)
    return OPENED[location]


def hinting_entry(location: str, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "vllm_hinting:open_hinting", "location": location, **options}


def check_hints(build: Callable[..., Any]) -> None:
    """Assert, in whatever vLLM is imported, that a backend hears which peer a request names and which replica it is of.

    Args:
        build: Makes a stand of a tier's entry.
    """
    for index in range(1 if compat.SHARES_REGION_BETWEEN_REPLICAS else 2):
        made = build(
            hinting_entry(f"peers-{index}"), parallel_config__data_parallel_size=index + 1, parallel_config__data_parallel_index=index
        )
        keys = made.keys("a", 2)
        named = {"remote_kv_source": {"kv_request_id": "1", "remote_host": "prefill", "remote_port": 7777}}
        for name, params in (("good", named), ("bad", {"kvstore": 7}), ("none", None)):
            request = made.request(name, keys, kv_transfer_params=params)
            assert made.lookup(request, keys) == [False] * len(keys)
            made.finish(request)
            made.settle()
        backend = OPENED[f"peers-{index}"]
        assert set(backend.hints) == {Hint("prefill:7777")}
        assert backend.replica == index
        made.close()
