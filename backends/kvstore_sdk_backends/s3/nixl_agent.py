"""All that knows NIXL: agents with its plugin for object stores, and transfers between their memory and objects.

What was seen of NIXL 1.5.1, and what follows from it here:

- A request is repeated inside, up to 10 times: 25 s of errors, 60 s of silence, and a body that drips goes on for ever. Nothing cancels
  one; released handles go on too. So a transfer uses memory of ours alone, never the caller's, and that is out of use until it is over.
- A READ that is repeated after some bytes of an answer (be it the text of a 503) goes on writing behind them, and fails in the end.
- A READ of a shorter or longer object succeeds: see `Staging`.
- An S3 client inside opens 25 connections, however many threads there are: more take several agents.
- The destructor of an agent waits for its transfers (READ) or crashes (WRITE): an agent lives until all of them are over, if need be
  until the process ends, whose exit they do not hold up longer than a few seconds.
- A forked child that starts threads and ends otherwise than by `os._exit` may crash while it ends: the AWS SDK waits for its parent's.
- Every failure is an exception without a status, and one line on stderr, which only the environment (NIXL_LOG_LEVEL) can stop.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import sys
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal

from kvstore_sdk.backend import UnsupportedError
from kvstore_sdk_backends.s3.staging import PageMap, Staging

__all__ = ["MAX_STAGED_BYTES", "NixlAgents", "Slot", "State"]

MAX_STAGED_BYTES = 64 << 20
"""Longest record of a transfer: a slot keeps the memory of the longest it had."""
CONNECTIONS = 25
"""Of one S3 client of the AWS SDK that NIXL uses; it cannot be set."""

_LEAST_STAGED_BYTES = 1 << 20


class State(Enum):
    """Of a transfer. FAILED: it is over, and what it did is not known."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def _import_nixl() -> Any:
    """The module with NIXL's Python API.

    Raises:
        ImportError: there is none.
    """
    first = "nixl" not in sys.modules
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _api
    finally:
        # It changes how all of the process logs.
        logging.raiseExceptions = raise_exceptions
    if first and "NIXL_LOG_LEVEL" not in os.environ:
        # It tells of each agent on stdout, where the tools write their answers.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


class _Agent:
    """One NIXL agent with one S3 client, and slots for as many transfers as that has connections."""

    def __init__(self, parameters: Mapping[str, str], slots: int, pages: PageMap) -> None:
        api = _import_nixl()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self.name = f"kvstore-{uuid.uuid4().hex}"
        # A progress thread would spin on a core, and this plugin has no use for one.
        self.nixl = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync))
        if "OBJ" not in self.nixl.get_plugin_list():
            raise UnsupportedError("nixl: this build has no plugin OBJ")
        self.nixl.create_backend("OBJ", {**parameters, "num_threads": str(slots)})
        # It keeps the parameters, secrets among them, for whoever asks.
        self.nixl.backend_options.clear()
        self.device_ids = itertools.count(1)
        self.slots = [Slot(self, pages) for _ in range(slots)]
        # One reference that nobody holds: the end of the interpreter must not destroy an agent whose transfers run, nor their memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def end(self) -> None:
        """Destroy it. No transfer of it may be running."""
        for slot in self.slots:
            slot._unregister()
        self.slots.clear()
        self.nixl = None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))


class Slot:
    """Memory for one record, and at most one transfer to or from it. Belongs to one thread at a time."""

    def __init__(self, agent: _Agent, pages: PageMap) -> None:
        self._agent = agent
        self._pages = pages
        self._staging: Staging | None = None
        self._memory: Any = None
        self._object: Any = None
        self._handle: Any = None

    def begin(self, verb: Literal["READ", "WRITE"], key: str, address: int, size_bytes: int) -> None:
        """Begin to store the `size_bytes` at `address` under `key` (they are copied first), or to read the object `key`.

        A failure shows in `state`.
        """
        nixl = self._agent.nixl
        # Objects are told apart by these numbers: one that is used again would redirect a transfer that still runs.
        device_id = next(self._agent.device_ids)
        # NIXL raises classes of its own, one for each status.
        with suppress(Exception):
            staging = self._room_for(size_bytes)
            length = size_bytes
            if verb == "WRITE":
                staging.put_in(address, size_bytes)
            else:
                staging.expect()
                length += 1
            self._object = nixl.register_memory([(0, length, device_id, key)], "OBJ")
            local = nixl.get_xfer_descs([(staging.start(size_bytes), length, 0)], "DRAM")
            self._handle = nixl.initialize_xfer(verb, local, self._object.trim(), self._agent.name)
            nixl.transfer(self._handle)
            return
        self._release()

    def state(self) -> State:
        """Of the transfer that was begun last. Once it is not RUNNING, this slot may begin another."""
        if self._handle is None:
            return State.FAILED
        state = State.FAILED
        with suppress(Exception):
            answer = self._agent.nixl.check_xfer_state(self._handle)
            if answer == "PROC":
                return State.RUNNING
            if answer == "DONE":
                state = State.DONE
        self._release()
        return state

    def take_out(self, address: int, size_bytes: int) -> bool:
        """Copy the record of a READ that is DONE to `address`. False: it may be longer or shorter; nothing was copied."""
        if self._staging is None or not self._staging.is_exact():
            return False
        self._staging.take_out(address, size_bytes)
        return True

    def _room_for(self, size_bytes: int) -> Staging:
        if self._staging is None or self._staging.capacity_bytes < size_bytes:
            self._unregister()
            capacity_bytes = max(_LEAST_STAGED_BYTES, 1 << (size_bytes - 1).bit_length())
            staging = Staging(capacity_bytes, self._pages)
            self._memory = self._agent.nixl.register_memory([(staging.address, staging.mapped_bytes, 0, "")], "DRAM")
            self._staging = staging
        return self._staging

    def _release(self) -> None:
        nixl = self._agent.nixl
        handle, self._handle = self._handle, None
        described, self._object = self._object, None
        with suppress(Exception):
            if handle is not None:
                nixl.release_xfer_handle(handle)
        with suppress(Exception):
            if described is not None:
                nixl.deregister_memory(described)

    def _unregister(self) -> None:
        memory, self._memory = self._memory, None
        self._staging = None
        with suppress(Exception):
            if memory is not None:
                self._agent.nixl.deregister_memory(memory)


