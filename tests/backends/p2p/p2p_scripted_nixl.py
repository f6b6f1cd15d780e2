"""A module `nixl` whose transfers are in the states that a test writes into files, and that says what it was asked."""

from __future__ import annotations

import textwrap
from pathlib import Path

MODULE = '''
import threading
from pathlib import Path

from kvstore_sdk_backends.p2p import nixl_driver

FOLDER = Path(__file__).parent


def one_at_a_time(method):
    def wrapped(self, *args):
        if not self.busy.acquire(blocking=False):
            (FOLDER / "overlap").write_text(method.__name__)
        try:
            return method(self, *args)
        finally:
            self.busy.release()
    return wrapped


class Handle:
    def __init__(self, peer, pieces):
        self.peer, self.pieces = peer, pieces

    def release(self):
        pass


class nixl_agent_config:
    def __init__(self, **options):
        assert options["enable_prog_thread"] is False, "it would spin on a core"


class nixl_agent:
    def __init__(self, name, config):
        self.name, self.broken, self.busy = name, set(), threading.Lock()

    def create_backend(self, backend, options):
        assert backend == "UCX"

    def _say(self, *words):
        with (FOLDER / "said").open("a") as file:
            print(*words, file=file)

    def _state(self, handle):
        """Of the place that its first piece goes to."""
        nixl_driver.UNSURE_S = float((FOLDER / "unsure_s").read_text())
        path = FOLDER / f"{handle.pieces[0][0]:x}"
        state = path.read_text() if path.exists() else "DONE"
        if state.startswith("nixl"):
            raise type(state, (Exception,), {})(state)
        return state

    @one_at_a_time
    def get_agent_metadata(self):
        return self.name.encode()

    @one_at_a_time
    def register_memory(self, memory, kind):
        return memory

    @one_at_a_time
    def deregister_memory(self, memory):
        pass

    @one_at_a_time
    def add_remote_agent(self, metadata):
        name = metadata.rpartition(b" ")[2]
        self._say("add", name.decode())
        if b"broken" in metadata or name in self.broken:
            self.broken.add(name)
            raise type("nixlBackendError", (Exception,), {})()
        return name

    @one_at_a_time
    def remove_remote_agent(self, name):
        self._say("remove", name)
        self.broken.discard(name.encode())

    @one_at_a_time
    def prep_xfer_dlist(self, name, pieces, kind):
        return Handle(name, pieces)

    @one_at_a_time
    def get_xfer_descs(self, pieces, kind):
        return pieces

    @one_at_a_time
    def initialize_xfer(self, verb, local, remote, peer):
        assert verb == "WRITE" and [piece[1] for piece in local] == [piece[1] for piece in remote]
        return Handle(peer, remote)

    @one_at_a_time
    def transfer(self, handle):
        self._say("write", *(f"{address:x}+{size:x}" for address, size, _ in handle.pieces))
        return self._state(handle)

    @one_at_a_time
    def check_xfer_state(self, handle):
        return self._state(handle)

    @one_at_a_time
    def release_xfer_handle(self, handle):
        self._say("release", f"{handle.pieces[0][0]:x}")

    @one_at_a_time
    def get_new_notifs(self):
        return {}
'''


class ScriptedNixl:
    """The folder of the module, for a path that it comes first in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._package = folder / "nixl"
        self._package.mkdir()
        (self._package / "__init__.py").write_text("")
        (self._package / "_api.py").write_text(textwrap.dedent(MODULE))
        # A test that takes its time is not what ends a child.
        self.unsure(3600.0)

    def state(self, address: int, state: str) -> None:
        """What transfers there are in from now on: DONE, PROC, or the class of the exception that tells it."""
        self._say(f"{address:x}", state)

    def unsure(self, seconds: float) -> None:
        """How long the child waits from now on for an answer that says more."""
        self._say("unsure_s", str(seconds))

    def _say(self, file: str, text: str) -> None:
        new = self._package / "new"
        new.write_text(text)
        new.rename(self._package / file)

    @property
    def said(self) -> list[str]:
        path = self._package / "said"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def overlapped(self) -> bool:
        """Whether two threads were in one agent at a time."""
        return (self._package / "overlap").exists()
