"""All that knows NIXL: an agent with its plugin for object stores, and transfers between its memory and objects.

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
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, Protocol

from kvstore_sdk.backend import Deadline, UnsupportedError
from kvstore_sdk_backends.s3.staging import PageMap, Staging

__all__ = ["UNTOLD", "Agent", "Owner", "Slot", "State", "Verb"]

UNTOLD = "nixl: /proc/self/pagemap does not tell how long an object was, here, or with memory that is locked (mlockall)"
"""Why it cannot be used."""

Verb = Literal["READ", "WRITE"]


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


class Owner(Protocol):
    """Of slots."""

    pages: PageMap

    def give_back(self, slot: Slot, running: bool) -> None:
        """Nobody uses `slot` any more, except its transfer if that is still `running`."""
        ...

    def give_up(self) -> None:
        """Give no slot to anybody any more: memory does not tell how long an object was."""
        ...


class Agent:
    """One NIXL agent with one S3 client, and slots for as many transfers as that has connections."""

    def __init__(self, parameters: Callable[[], Mapping[str, str]], slots: int, owner: Owner) -> None:
        api = _import_nixl()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self.name = f"kvstore-{uuid.uuid4().hex}"
        # A progress thread would spin on a core, and this plugin has no use for one.
        self.nixl = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync))
        if "OBJ" not in self.nixl.get_plugin_list():
            raise UnsupportedError("nixl: this build has no plugin OBJ")
        self.nixl.create_backend("OBJ", {**parameters(), "num_threads": str(slots)})
        # It keeps the parameters, secrets among them, for whoever asks.
        self.nixl.backend_options.clear()
        self.device_ids = itertools.count(1)
        self.slots = [Slot(self, owner) for _ in range(slots)]
        # One reference that nobody holds: the end of the interpreter must not destroy an agent whose transfers run, nor their memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def end(self) -> None:
        """Destroy it. No transfer of it may be running."""
        for slot in self.slots:
            slot.drop()
        self.slots.clear()
        self.nixl = None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))


class Slot:
    """Memory for one record, and at most one transfer to or from it. Belongs to one thread at a time: its owner gives it out.

    Attributes:
        room_bytes: The memory that it has, or makes when it begins.
        writes: It was taken for a WRITE, and is not free.
        freed_s: When it was last given back, by the monotonic clock.
    """

    def __init__(self, agent: Agent, owner: Owner) -> None:
        self.room_bytes = 0
        self.writes = False
        self.freed_s = 0.0
        self._agent = agent
        self._owner = owner
        self._staging: Staging | None = None
        self._memory: Any = None
        self._object: Any = None
        self._handle: Any = None

    def begin(self, verb: Verb, key: str, address: int, size_bytes: int, deadline: Deadline) -> bool:
        """Begin to store the `size_bytes` at `address` under `key` (they are copied first), or to read the object `key`.

        Returns:
            False: nothing was sent; there is no memory, or no time to copy. Another failure shows in `state`.
        """
        nixl = self._agent.nixl
        # Objects are told apart by these numbers: one that is used again would redirect a transfer that still runs.
        device_id = next(self._agent.device_ids)
        sent = False
        # NIXL raises classes of its own, one for each status.
        with suppress(Exception):
            staging = self._staged()
            length = size_bytes
            if verb == "READ":
                staging.expect()
                length += 1
            elif not staging.put_in(address, size_bytes, deadline):
                return False
            self._object = nixl.register_memory([(0, length, device_id, key)], "OBJ")
            local = nixl.get_xfer_descs([(staging.start(size_bytes), length, 0)], "DRAM")
            self._handle = nixl.initialize_xfer(verb, local, self._object.trim(), self._agent.name)
            sent = True
            nixl.transfer(self._handle)
            return True
        self._release()
        return sent

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

    def take_out(self, address: int, size_bytes: int, deadline: Deadline) -> bool:
        """Copy the record of a READ that is DONE to `address`.

        Returns:
            False: it may be longer or shorter, and nothing was copied; or the deadline passed meanwhile.
        """
        staging = self._staging
        try:
            return staging is not None and staging.is_exact() and staging.take_out(address, size_bytes, deadline)
        except OSError:
            # The next one that is made tells whether this can be done at all any more.
            self.drop()
            return False

    def give_back(self, running: bool = False) -> None:
        """To whoever takes it next. `running`: the transfer goes on; the slot will be free when it is over."""
        self._owner.give_back(self, running)

    def drop(self) -> None:
        """Free its memory. No transfer may be running."""
        memory, self._memory = self._memory, None
        self._staging = None
        self.room_bytes = 0
        with suppress(Exception):
            if memory is not None:
                self._agent.nixl.deregister_memory(memory)

    def _staged(self) -> Staging:
        staging, room_bytes = self._staging, self.room_bytes
        if staging is None or staging.capacity_bytes < room_bytes:
            self.drop()
            self.room_bytes = room_bytes
            staging = Staging(room_bytes, self._owner.pages)
            if not staging.works():
                self._owner.give_up()
                raise UnsupportedError(UNTOLD)
            self._memory = self._agent.nixl.register_memory([(staging.address, staging.mapped_bytes, 0, "")], "DRAM")
            self._staging = staging
        return staging

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
