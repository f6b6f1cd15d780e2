"""From a checked entry to an open Tier, the same for both ways into vLLM."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import NamedTuple, cast

from kvstore_sdk.backend import Backend, BackendError, Capabilities, Durability, SupportsHints, SupportsServe, TimedOutError
from kvstore_sdk.backend.options import parse_options
from kvstore_sdk.backend.registry import backend_options, open_backend
from kvstore_sdk.errors import KVStoreError, text_of
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.isolation import open_isolated
from kvstore_sdk.tier import EngineMemory, JobResult, RecordMemory, Tier
from kvstore_sdk.tier.fit import fit
from kvstore_sdk.vllm.options import TierOptions

Answer = Callable[[JobResult, bool], object]
"""What `Tier` is to make of a result, and of whether it is a load's."""

__all__ = ["NOBODY_READS", "OpenTier", "fit_unopened", "open_tier"]

NOBODY_READS = "; nobody reads them again once it has ended, and the store keeps them: remove %s then, or set may_store to false"


logger = logging.getLogger(__name__)

_SAY_AFTER_S = 5.0
"""A start that waits for longer says for what."""

_kept_mapped: list[memoryview] = []
"""Memory that a backend was told of by a call that never returned, kept mapped until the process ends."""


class OpenTier(NamedTuple):
    """A Tier, whether what it stores outlives this process, and whether its backend is to be told where a request says that chunks are."""

    tier: Tier
    outlives_us: bool
    takes_hints: bool


def open_tier(
    where: str,
    options: TierOptions,
    identity: KVIdentity,
    memory: EngineMemory | RecordMemory,
    *,
    name: str,
    events: bool,
    answer: Answer | None = None,
) -> OpenTier:
    """Open the backend and build its Tier, in `start_timeout_s` at most. Of a step that does not return the thread is left behind.

    Args:
        where: For errors.
        options: Of the entry.
        identity: Of the chunks.
        memory: What they come from and go to.
        name: For threads, logs and metrics.
        events: Collect events.
        answer: Of its results: see `Tier`.

    Raises:
        ConfigError: the configuration does not fit the chunks, or the backend says that it is wrong.
        BackendError: the store could not be opened; TimedOutError: not in time. Says which step failed.
    """
    fit_unopened(where, options, identity)
    opening = _Opening(where, options, identity, memory, name, events, answer)
    try:
        return opening.wait(options.adapter.start_timeout_s)
    except TimedOutError:
        if isinstance(memory, RecordMemory):
            _kept_mapped.append(memory.region.view[:])
        raise


class _Opening:
    """The steps that call a vendor's code before the engine runs, on a thread of their own: none of them has a deadline, and a system call
    on a dead mount, or an agent that waits for its peers, cannot be interrupted."""

    def __init__(
        self,
        where: str,
        options: TierOptions,
        identity: KVIdentity,
        memory: EngineMemory | RecordMemory,
        name: str,
        events: bool,
        answer: Answer | None,
    ) -> None:
        self._doing = f"{where}: backend {options.shown}"
        self._options = options
        self._memory = memory
        self._step = "open"
        self._answer: Future[OpenTier] = Future()
        self._tier: Callable[[Backend], Tier] = lambda backend: Tier(
            backend,
            memory,
            identity=identity,
            settings=options.settings,
            name=name,
            may_store=options.adapter.may_store,
            events=events,
            answer=answer,
        )

    def wait(self, timeout_s: float) -> OpenTier:
        """What was opened. When the time is up it is closed by whoever opens it after all."""
        thread = _start(f"{self._doing} start", self._run)
        try:
            thread.join(min(_SAY_AFTER_S, timeout_s))
            if thread.is_alive() and timeout_s > _SAY_AFTER_S:
                logger.info("%s: the start waits for %s to return, for %g s at most", self._doing, self._step, timeout_s)
                thread.join(timeout_s - _SAY_AFTER_S)
        finally:
            # Exactly one of two things happens: the answer is there, or the thread finds that nobody waits for it.
            gave_up = self._answer.cancel()
        if gave_up:
            problem = f"{self._step} did not return within {timeout_s:g} s; is what it needs there? start_timeout_s allows more"
            raise TimedOutError(f"{self._doing}: {problem}")
        return self._answer.result()

    def _run(self) -> None:
        try:
            made = self._build()
        except KVStoreError as cause:
            self._fail(cause)
        except Exception as cause:  # noqa: BLE001  vendor code may raise anything; the engine's own thread is told what it was
            self._fail(BackendError(f"{self._doing}: {self._step} raised {type(cause).__name__}: {text_of(cause)}"), cause)
        except BaseException as cause:  # noqa: BLE001  SystemExit too; and it may say what it was given
            self._fail(BackendError(f"{self._doing}: {self._step} raised {type(cause).__name__}"), cause)
        else:
            if self._answer.set_running_or_notify_cancel():
                self._answer.set_result(made)
            else:
                made.tier.close()

    def _build(self) -> OpenTier:
        backend = self._open()
        try:
            if self._answer.cancelled():
                # Nobody wants it any more: it is told of no memory.
                raise TimedOutError(f"{self._doing}: open returned too late")
            outlives_us = backend.capabilities.durability is not Durability.NONE
            if isinstance(backend, SupportsServe) and backend.capabilities.read_only and not isinstance(self._memory, RecordMemory):
                logger.info(
                    "%s: serves nothing: it only asks, since it keeps no records; what p2p is to keep is its serve_bytes", self._doing
                )
            self._step = "register_region"
            return OpenTier(self._tier(backend), outlives_us, isinstance(backend, SupportsHints))
        except BaseException:
            self._close(backend)
            raise

    def _open(self) -> Backend:
        options = self._options
        target, given, location, limits = options.backend, options.backend_options, options.location, options.isolation
        if limits is None:
            return open_backend(target, given, location=location)
        return open_isolated(target, given, location=location, limits=limits, label=f"backend {options.shown}")

    def _close(self, backend: Backend) -> None:
        """What it does comes second: the error is told even if this does not return."""

        def run() -> None:
            try:
                backend.close()
            except BaseException:
                logger.exception("%s: close raised, after %s had failed", self._doing, self._step)

        timeout_s = self._options.settings.close_timeout_s
        thread = _start(f"{self._doing} close", run)
        thread.join(timeout_s)
        if thread.is_alive():
            logger.error("%s: close did not return within %g s, after %s had failed", self._doing, timeout_s, self._step)

    def _fail(self, error: KVStoreError, cause: BaseException | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        if self._answer.set_running_or_notify_cancel():
            self._answer.set_exception(error)


def _start(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def fit_unopened(where: str, options: TierOptions, identity: KVIdentity) -> None:
    """Find out before the store is opened, and its folder made, what can be told without it: whether the chunks fit what was configured.

    A backend may have narrower limits of its own, which only the open one tells.

    Raises:
        ConfigError: they do not fit.
    """
    name, limit = "max_record_bytes", sys.maxsize
    schema = backend_options(options.backend)
    if name in options.backend_options:
        limit = parse_options(where, {name: schema[name]}, {name: options.backend_options[name]})[name]
    unopened = SimpleNamespace(capabilities=Capabilities(max_record_bytes=limit))
    fit(where, cast(Backend, unopened), identity, options.settings)
