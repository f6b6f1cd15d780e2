"""A backend that does what names tell it to, in whatever process it is opened in.

A record called `do/<what>/<argument>` has `exists`, `get` and `put` do it; all others are kept in a dictionary.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore_sdk import backend as sdk
from kvstore_sdk.backend import (
    Capabilities,
    ConfigError,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    ListEntry,
    ListPage,
    Put,
    PutResult,
    PutStatus,
    Region,
    UnavailableError,
    Usage,
)
from kvstore_sdk.isolation import in_child

_FOREVER_S = 3600.0


class Obeys:
    """In memory, with every optional surface."""

    def __init__(self, location: str, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.folder = Path(location)
        self.records: dict[str, bytes] = {}
        self.regions: list[int] = []
        self.over = threading.Event()
        self.kept: list[Any] = []
        self.closed = False

    def exists(self, names: Sequence[str], deadline: Deadline) -> Any:
        told = self._obey(names, deadline)
        return [name in self.records for name in names] if told is None else told

    def put(self, puts: Sequence[Put], deadline: Deadline) -> Any:
        told = self._obey([put.name for put in puts], deadline)
        if told is not None:
            return told
        for put in puts:
            self.records[put.name] = b"".join(bytes(part.view) for part in put.parts)
        return [PutResult(PutStatus.STORED) for _ in puts]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> Any:
        told = self._obey([get.name for get in gets], deadline)
        return [self._get(get) for get in gets] if told is None else told

    def delete(self, names: Sequence[str], deadline: Deadline) -> Any:
        told = self._obey(names, deadline)
        if told is not None:
            return told
        return [DeleteStatus.ABSENT if self.records.pop(name, None) is None else DeleteStatus.DELETED for name in names]

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> Any:
        told = self._obey([prefix], deadline)
        if told is not None:
            return told
        found = sorted(name for name in self.records if name.startswith(prefix) and name > (cursor or ""))
        page = found[:limit]
        return ListPage([ListEntry(name, len(self.records[name])) for name in page], page[-1] if len(found) > limit else None)

    def usage(self, deadline: Deadline) -> Any:
        return Usage(len(self.records), sum(map(len, self.records.values())))

    def settle(self, tickets: Sequence[Any], deadline: Deadline) -> Any:
        is_over = self.over.wait(deadline.remaining_s())
        return [is_over for _ in tickets]

    def register_region(self, region: Region) -> None:
        if (self.folder / "refuse regions").exists():
            raise UnavailableError("no region now")
        self.regions.append(region.size_bytes)

    def unregister_region(self, region: Region) -> None:
        self.regions.remove(region.size_bytes)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if (self.folder / "hang in close").exists():
            time.sleep(_FOREVER_S)
        (self.folder / "closed").touch()

    def _get(self, get: Get) -> GetResult:
        if get.name not in self.records:
            return GetResult(GetStatus.MISSING)
        record = self.records[get.name]
        if len(record) != get.size_bytes:
            return GetResult.wrong_size(len(record), get.size_bytes)
        for part in get.into:
            part.view[:], record = record[: part.length], record[part.length :]
        return GetResult(GetStatus.FOUND)

    def _obey(self, names: Sequence[str], deadline: Deadline) -> Any:
        for name in names:
            if name.startswith("do/"):
                _, what, *arguments = name.split("/")
                told = _DEEDS[what](self, len(names), *arguments)
                if told is not None:
                    return told
        return None


def _die(kept: Obeys, count: int) -> None:
    ctypes.string_at(0)


def _exit(kept: Obeys, count: int, code: str) -> None:
    os._exit(int(code))


def _system_exit(kept: Obeys, count: int) -> None:
    raise SystemExit(3)


def _hang(kept: Obeys, count: int) -> None:
    time.sleep(_FOREVER_S)


def _sleep(kept: Obeys, count: int, seconds: str) -> None:
    time.sleep(float(seconds))


def _busy(kept: Obeys, count: int, name: str, seconds: str) -> None:
    (kept.folder / name).touch()
    time.sleep(float(seconds))


def _wait_for_file(kept: Obeys, count: int, name: str) -> None:
    until_s = time.monotonic() + 100
    while not (kept.folder / name).exists() and time.monotonic() < until_s:
        time.sleep(0.01)


def _spin(kept: Obeys, count: int) -> None:
    while True:
        pass


def _hog(kept: Obeys, count: int) -> None:
    # A PyDLL keeps the lock of the interpreter during its calls.
    ctypes.PyDLL(None).sleep(int(_FOREVER_S))


def _leak(kept: Obeys, count: int, mib: str) -> None:
    kept.kept.append(b"\xaa" * (int(mib) << 20))


def _descriptors(kept: Obeys, count: int) -> None:
    try:
        while True:
            kept.kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        if len(kept.kept) > 5000:
            raise AssertionError("no bound") from error
        raise


def _raise(kept: Obeys, count: int, kind: str) -> None:
    raise getattr(sdk, kind)(f"told to raise {kind}")


def _raise_odd(kept: Obeys, count: int) -> None:
    class Odd(UnavailableError):
        def __str__(self) -> str:
            raise RuntimeError("has no text")

    raise Odd


def _fail(kept: Obeys, count: int, kind: str) -> Any:
    return [Failure(getattr(sdk, kind)("told to fail")) for _ in range(count)]


def _throttle(kept: Obeys, count: int) -> None:
    raise sdk.ThrottledError("slow down", 2.5)


def _write_to_parent(data: bytes) -> None:
    os.write(int(sys.argv[2]), data)


def _garbage(kept: Obeys, count: int) -> None:
    _write_to_parent(b"\x10\x00\x00\x00this is no JSON!!")
    time.sleep(_FOREVER_S)


def _oversized(kept: Obeys, count: int) -> None:
    _write_to_parent(b"\xff\xff\xff\x7f[1, true, ")
    time.sleep(_FOREVER_S)


def _unasked(kept: Obeys, count: int) -> None:
    _write_to_parent(b"\x16\x00\x00\x00[987654321,true,[true]]"[: 4 + 0x16])
    time.sleep(_FOREVER_S)


def _hang_up(kept: Obeys, count: int) -> None:
    with socket.socket(fileno=os.dup(int(sys.argv[2]))) as line:
        line.shutdown(socket.SHUT_RDWR)
    time.sleep(_FOREVER_S)


def _short(kept: Obeys, count: int) -> Any:
    return []


def _odd_type(kept: Obeys, count: int) -> Any:
    return [object() for _ in range(count)]


def _odd_list(kept: Obeys, count: int) -> Any:
    class Odd(list[Any]):
        def __len__(self) -> int:
            raise RuntimeError("has no length")

    return Odd()


def _flood(kept: Obeys, count: int, number: str) -> None:
    for place in range(int(number)):
        logging.getLogger("vendor").warning("flood %d \x1b[31m\n%s", place, "x" * 5000)


def _say(kept: Obeys, count: int, text: str) -> None:
    logging.getLogger("vendor").warning("says %s", text)
    sys.stdout.write(f"printed {text}\n")


def _name_of_logger(kept: Obeys, count: int) -> None:
    logging.getLogger("evil\nERROR:root:fire\x1b[2J\udc80").warning("hi")


def _in_doubt_put(kept: Obeys, count: int) -> Any:
    return [PutResult(PutStatus.IN_DOUBT, None, ("ticket", place)) for place in range(count)]


def _in_doubt_get(kept: Obeys, count: int) -> Any:
    return [GetResult(GetStatus.IN_DOUBT, None, object()) for place in range(count)]


def _settle_now(kept: Obeys, count: int) -> None:
    kept.over.set()


def _grandchild(kept: Obeys, count: int) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    (kept.folder / "grandchild").write_text(str(child.pid))


def _fork(kept: Obeys, count: int) -> None:
    pid = os.fork()
    if pid == 0:
        logging.getLogger("vendor").warning("from the fork")
        held = [name for name in os.listdir("/proc/self/fd") if "kvstore" in _target(name)]
        time.sleep(0.2)
        os._exit(len(held))
    (kept.folder / "held").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _note_process(kept: Obeys, count: int) -> None:
    import resource

    facts = {
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "session": os.getsid(0) == os.getpid(),
        "in_child": in_child(),
        "regions": kept.regions,
        "folder": os.getcwd(),
    }
    (kept.folder / "facts").write_text(repr(facts))


_DEEDS: dict[str, Callable[..., Any]] = {
    "die": _die,
    "exit": _exit,
    "system_exit": _system_exit,
    "hang": _hang,
    "sleep": _sleep,
    "busy": _busy,
    "wait": _wait_for_file,
    "spin": _spin,
    "hog": _hog,
    "leak": _leak,
    "descriptors": _descriptors,
    "raise": _raise,
    "raise_odd": _raise_odd,
    "fail": _fail,
    "throttle": _throttle,
    "garbage": _garbage,
    "oversized": _oversized,
    "unasked": _unasked,
    "hang_up": _hang_up,
    "short": _short,
    "odd_type": _odd_type,
    "odd_list": _odd_list,
    "flood": _flood,
    "say": _say,
    "log_name": _name_of_logger,
    "in_doubt_put": _in_doubt_put,
    "in_doubt_get": _in_doubt_get,
    "settle_now": _settle_now,
    "grandchild": _grandchild,
    "fork": _fork,
    "note": _note_process,
}


def open_obeys(location: str, *, workers: int = 4, in_doubt: bool = False, secret_key: str = "") -> Obeys:
    """`secret_key` is for tests that look where it shows."""
    return Obeys(location, Capabilities(max_record_bytes=1 << 20, max_parts=4, max_concurrency=workers, in_doubt=in_doubt))


def open_changes(location: str) -> Obeys:
    """Another backend each time."""
    file = Path(location, "opened")
    number = int(file.read_text()) if file.exists() else 0
    file.write_text(str(number + 1))
    return Obeys(location, Capabilities(max_record_bytes=1000 + number, max_concurrency=4))


def open_flaky(location: str, *, workers: int = 4) -> Obeys:
    """Opens once, and never again."""
    file = Path(location, "opened")
    if file.exists():
        raise UnavailableError("the store does not open again")
    file.touch()
    return Obeys(location, Capabilities(max_record_bytes=1000, max_concurrency=workers))


def open_wrong(location: str) -> Obeys:
    raise ConfigError("backend wrong", "location", "is no place")


def open_throws(location: str) -> Obeys:
    raise RuntimeError("a bug of the vendor")


def open_dies(location: str) -> Obeys:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def open_hangs_up(location: str) -> Obeys:
    """Lives on, and opens nothing."""
    os.close(int(sys.argv[2]))
    time.sleep(_FOREVER_S)
    raise AssertionError


def open_lies(location: str) -> Obeys:
    _write_to_parent(b"\x0c\x00\x00\x00[[],true,{}]")
    time.sleep(_FOREVER_S)
    raise AssertionError


def open_lies_again(location: str) -> Obeys:
    """Opens, and from then on says something else; until the file is gone."""
    file = Path(location, "opened")
    if file.exists():
        return open_lies(location)
    file.touch()
    return open_obeys(location)


def open_exits(location: str) -> Obeys:
    raise SystemExit(5)


class Plain:
    """Only what must be there."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(max_record_bytes=1000)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        return [False for _ in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        return [PutResult(PutStatus.STORED) for _ in puts]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        return [GetResult(GetStatus.MISSING) for _ in gets]

    def close(self) -> None:
        pass


def open_plain(location: str) -> Plain:
    return Plain()