class NixlAgents:
    """Slots for so many transfers at a time, of any threads, all with one endpoint, bucket and pair of keys.

    Closed, it ends as soon as no transfer runs; while one does, that is looked for whenever others are made or closed.
    """

    _closed_ones: set[NixlAgents] = set()  # noqa: RUF012  # of the process
    _closed_lock = threading.RLock()
    _used = _forked = False

    def __init__(self, parameters: Mapping[str, str], concurrency: int) -> None:
        """
        Args:
            parameters: Of the plugin OBJ.
            concurrency: Transfers at a time.

        Raises:
            ImportError: there is no NIXL.
            UnsupportedError: NIXL or this machine cannot do it; the message says why.
        """
        if NixlAgents._forked:
            # The threads of the AWS SDK are not there.
            raise UnsupportedError("nixl: this process was forked from one that used it; start a fresh one")
        NixlAgents._end_closed()
        # Of the kind that a signal handler which calls `close` may take again.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._left: list[Slot] = []
        self._taken = 0
        self._closed = False
        self._agents: list[_Agent] = []
        try:
            self._pages = PageMap()
        except OSError as cause:
            raise UnsupportedError(
                f"nixl: /proc/self/pagemap cannot be read ({cause.strerror}), which tells how long an object was"
            ) from cause
        try:
            if not Staging(1, self._pages).works():
                raise UnsupportedError("nixl: /proc/self/pagemap does not tell which memory was touched, and so how long an object was")
            NixlAgents._used = True
            rest = concurrency
            for count in range(-(-concurrency // CONNECTIONS), 0, -1):
                self._agents.append(_Agent(parameters, -(-rest // count), self._pages))
                rest -= len(self._agents[-1].slots)
        except BaseException as cause:
            self._end()
            if isinstance(cause, (UnsupportedError, ImportError)) or not isinstance(cause, Exception):
                raise
            # Without its text and its chain, which may hold the keys.
            raise UnsupportedError(f"nixl: its plugin OBJ cannot be used: it raised {type(cause).__name__}") from None
        self._free = [slot for agent in self._agents for slot in agent.slots]
        self._many = concurrency // 2

    def take(self) -> Slot | None:
        """A free slot, for whoever gives it back. None: there is none now, or this is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._left:
                self._collect()
            if not self._free:
                return None
            self._taken += 1
            # The one that was used last has its memory already.
            return self._free.pop()

    def give_back(self, slot: Slot, running: bool = False) -> None:
        """`running`: the transfer goes on; the slot will be free when it is over."""
        with self._lock:
            self._taken -= 1
            (self._left if running else self._free).append(slot)
        if self._closed:
            NixlAgents._end_closed()

    def is_held_up(self) -> bool:
        """Whether most transfers outlive those who waited for them: better not begin others."""
        with self._lock:
            if self._left:
                self._collect()
            return len(self._left) > self._many

    def close(self) -> None:
        """Never blocks on a transfer. Idempotent. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with NixlAgents._closed_lock:
            if self._closed:
                return
            self._closed = True
            NixlAgents._closed_ones.add(self)
        NixlAgents._end_closed()

    @property
    def is_over(self) -> bool:
        """Whether it is closed, and nothing of it is left."""
        return self._closed and not self._agents

    def _collect(self) -> None:
        """Free the slots whose transfers are over by now."""
        running = [slot for slot in self._left if slot.state() is State.RUNNING]
        self._free += [slot for slot in self._left if slot not in running]
        self._left = running

    def _end(self) -> None:
        for agent in self._agents:
            agent.end()
        self._agents.clear()
        self._pages.close()

    @classmethod
    def _end_closed(cls) -> None:
        """End those that are closed and idle by now."""
        with cls._closed_lock:
            for agents in list(cls._closed_ones):
                with agents._lock:
                    agents._collect()
                    if agents._taken or agents._left:
                        continue
                    agents._free.clear()
                    agents._end()
                cls._closed_ones.discard(agents)


def _forget() -> None:
    """In a forked child: the threads of its parent's agents are not there, and would be waited for."""
    NixlAgents._forked = NixlAgents._used
    NixlAgents._closed_lock = threading.RLock()
    NixlAgents._closed_ones = set()


os.register_at_fork(after_in_child=_forget)
