"""A copy that is killed, or whose stores fail: what arrived is whole, and the next run goes on from there."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from damage import Filled, fill
from fault_proxy import FaultProxy
from places import SECRET_VARIABLE, Bucket, Place
from proxy_faults import Fault, ResetAfterBody, ResetInsideBody, ResetInsideRequest, WrongBytes, slow_down
from s3_server import SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import Deadline, Fork, GetResult, GetStatus, Mode, PutResult, PutStatus, TimedOutError
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tools.copy import Copy, Outcome
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.writing import Writer
from kvstore_sdk_backends.memory import open_memory

LIMIT_S = 60.0
KILLS = 4


def everything(filled: Filled) -> dict[str, bytes]:
    return filled.records | filled.manifests


def start_copy(source: Place, destination: Place) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvstore_sdk", "copy", source.url, destination.url, "--threads", "3"]
    command += [*source.arguments(), *destination.arguments("--to-option")]
    environment = {**os.environ, SECRET_VARIABLE: SECRET_ACCESS_KEY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


@pytest.fixture(params=["fs", "s3"])
def destination(request: pytest.FixtureRequest) -> Place:
    made: Place = request.getfixturevalue({"fs": "make_folder", "s3": "make_bucket"}[request.param])()
    return made


def test_killed_at_any_point_a_copy_leaves_whole_records_and_is_completed_by_the_next(
    make_folder: Callable[[], Place], destination: Place
) -> None:
    """No reader of the destination ever sees a part of a record."""
    source = make_folder()
    filled = fill(source.tree, chunks=20, payloads=(100_000, 3000))
    wanted = everything(filled)
    chance = random.Random(6)
    killed = 0
    for kill in range(1, KILLS + 1):
        # Somewhere in this part of what is to be copied.
        enough = len(wanted) * (kill - 1 + chance.random()) / (KILLS + 1)
        process = start_copy(source, destination)
        try:
            end_s = time.monotonic() + LIMIT_S
            while len(destination.tree.names()) < enough and process.poll() is None and time.monotonic() < end_s:
                time.sleep(chance.uniform(0.0, 0.005))
            killed += process.poll() is None
        finally:
            process.kill()
            process.communicate(timeout=LIMIT_S)
        for name in destination.tree.names():
            assert destination.tree.read(name) == wanted[name], f"after kill {kill}"
    assert killed, "every run was over before it was killed"
    process = start_copy(source, destination)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert {name: destination.tree.read(name) for name in destination.tree.names()} == wanted


def test_an_interrupt_from_the_keyboard_ends_it_with_whole_records(make_folder: Callable[[], Place]) -> None:
    source, destination = make_folder(), make_folder()
    filled = fill(source.tree, chunks=100, payloads=(200_000,))
    process = start_copy(source, destination)
    try:
        end_s = time.monotonic() + LIMIT_S
        while len(destination.tree.names()) < 5 and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert process.returncode in (0, 130), out
    assert b"Traceback" not in out
    wanted = everything(filled)
    assert all(destination.tree.read(name) == wanted[name] for name in destination.tree.names())


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    made = FaultProxy(s3_server.endpoint)
    yield made
    made.stop()


@pytest.mark.parametrize("way", ["from", "to"])
def test_a_bucket_that_fails_now_and_then_is_copied_whole(
    make_bucket: Callable[[], Place], make_folder: Callable[[], Place], proxy: FaultProxy, way: str
) -> None:
    bucket, folder = make_bucket(), make_folder()
    behind = Bucket(bucket.url, bucket.tree, bucket.options | {"endpoint": proxy.endpoint, "request_retries": "0"})
    source, destination = (behind, folder) if way == "from" else (folder, behind)
    filled = fill(source.tree)
    first, second = source.open(), destination.open()
    try:
        for kind in (slow_down(), ResetInsideBody(5000), ResetInsideRequest(), ResetAfterBody(), WrongBytes(3)):
            verb = "PUT" if isinstance(kind, ResetInsideRequest | ResetAfterBody) else "GET"
            proxy.script(Fault(kind, verb, "-g", times=2))
        outcomes = [item.outcome for item in Copy(first, second, Retry(timeout_s=20.0), threads=2)]
    finally:
        first.close()
        second.close()
    # What came as other bytes than were stored was not copied; the next run finds it good.
    assert set(outcomes) <= {Outcome.COPIED, Outcome.THERE, Outcome.CORRUPT}
    assert outcomes.count(Outcome.CORRUPT) <= 2
    first, second = source.open(), destination.open()
    try:
        assert {item.outcome for item in Copy(first, second, Retry(timeout_s=20.0))} <= {Outcome.COPIED, Outcome.THERE}
    finally:
        first.close()
        second.close()
    assert {name: destination.tree.read(name) for name in destination.tree.names()} == everything(filled)


def test_a_source_that_is_gone_ends_the_copy(make_folder: Callable[[], Place]) -> None:
    """Not one error after another for each of a million records."""
    source, destination = make_folder(), make_folder()
    fill(source.tree, chunks=30)

    class Dead(BackendWrapper):
        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            if op == "get" and items[0].name.endswith(("-g0", "-g1")):
                return [GetResult(GetStatus.TIMED_OUT)]
            return proceed(items)

    first, second = source.open(), destination.open()
    items = []
    try:
        with pytest.raises(Exception, match="copy: the source fails"):
            items.extend(Copy(Dead(first), second, Retry(timeout_s=1.0, tries=1), threads=2))
    finally:
        first.close()
        second.close()
    assert not [name for name in destination.tree.names() if "-g" in name]


class Doubtful(BackendWrapper):
    """Answers the first put IN_DOUBT, reads its buffer only later, and settles when it has."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: list[Any] = []
        self.settled = False
        self.settle = self._settle_it

    @property
    def capabilities(self) -> Any:
        return dataclasses.replace(self.inner.capabilities, in_doubt=True, fork=Fork.REFUSES)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "put" and not self.held:
            self.held = list(items)
            return [PutResult(PutStatus.IN_DOUBT, ticket=1)]
        return proceed(items)

    def _settle_it(self, tickets: Sequence[Any], deadline: Deadline) -> list[bool]:
        return [self.settled for _ in tickets]


def test_memory_of_a_put_that_is_in_doubt_is_not_used_for_the_next() -> None:
    inner = open_memory("")
    backend = Doubtful(inner)
    writer = Writer(backend, Retry(timeout_s=20.0, tries=1))
    with pytest.raises(TimedOutError):
        writer.write("v1/a", b"a" * 4096, Mode.CREATE)
    assert writer.write("v1/b", b"b" * 4096, Mode.CREATE)
    # The late read of the first put still finds its own bytes.
    inner.put(backend.held, Deadline.after(20.0))
    sizes = {entry.name: entry.size_bytes for entry in inner.list("", Deadline.after(20.0)).entries}
    assert sizes == {"v1/a": 4096, "v1/b": 4096}
    assert bytes(backend.held[0].parts[0].view) == b"a" * 4096
    backend.settled = True
    writer.close()
    inner.close()


def test_a_put_whose_answer_was_lost_is_repeated() -> None:
    answers = [PutResult(PutStatus.UNKNOWN), PutResult(PutStatus.TIMED_OUT)]

    class Lossy(BackendWrapper):
        def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
            found = proceed(items)
            return [answers.pop()] if op == "put" and answers else found

    inner = open_memory("")
    writer = Writer(Lossy(inner), Retry(timeout_s=20.0, tries=3))
    # The first attempt did it, so the last one finds it there.
    assert writer.write("v1/a", b"a" * 4096, Mode.CREATE) is False
    writer.close()
    inner.close()
