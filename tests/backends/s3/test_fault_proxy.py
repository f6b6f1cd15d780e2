"""The proxy does what a test scripts, to what it scripts, and counts right: else a test of faults would test nothing."""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from fault_proxy import FaultProxy
from proxy_faults import (
    Bandwidth,
    Delay,
    Fault,
    LongBody,
    NeverAnswers,
    ResetAfterBody,
    ResetBefore,
    ResetInsideBody,
    ResetInsideRequest,
    ShortBody,
    Status,
    WrongBytes,
    clock_skew,
    expired_token,
    slow_down,
)
from s3_server import S3Server

BODY = random.Random(5).randbytes(200_000)
PATIENCE_S = 10.0
# No server here checks it, but without one it takes the caller for the public.
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"}


class Wire:
    """One connection to the proxy, as plain as Python has it. It is opened again when it was lost."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        assert where.hostname
        self.connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
        self.connection.connect()

    def ask(self, verb: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        named = SIGNED | {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self.connection.request(verb, path, body, named)
            answer = self.connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            return error


@pytest.fixture
def dial() -> Iterator[Callable[[str], Wire]]:
    """Connects, and closes in the end."""
    made: list[Wire] = []

    def connect(endpoint: str) -> Wire:
        made.append(Wire(endpoint))
        return made[-1]

    yield connect
    for one in made:
        one.connection.close()


@pytest.fixture
def wire(proxy: FaultProxy, dial: Callable[[str], Wire]) -> Wire:
    return dial(proxy.endpoint)


@pytest.fixture
def path(s3_server: S3Server, bucket: str) -> str:
    """Of an object that is there."""
    s3_server.client().put_object(Bucket=bucket, Key="a b/object", Body=BODY)
    return f"/{bucket}/a%20b/object"


def test_what_is_not_scripted_passes_unchanged_over_one_connection(wire: Wire, proxy: FaultProxy, path: str, s3_server: S3Server) -> None:
    socket = wire.connection.sock
    status, body, headers = wire.ask("GET", path)
    assert (status, body, headers["content-length"]) == (200, BODY, str(len(BODY)))
    assert wire.ask("HEAD", path)[0] == 200
    assert wire.ask("HEAD", path)[2]["content-length"] == str(len(BODY))
    assert wire.ask("PUT", f"{path}2", BODY[:70_001])[0] == 200
    assert wire.ask("PUT", f"{path}3", b"")[0] == 200
    assert wire.ask("GET", f"{path}2")[1] == BODY[:70_001]
    assert wire.ask("GET", f"{path}3")[:2] == (200, b"")
    assert wire.ask("DELETE", f"{path}3")[0] == 204
    assert wire.ask("GET", f"{path}3")[0] == 404
    assert wire.connection.sock is socket
    assert [(seen.method, seen.status, seen.kind) for seen in proxy.requests] == [
        ("GET", 200, None), ("HEAD", 200, None), ("HEAD", 200, None), ("PUT", 200, None), ("PUT", 200, None), ("GET", 200, None),
        ("GET", 200, None), ("DELETE", 204, None), ("GET", 404, None),
    ]  # fmt: skip


def test_a_request_is_recorded_as_it_arrived(wire: Wire, proxy: FaultProxy, path: str, bucket: str) -> None:
    before_s = time.monotonic()
    wire.ask("PUT", f"{path}?x-id=PutObject", b"12345", If_None_Match="*")
    wire.ask("GET", f"/{bucket}?list-type=2&prefix=a")
    put, listing = proxy.requests
    assert (put.path, put.query, put.target) == (f"/{bucket}/a b/object", "x-id=PutObject", f"{path}?x-id=PutObject")
    assert (put.headers["authorization"], put.headers["if-none-match"]) == (SIGNED["Authorization"], "*")
    assert (put.status, put.body_bytes, put.sent_bytes) == (412, 5, put.sent_bytes)
    assert before_s < put.at_s < put.ended_s < time.monotonic()
    assert (put.lists, listing.lists) == (False, True)
    proxy.reset()
    assert (proxy.requests, proxy.peak) == ([], 0)


def test_a_body_that_waits_for_leave_or_comes_in_chunks_arrives_whole(proxy: FaultProxy, path: str, wire: Wire) -> None:
    wire.connection.putrequest("PUT", path)
    for name, value in (("Expect", "100-continue"), ("Transfer-Encoding", "chunked"), *SIGNED.items()):
        wire.connection.putheader(name, value)
    wire.connection.endheaders()
    for piece in (BODY[:1000], BODY[1000:90_000], b""):
        wire.connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    answer = wire.connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    assert wire.ask("GET", path)[1] == BODY[:90_000]
    assert proxy.requests[0].body_bytes == 90_000


@pytest.mark.parametrize("kind", [slow_down(), slow_down(1.5), Status(500), clock_skew(), expired_token(), Status(403, "AccessDenied")])
def test_a_status_is_answered_without_the_server(wire: Wire, proxy: FaultProxy, path: str, kind: Status) -> None:
    socket = wire.connection.sock
    proxy.script(Fault(kind, times=3))
    status, body, headers = wire.ask("GET", path)
    assert (status, f"<Code>{kind.code}</Code>".encode() in body) == (kind.status, True)
    assert headers.get("retry-after") == (None if kind.retry_after is None else f"{kind.retry_after:g}")
    assert wire.ask("HEAD", path)[:2] == (kind.status, b"")
    assert wire.ask("PUT", path, b"other")[0] == kind.status
    assert wire.ask("GET", path)[:2] == (200, BODY)
    assert wire.connection.sock is socket


def test_a_fault_hits_the_verb_the_name_and_the_number_that_it_says(wire: Wire, proxy: FaultProxy, path: str) -> None:
    wire.ask("PUT", f"{path}2", b"x")
    proxy.script(Fault(Status(500), "GET", "object2", 2), Fault(Status(503), "GET", "a b/object2", 1), Fault(Status(403), "HEAD"))
    assert [wire.ask("GET", f"{path}{tail}")[0] for tail in ("", "2", "", "2", "2", "2")] == [200, 500, 200, 500, 503, 200]
    assert [wire.ask(verb, path)[0] for verb in ("HEAD", "HEAD", "PUT")] == [403, 403, 200]
    proxy.heal()
    assert wire.ask("HEAD", path)[0] == 200


@pytest.mark.parametrize(
    ("kind", "stored"), [(ResetBefore(), False), (ResetInsideRequest(), False), (ResetAfterBody(), True)], ids=lambda kind: str(kind)
)
def test_a_put_that_is_reset_is_done_or_not_as_its_kind_says(wire: Wire, proxy: FaultProxy, path: str, kind: Any, stored: bool) -> None:
    proxy.script(Fault(kind, "PUT", times=1))
    assert isinstance(wire.ask("PUT", f"{path}2", BODY), ConnectionError)
    assert wire.ask("GET", f"{path}2")[0] == (200 if stored else 404)
    assert [seen.status for seen in proxy.requests] == [0, 200 if stored else 404]


@pytest.mark.parametrize("after_bytes", [0, 1, 65_537, 199_999])
def test_a_body_that_is_reset_ends_where_its_kind_says(wire: Wire, proxy: FaultProxy, path: str, after_bytes: int) -> None:
    proxy.script(Fault(ResetInsideBody(after_bytes), "GET"))
    wire.connection.request("GET", path, headers=SIGNED)
    answer = wire.connection.getresponse()
    assert answer.getheader("content-length") == str(len(BODY))
    assert answer.read(after_bytes) == BODY[:after_bytes]
    with pytest.raises(ConnectionResetError):
        answer.read(1)
    answer.close()


def test_a_short_body_says_so_or_just_ends(wire: Wire, proxy: FaultProxy, path: str) -> None:
    proxy.script(Fault(ShortBody(10, told=True), "GET", times=1), Fault(ShortBody(10), "GET", times=1))
    assert wire.ask("GET", path)[1] == BODY[:-10]
    error = wire.ask("GET", path)
    assert isinstance(error, http.client.IncompleteRead)
    assert (error.partial, error.expected) == (BODY[:-10], 10)
    assert wire.ask("GET", path)[1] == BODY


def test_a_long_body_says_so(wire: Wire, proxy: FaultProxy, path: str) -> None:
    proxy.script(Fault(LongBody(3), "GET", times=1))
    assert wire.ask("GET", path)[1] == BODY + bytes(3)
    assert wire.ask("GET", path)[1] == BODY


def test_wrong_bytes_are_as_many_as_scripted_and_the_same_for_a_seed(s3_server: S3Server, path: str) -> None:
    spoilt = []
    for seed in (1, 1, 2):
        with behind(s3_server, seed) as (proxy, connection):
            proxy.script(Fault(WrongBytes(3), "GET"))
            connection.request("GET", path, headers=SIGNED)
            spoilt.append(connection.getresponse().read())
    assert [sum(map(int.__ne__, body, BODY)) for body in spoilt] == [3, 3, 3]
    assert spoilt[0] == spoilt[1] != spoilt[2]


def test_what_never_answers_holds_until_it_is_healed(wire: Wire, dial: Callable[[str], Wire], proxy: FaultProxy, path: str) -> None:
    proxy.script(Fault(NeverAnswers(), "GET"), Fault(NeverAnswers(done=True), "PUT"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(wire.ask, "GET", path), pool.submit(dial(proxy.endpoint).ask, "PUT", f"{path}2", b"x")]
        assert not concurrent.futures.wait(asked, 0.3).done
        assert dial(proxy.endpoint).ask("HEAD", f"{path}2")[0] == 200
        proxy.heal()
        assert all(isinstance(future.result(PATIENCE_S), ConnectionError) for future in asked)
    assert wire.ask("GET", path)[1] == BODY


def test_a_delay_is_of_the_answer_and_ends_when_it_is_healed(wire: Wire, dial: Callable[[str], Wire], proxy: FaultProxy, path: str) -> None:
    proxy.script(Fault(Delay(0.3), "GET", times=1), Fault(Delay(60.0), "PUT", times=1))
    assert wire.ask("GET", path)[1] == BODY
    [seen] = proxy.requests
    assert 0.3 <= seen.ended_s - seen.at_s < 20.0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(wire.ask, "PUT", f"{path}2", b"x")
        wait_for(lambda: len(proxy.requests) == 2)
        assert dial(proxy.endpoint).ask("HEAD", path)[0] == 200
        assert not late.done()
        proxy.heal()
        assert late.result(PATIENCE_S)[0] == 200


def test_bandwidth_limits_both_directions(wire: Wire, proxy: FaultProxy, path: str) -> None:
    proxy.script(Fault(Bandwidth(1e6)))
    assert wire.ask("GET", path)[1] == BODY
    assert wire.ask("PUT", path, BODY)[0] == 200
    assert all(seen.ended_s - seen.at_s >= 0.2 for seen in proxy.requests)


def test_the_peak_counts_what_is_on_the_way_at_the_same_time(proxy: FaultProxy, dial: Callable[[str], Wire], path: str) -> None:
    wires = [dial(proxy.endpoint) for _ in range(7)]
    proxy.script(Fault(Delay(60.0)))
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(wire.ask, verb, path) for wire, verb in zip(wires, itertools.cycle(["GET", "HEAD"]), strict=False)]
        wait_for(lambda: proxy.peak == 7)
        assert (proxy.peak_of("GET"), proxy.peak_of("HEAD"), proxy.peak_of("PUT")) == (4, 3, 0)
        proxy.heal()
        assert {future.result(PATIENCE_S)[0] for future in asked} == {200}
    proxy.reset()
    for wire in wires:
        assert wire.ask("GET", path)[1] == BODY
    assert proxy.peak == 1


def test_a_server_that_restarts_is_met_again_over_the_same_connection() -> None:
    server = S3Server()
    try:
        with behind(server) as (_, connection):
            server.make_bucket("kept")
            server.client().put_object(Bucket="kept", Key="k", Body=BODY)
            before = server.pid
            for _ in range(2):
                connection.request("GET", "/kept/k", headers=SIGNED)
                assert connection.getresponse().read() == BODY
                server.restart()
            assert server.pid != before
            server.restart(keep=False)
            connection.request("GET", "/kept/k", headers=SIGNED)
            answer = connection.getresponse()
            assert (answer.status, b"NoSuchBucket" in answer.read()) == (404, True)
            server.stop()
            connection.request("GET", "/kept/k", headers=SIGNED)
            with pytest.raises(ConnectionError):
                connection.getresponse()
    finally:
        server.stop()


def test_of_racing_creates_the_server_takes_one(s3_server: S3Server, dial: Callable[[str], Wire], bucket: str) -> None:
    """What moto by itself does not: see s3_server.py."""
    wires = [dial(s3_server.endpoint) for _ in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for turn in range(5):
            asked = [pool.submit(wire.ask, "PUT", f"/{bucket}/{turn}", BODY[:9999], If_None_Match="*") for wire in wires]
            assert sorted(future.result(PATIENCE_S)[0] for future in asked) == [200, *[412] * 15]


@contextmanager
def behind(server: S3Server, seed: int = 0) -> Iterator[tuple[FaultProxy, http.client.HTTPConnection]]:
    """A proxy of its own, and a connection to it."""
    proxy = FaultProxy(server.endpoint, seed)
    try:
        with closing(Wire(proxy.endpoint).connection) as connection:
            yield proxy, connection
    finally:
        proxy.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)
