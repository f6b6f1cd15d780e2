"""What the conformance suite cannot know: this server stopped, paused, full, read-only, and asking for passwords."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvstore_sdk.backend import (
    BackendError,
    ClosedError,
    ConfigError,
    Deadline,
    DeleteStatus,
    DeniedError,
    Failure,
    Get,
    GetStatus,
    InvalidError,
    Mode,
    NoSpaceError,
    Put,
    PutStatus,
    ReadOnlyError,
    Region,
    TimedOutError,
    UnavailableError,
    backend_options,
    open_backend,
)
from redis_server import RedisServer, redis_server

from acme_redis import AcmeRedisBackend

SECRET = "hunter2-and-more"
SLACK_S = 1.0  # of a machine that is busy with something else


def open_here(server: RedisServer, prefix: str = "kv", **options: object) -> AcmeRedisBackend:
    backend = open_backend(f"{server.url}/{prefix}", options)
    assert isinstance(backend, AcmeRedisBackend)
    return backend


def soon() -> Deadline:
    return Deadline.after(10.0)


def put_one(backend: AcmeRedisBackend, region: Region, name: str, record: bytes, mode: Mode = Mode.CREATE) -> PutStatus:
    buffer = region.buffer(0, len(record))
    buffer.view[:] = record
    [result] = backend.put([Put(name, [buffer], mode)], soon())
    return result.status


def get_one(backend: AcmeRedisBackend, region: Region, name: str, size_bytes: int) -> bytes | GetStatus:
    buffer = region.buffer(4096, size_bytes)
    [result] = backend.get([Get(name, [buffer])], soon())
    return bytes(buffer.view) if result.status is GetStatus.FOUND else result.status


def test_what_one_stores_another_finds_and_no_other_prefix_does(shared_server: RedisServer, region: Region) -> None:
    one, other, apart = (open_here(shared_server, prefix) for prefix in ("a/b", "a/b", "a"))
    assert put_one(one, region, "c/d", b"first") is PutStatus.STORED
    assert get_one(other, region, "c/d", 5) == b"first"
    assert put_one(other, region, "c/d", b"other") is PutStatus.EXISTS
    assert get_one(one, region, "c/d", 5) == b"first"
    assert put_one(other, region, "c/d", b"longer", Mode.REPLACE) is PutStatus.STORED
    assert get_one(one, region, "c/d", 6) == b"longer"
    assert apart.exists(["c/d", "b/c/d"], soon()) == [False, False]
    assert one.delete(["c/d", "c/d"], soon()) == [DeleteStatus.DELETED, DeleteStatus.ABSENT]
    assert get_one(other, region, "c/d", 6) is GetStatus.MISSING
    for backend in (one, other, apart):
        backend.close()


def test_a_record_of_another_size_is_not_read(shared_server: RedisServer, region: Region) -> None:
    backend = open_here(shared_server)
    put_one(backend, region, "sized", b"x" * 100)
    for asked_bytes in (1, 99, 101, 4096):
        [result] = backend.get([Get("sized", [region.buffer(0, asked_bytes)])], soon())
        assert (result.status, result.size_bytes, result.asked_bytes) == (GetStatus.WRONG_SIZE, 100, asked_bytes)
    backend.close()


def test_a_batch_answers_in_order_and_refuses_bad_names_alone(shared_server: RedisServer, region: Region) -> None:
    backend = open_here(shared_server, "batch")
    names = [f"n{i}" for i in range(62)]
    buffers = [region.buffer(i * 4096, 4096) for i in range(62)]
    for i, buffer in enumerate(buffers):
        buffer.view[:] = bytes([i]) * 4096
    results = backend.put([Put("../up", [buffers[0]]), *map(Put, names, ([b] for b in buffers)), Put("a:b", [buffers[0]])], soon())
    assert [result.status for result in results] == [PutStatus.FAILED, *[PutStatus.STORED] * 62, PutStatus.FAILED]
    assert isinstance(results[0].error, InvalidError)
    region.view[:] = bytes(region.size_bytes)
    found = backend.get([Get(name, [buffer]) for name, buffer in zip(names, reversed(buffers), strict=True)], soon())
    assert {result.status for result in found} == {GetStatus.FOUND}
    assert [bytes(buffer.view) for buffer in reversed(buffers)] == [bytes([i]) * 4096 for i in range(62)]
    backend.close()


def test_as_many_threads_as_declared_get_their_own_bytes(shared_server: RedisServer, region: Region) -> None:
    backend = open_here(shared_server, "threads")
    workers = backend.capabilities.max_concurrency
    share = region.size_bytes // workers

    def work(worker: int) -> None:
        rng = random.Random(worker)
        buffer = region.buffer(worker * share, share)
        for turn in range(10):
            record = rng.randbytes(share)
            buffer.view[:] = record
            assert backend.put([Put(f"{worker}/{turn}", [buffer])], soon())[0].status is PutStatus.STORED
            buffer.view[:] = bytes(share)
            assert backend.get([Get(f"{worker}/{turn}", [buffer])], soon())[0].status is GetStatus.FOUND
            assert buffer.view == record

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    backend.close()


def test_a_server_that_was_restarted_is_used_again_by_the_next_call(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    assert put_one(backend, region, "a", b"old") is PutStatus.STORED
    server.stop()
    server.start()
    assert put_one(backend, region, "b", b"new") is PutStatus.STORED
    assert backend.exists(["a", "b"], soon()) == [False, True]
    backend.close()


def test_a_server_that_is_gone_is_unavailable_at_once(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    put_one(backend, region, "a", b"record")
    server.stop()
    for _ in range(2):
        [exists] = backend.exists(["a"], soon())
        [put] = backend.put([Put("a", [region.buffer(0, 6)])], soon())
        [got] = backend.get([Get("a", [region.buffer(0, 6)])], soon())
        assert isinstance(exists, Failure)
        assert type(exists.error) is UnavailableError
        assert (put.status, type(put.error)) == (PutStatus.FAILED, UnavailableError)  # it never left: definite
        assert (got.status, type(got.error)) == (GetStatus.FAILED, UnavailableError)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1"):
        open_here(server)
    backend.close()


def test_the_deadline_holds_while_the_server_hangs(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    large = region.buffer(0, region.size_bytes)  # more than the sockets hold: sending it hangs
    server.pause()

    def call_all() -> Iterator[object]:
        yield backend.put([Put("a", [large])], Deadline.after(0.3))[0].status
        yield backend.get([Get("a", [large])], Deadline.after(0.3))[0].status
        for failure in (backend.exists(["a"], Deadline.after(0.3))[0], backend.delete(["a"], Deadline.after(0.3))[0]):
            yield isinstance(failure, Failure) and type(failure.error)

    began = time.monotonic()
    # The put had a connection and may have left, nobody can tell. Those after it find none and get none.
    assert list(call_all()) == [PutStatus.UNKNOWN, GetStatus.TIMED_OUT, TimedOutError, TimedOutError]
    assert list(call_all()) == [PutStatus.TIMED_OUT, GetStatus.TIMED_OUT, TimedOutError, TimedOutError]
    assert time.monotonic() - began < 8 * 0.3 + SLACK_S
    server.resume()
    assert put_one(backend, region, "b", b"record") is PutStatus.STORED
    assert backend.put([Put("c", [large])], Deadline.after(0.0))[0].status is PutStatus.TIMED_OUT
    assert backend.exists(["b", "c"], soon()) == [True, False]
    backend.close()


@pytest.fixture
def trickle() -> Iterator[int]:
    """The port of a server that answers anything with a long string, bit by bit, and is never silent."""
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.sendall(b"$10000000\r\n")
            with contextlib.suppress(OSError):
                while not stop.wait(0.01):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        thread = threading.Thread(target=serve, args=(listener,), name="trickle")
        thread.start()
        yield listener.getsockname()[1]
        stop.set()
        thread.join(20.0)
        assert not thread.is_alive()


def test_the_deadline_holds_while_an_answer_trickles_in(trickle: int) -> None:
    began = time.monotonic()
    with pytest.raises(TimedOutError):
        open_backend(f"acmeredis://127.0.0.1:{trickle}/0/kv", {"open_timeout_s": 0.3})
    assert 0.3 <= time.monotonic() - began < 0.3 + SLACK_S


def test_close_ends_a_call_that_hangs(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    server.pause()
    with ThreadPoolExecutor(2) as pool:
        get = pool.submit(backend.get, [Get("a", [region.buffer(0, 4096)])], Deadline.after(60.0))
        put = pool.submit(backend.put, [Put("b", [region.buffer(4096, 4096)])], Deadline.after(60.0))
        time.sleep(0.2)
        began = time.monotonic()
        backend.close()
        [got], [stored] = get.result(10.0), put.result(10.0)
        assert time.monotonic() - began < SLACK_S
    assert got.status is GetStatus.CLOSED
    assert stored.status in (PutStatus.UNKNOWN, PutStatus.CLOSED)
    backend.close()
    [late] = backend.exists(["a"], soon())
    assert isinstance(late, Failure)
    assert isinstance(late.error, ClosedError)
    assert "exists a at 127.0.0.1" in str(late.error)
    assert late.error.__traceback__ is None
    assert backend.put([Put("b", [region.buffer(0, 1)])], soon())[0].status is PutStatus.CLOSED


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_ends_no_call_of_its_parent(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    put_one(backend, region, "a", b"record")
    server.pause()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(get_one, backend, region, "a", 6)
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            try:
                [answer] = backend.exists(["a"], Deadline.after(5.0))
                backend.close()
                os._exit(0 if isinstance(answer, Failure) and isinstance(answer.error, ClosedError) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        server.resume()
        assert running.result(10.0) == b"record"
    backend.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["maxmemory 1mb"], NoSpaceError),
        (["replicaof 127.0.0.1 1"], ReadOnlyError),
        (["user default on nopass ~* +@read +@connection"], DeniedError),
    ],
    ids=["full", "replica", "reader"],
)
def test_a_refused_put_is_definite_and_says_what_to_do(
    tmp_path: Path, region: Region, settings: list[str], error: type[BackendError]
) -> None:
    with redis_server(tmp_path, *settings) as server:
        backend = open_here(server)
        [result] = backend.put([Put("a", [region.buffer(0, 2 << 20)])], soon())
        assert (result.status, type(result.error)) == (PutStatus.FAILED, error)
        assert "put a at 127.0.0.1" in str(result.error)
        assert backend.exists(["a"], soon()) == [False]
        backend.close()


def test_the_password_opens_and_is_shown_nowhere(tmp_path: Path, region: Region) -> None:
    settings = [f"requirepass {SECRET}", f"user kv on >{SECRET} ~kv:* +@read +@write +@connection"]
    with redis_server(tmp_path, *settings) as server:
        for options in ({"password": SECRET}, {"username": "kv", "password": SECRET}):
            backend = open_here(server, **options)
            assert put_one(backend, region, "a", b"record") is PutStatus.STORED
            assert get_one(backend, region, "a", 6) == b"record"
            assert backend.delete(["a"], soon()) == [DeleteStatus.DELETED]
            assert SECRET not in repr(backend)
            backend.close()
        for options in ({}, {"password": f"not-{SECRET}"}, {"username": "nobody", "password": SECRET}):
            with pytest.raises(DeniedError) as caught:
                open_here(server, **options)
            assert_hidden(caught.value)
    assert backend_options("acmeredis")["password"].secret


def test_the_password_is_not_shown_by_a_server_that_repeats_it(tmp_path: Path) -> None:
    with redis_server(tmp_path, 'rename-command AUTH ""') as server:
        with pytest.raises(BackendError) as caught:
            open_here(server, password=SECRET)
        assert "AUTH" in str(caught.value)
        assert_hidden(caught.value)


def assert_hidden(error: BaseException | None) -> None:
    seen = 0
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error, seen = error.__cause__ or error.__context__, seen + 1
        assert seen < 10


def test_an_error_keeps_no_buffer_alive(server: RedisServer, region: Region) -> None:
    backend = open_here(server)
    server.stop()
    [result] = backend.put([Put("a", [region.buffer(0, 4096)])], soon())
    assert result.error is not None
    assert (result.error.__traceback__, result.error.__cause__, result.error.__context__) == (None, None, None)
    backend.close()


@pytest.mark.parametrize(
    "location",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:6379",
        "127.0.0.1:6379/0",
        "127.0.0.1:6379/0/../up",
        "127.0.0.1:99999/0/kv",
        "me:hunter2@127.0.0.1:6379/0/kv",
    ],
)
def test_a_location_of_another_form_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port/db/prefix") as caught:
        open_backend("acmeredis", location=location)
    assert "hunter2" not in str(caught.value)
