"""One attempt of each verb through s3fs: what goes over the wire, what is written into memory, and what a failure says."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("s3fs")

from botocore.exceptions import EndpointConnectionError
from client_steps import KEY, UNTOUCHED, Ask, Step, asker, failure, getting, memory_of, some_bytes
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
    slow_down,
)
from s3_server import S3Server

from kvstore_sdk.backend import DeniedError, ThrottledError, UnavailableError, UnsupportedError
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.memory import COPY_BYTES
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient


@pytest.fixture
def ask(proxy: FaultProxy, bucket: str) -> Ask:
    """Runs a step with an open client that talks through the proxy."""
    return asker(proxy.endpoint, bucket)


@pytest.mark.parametrize("checksums", ["when_required", "when_supported", "off"])
@pytest.mark.parametrize("size_bytes", [0, 1, COPY_BYTES - 1, COPY_BYTES, COPY_BYTES + 1, 3 * COPY_BYTES + 17])
def test_what_is_put_is_got(ask: Ask, size_bytes: int, checksums: str) -> None:
    data = some_bytes(size_bytes)
    found, memory = getting(size_bytes)

    async def step(client: S3fsClient) -> tuple[bool, int | None, int | None]:
        return await client.put(KEY, memory_of(data), True), await client.head(KEY), await client.get(KEY, memory)

    assert ask(step, checksums=checksums) == (True, size_bytes, size_bytes)
    assert found == data


def test_a_body_goes_out_with_its_length_and_without_waiting(ask: Ask, proxy: FaultProxy) -> None:
    """Neither in chunks, which stores refuse, nor after a word of the store, which is a round trip; and not signed, which is a hash."""
    data = some_bytes(2 * COPY_BYTES + 5)
    ask(lambda client: client.put(KEY, memory_of(data), True))
    [seen] = proxy.requests
    headers = {name.lower(): value for name, value in seen.headers.items()}
    assert headers["content-length"] == str(len(data))
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["if-none-match"] == "*"
    assert not {"transfer-encoding", "expect", "content-encoding"} & set(headers)


@pytest.mark.parametrize(("checksums", "sent"), [("when_required", False), ("when_supported", True), ("off", False)])
def test_checksums_follow_the_policy(ask: Ask, proxy: FaultProxy, checksums: str, sent: bool) -> None:
    found, memory = getting(10)

    async def step(client: S3fsClient) -> None:
        await client.put(KEY, memory_of(some_bytes(10)), False)
        await client.get(KEY, memory)

    ask(step, checksums=checksums)
    put, get = ({name.lower() for name in seen.headers} for seen in proxy.requests)
    assert ("x-amz-checksum-crc32" in put) is sent
    assert ("x-amz-checksum-mode" in get) is sent
    assert found == some_bytes(10)


@pytest.mark.parametrize("asked", [0, 1, 999, 1001, 5000])
def test_an_object_of_another_size_is_not_written(ask: Ask, asked: int) -> None:
    found, memory = getting(asked)

    async def step(client: S3fsClient) -> int | None:
        await client.put(KEY, memory_of(some_bytes(1000)), False)
        return await client.get(KEY, memory)

    assert ask(step) == 1000
    assert set(found) <= {UNTOUCHED}


def test_what_is_not_there_is_none(ask: Ask) -> None:
    async def step(client: S3fsClient) -> tuple[object, ...]:
        return await client.head(KEY), await client.get(KEY, memory_of(b"123")), await client.delete([KEY])

    assert ask(step) == (None, None, {KEY: None})


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ShortBody(1), "body"),
        (ShortBody(70000), "body"),
        (ResetInsideBody(0), "*"),
        (ResetInsideBody(100_001), "*"),
        (ResetBefore(), "closed"),
    ],
)
def test_a_body_that_is_cut_is_no_data(ask: Ask, proxy: FaultProxy, kind: Any, code: str) -> None:
    data = some_bytes(300_000)
    found, memory = getting(len(data))
    proxy.script(Fault(kind, "GET"))

    async def step(client: S3fsClient) -> int | None:
        await client.put(KEY, memory_of(data), False)
        return await client.get(KEY, memory)

    failed = failure(ask, step)
    assert isinstance(failed.error, UnavailableError)
    assert failed.retryable
    assert not failed.may_have_happened, "a read changes nothing"
    assert failed.code in ({code} if code != "*" else {"body", "closed"})
    assert f"s3 GET {proxy.requests[0].path.split('/')[1]}/{KEY}" in str(failed.error)
    assert found != data


@pytest.mark.parametrize("kind", [LongBody(1), LongBody(100_000), ShortBody(1, told=True)])
def test_a_body_whose_length_says_otherwise_is_another_size(ask: Ask, proxy: FaultProxy, kind: Any) -> None:
    data = some_bytes(1000)
    found, memory = getting(len(data))
    proxy.script(Fault(kind, "GET"))

    async def step(client: S3fsClient) -> int | None:
        await client.put(KEY, memory_of(data), False)
        return await client.get(KEY, memory)

    assert ask(step) not in (None, len(data))
    assert set(found) == {UNTOUCHED}


def test_wrong_bytes_do_not_pass_a_checksum(ask: Ask, proxy: FaultProxy) -> None:
    _, memory = getting(1000)
    proxy.script(Fault(WrongBytes(1), "GET"))

    async def step(client: S3fsClient) -> int | None:
        await client.put(KEY, memory_of(some_bytes(1000)), False)
        return await client.get(KEY, memory)

    failed = failure(ask, step, checksums="when_supported")
    assert (failed.code, failed.retryable) == ("checksum", True)


@pytest.mark.parametrize(
    ("kind", "error", "retryable", "may_have_happened", "wish_s"),
    [
        (Status(500), UnavailableError, True, True, 0.0),
        (Status(502, "BadGateway"), UnavailableError, True, True, 0.0),
        (slow_down(), ThrottledError, True, False, 0.0),
        (slow_down(retry_after=3), ThrottledError, True, False, 3.0),
        (Status(403, "AccessDenied"), DeniedError, False, False, 0.0),
        (Status(409, "ConditionalRequestConflict"), UnavailableError, True, False, 0.0),
        (Status(501, "NotImplemented"), UnsupportedError, False, False, 0.0),
        (ResetBefore(), UnavailableError, True, True, 0.0),
        (ResetInsideRequest(), UnavailableError, True, True, 0.0),
        (ResetAfterBody(), UnavailableError, True, True, 0.0),
    ],
)
def test_a_put_that_fails_is_one_request_and_says_what_happened(
    ask: Ask, proxy: FaultProxy, kind: Any, error: type[Exception], retryable: bool, may_have_happened: bool, wish_s: float
) -> None:
    proxy.script(Fault(kind, "PUT"))
    failed = failure(ask, lambda client: client.put(KEY, memory_of(some_bytes(100_000)), False))
    assert isinstance(failed.error, error)
    assert (failed.retryable, failed.may_have_happened, failed.retry_after_s) == (retryable, may_have_happened, wish_s)
    assert len(proxy.requests) == 1
    assert KEY in str(failed.error)
    if isinstance(kind, Status):
        assert f"HTTP {kind.status} {kind.code}" in str(failed.error)
        assert (failed.status, failed.code) == (kind.status, kind.code)


@pytest.mark.parametrize("verb", ["PUT", "GET", "DELETE"])
def test_a_bucket_that_is_elsewhere_is_no_place_to_go_to(ask: Ask, proxy: FaultProxy, verb: str) -> None:
    proxy.script(Fault(Status(301, "PermanentRedirect")))
    attempts: dict[str, Step] = {
        "PUT": lambda client: client.put(KEY, memory_of(some_bytes(1000)), False),
        "GET": lambda client: client.get(KEY, memory_of(b"x")),
        "DELETE": lambda client: client.delete([KEY]),
    }
    failed = failure(ask, attempts[verb])
    assert isinstance(failed.error, DeniedError)
    assert (failed.code, failed.retryable, failed.may_have_happened) == ("PermanentRedirect", False, False)
    assert "set region or endpoint" in str(failed.error)


class TwoConnections:
    """A client that sends a body over one connection, loses it, and tries another: as aiohttp may with what it calls idempotent."""

    def __init__(self, real: Any) -> None:
        self.meta = real.meta
        self.close = real.close
        self.sent: list[bytes] = []

    async def put_object(self, **request: Any) -> None:
        self.sent.append(b"".join([piece async for piece in request["Body"]]))
        self.sent += [piece async for piece in request["Body"]]


def test_a_body_is_sent_once_in_an_attempt(ask: Ask) -> None:
    data = some_bytes(2 * COPY_BYTES)

    async def step(client: S3fsClient) -> list[bytes]:
        session = client._sessions.now
        assert session is not None
        session.client = fake = TwoConnections(session.client)
        with pytest.raises(AttemptError, match="the connection was lost, and a body is not sent twice") as raised:
            await client.put(KEY, memory_of(data), False)
        assert (raised.value.may_have_happened, raised.value.retryable) == (True, True)
        return fake.sent

    assert ask(step) == [data]


def test_a_body_that_went_out_may_have_arrived_whatever_came_last(ask: Ask) -> None:
    async def put_object(**request: Any) -> None:
        async for _ in request["Body"]:
            break
        raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1", error=ConnectionRefusedError(111, "Connection refused"))

    async def step(client: S3fsClient) -> AttemptError:
        session = client._sessions.now
        assert session is not None
        session.client.put_object = put_object
        with pytest.raises(AttemptError) as raised:
            await client.put(KEY, memory_of(b"x"), False)
        return raised.value

    assert ask(step).may_have_happened


def test_nobody_listening_is_a_put_that_did_not_happen(ask: Ask) -> None:
    failed = failure(ask, lambda client: client.put(KEY, memory_of(b"x"), False), endpoint="http://127.0.0.1:1")
    assert (failed.code, failed.retryable, failed.may_have_happened) == ("connect", True, False)


def test_an_object_that_is_there_is_not_created(ask: Ask, s3_server: S3Server, bucket: str) -> None:
    async def step(client: S3fsClient) -> tuple[bool, ...]:
        return tuple([await client.put(KEY, memory_of(data), create) for data, create in ((b"one", True), (b"two", True), (b"six", False))])

    assert ask(step) == (True, False, True)
    assert s3_server.objects(bucket) == {KEY: b"six"}


def test_without_conditions_creating_replaces(ask: Ask, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    async def step(client: S3fsClient) -> tuple[bool, ...]:
        assert not client.conditional
        return await client.put(KEY, memory_of(b"one"), True), await client.put(KEY, memory_of(b"two"), True)

    assert ask(step, conditional_writes="never") == (True, True)
    assert s3_server.objects(bucket) == {KEY: b"two"}
    assert not any(name.lower() == "if-none-match" for seen in proxy.requests for name in seen.headers)


def test_a_store_that_knows_no_conditions_is_asked_once(ask: Ask, proxy: FaultProxy) -> None:
    proxy.script(Fault(Status(501, "NotImplemented"), "PUT", times=1))

    async def step(client: S3fsClient) -> bool:
        with pytest.raises(AttemptError) as raised:
            await client.put(KEY, memory_of(b"one"), True)
        assert raised.value.retryable
        assert not client.conditional
        return await client.put(KEY, memory_of(b"one"), True)

    assert ask(step) is True


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NeverAnswers(), {"read_timeout_s": 0.3, "connect_timeout_s": 0.3}),
        (NeverAnswers(), {"request_timeout_s": 0.3}),
        (Bandwidth(50_000), {"request_timeout_s": 0.5}),
    ],
)
@pytest.mark.parametrize("verb", ["PUT", "GET"])
def test_each_time_out_ends_an_attempt(ask: Ask, proxy: FaultProxy, verb: str, kind: Any, options: dict[str, float]) -> None:
    data = some_bytes(2_000_000)
    _, memory = getting(len(data))

    async def step(client: S3fsClient) -> None:
        await client.put(KEY, memory_of(data), False)

    ask(step)
    proxy.script(Fault(kind, verb))
    attempt: Step = (lambda client: client.get(KEY, memory)) if verb == "GET" else (lambda client: client.put(KEY, memory_of(data), False))
    failed = failure(ask, attempt, **options)
    assert (failed.code, failed.retryable, failed.may_have_happened) == ("timeout", True, verb == "PUT")


def test_a_body_that_comes_slowly_is_no_silence(ask: Ask, proxy: FaultProxy) -> None:
    """It takes longer than the time-outs for silence and for connecting together."""
    data = some_bytes(2_000_000)
    found, memory = getting(len(data))
    ask(lambda client: client.put(KEY, memory_of(data), False))
    proxy.script(Fault(Bandwidth(400_000), "GET"))
    assert ask(lambda client: client.get(KEY, memory), read_timeout_s=3.0, connect_timeout_s=1.0) == len(data)
    assert found == data


def test_a_cancelled_get_writes_no_more_and_its_connection_is_not_used_again(ask: Ask, proxy: FaultProxy) -> None:
    data = some_bytes(1_000_000)
    found, memory = getting(len(data))

    async def step(client: S3fsClient) -> bytes:
        await client.put(KEY, memory_of(data), False)
        proxy.script(Fault(Bandwidth(400_000), "GET", times=1))
        task = asyncio.create_task(client.get(KEY, memory))
        while found[0] == UNTOUCHED and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        before = bytes(found)
        again, other = getting(len(data))
        # Over the same connection this would begin with the rest of the first answer.
        assert await client.get(KEY, other) == len(data)
        assert again == data
        return before

    assert ask(step) == found
    assert found != data


def test_memory_that_was_given_back_is_not_sent_on(ask: Ask, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    # More than sockets take in before anybody reads.
    memory = memory_of(some_bytes(32_000_000))
    proxy.script(Fault(Bandwidth(2_000_000), "PUT"))
    taken = threading.Timer(0.5, memory.give_back)

    async def step(client: S3fsClient) -> None:
        taken.start()
        await client.put(KEY, memory, False)

    try:
        failure(ask, step)
    finally:
        taken.join()
    assert s3_server.objects(bucket) == {}


def test_many_objects_are_deleted_by_one_request(ask: Ask, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    keys = [f"kv/{number}" for number in range(20)]

    async def step(client: S3fsClient) -> Any:
        await asyncio.gather(*(client.put(key, memory_of(b"x"), False) for key in keys))
        proxy.reset()
        return await client.delete([*keys[:15], "kv/none"])

    assert ask(step) == dict.fromkeys([*keys[:15], "kv/none"])
    assert [seen.method for seen in proxy.requests] == ["POST"]
    assert sorted(s3_server.objects(bucket)) == sorted(keys[15:])


def test_without_checksums_objects_are_deleted_one_by_one(ask: Ask, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    keys = [f"kv/{number}" for number in range(5)]

    async def step(client: S3fsClient) -> Any:
        await asyncio.gather(*(client.put(key, memory_of(b"x"), False) for key in keys))
        proxy.reset()
        proxy.script(Fault(Status(403, "AccessDenied"), "DELETE", keys[2]))
        return await client.delete(keys)

    answers = ask(step, checksums="off")
    assert {seen.method for seen in proxy.requests} == {"DELETE"}
    assert [key for key in keys if answers[key] is not None] == [keys[2]]
    assert isinstance(answers[keys[2]], DeniedError)
    assert list(s3_server.objects(bucket)) == [keys[2]]


def test_a_listing_is_sorted_and_goes_on_where_it_ended(ask: Ask) -> None:
    keys = [f"kv/{name}" for name in ("a", "a-b", "a/b", "a0", "z")]

    async def step(client: S3fsClient) -> list[list[str]]:
        await asyncio.gather(*(client.put(key, memory_of(b"xy"), False) for key in [*keys, "other"]))
        pages, after, more = [], "", True
        while more:
            found, more = await client.list_page("kv/", after, 2)
            assert all(info.size_bytes == 2 and info.modified_s > 1.7e9 for info in found)
            pages.append([info.key for info in found])
            after = pages[-1][-1]
        return pages

    wanted = sorted(keys, key=str.encode)
    assert ask(step) == [wanted[:2], wanted[2:4], wanted[4:]]


def test_objects_get_the_class_and_the_tags_that_were_asked_for(ask: Ask, s3_server: S3Server, bucket: str) -> None:
    ask(lambda client: client.put(KEY, memory_of(b"x"), True), storage_class="STANDARD_IA", tags="team=kv&x=")
    assert s3_server.client().head_object(Bucket=bucket, Key=KEY)["StorageClass"] == "STANDARD_IA"
    tags = s3_server.client().get_object_tagging(Bucket=bucket, Key=KEY)["TagSet"]
    assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "kv", "x": ""}


def test_the_pool_is_as_large_as_the_concurrency(ask: Ask, proxy: FaultProxy) -> None:
    proxy.script(Fault(Delay(0.5), "HEAD"))
    ask(lambda client: asyncio.gather(*(client.head(f"kv/{number}") for number in range(24))), concurrency=24)
    assert proxy.peak_of("HEAD") == 24


def test_a_bucket_that_is_not_there_is_no_miss(ask: Ask, proxy: FaultProxy) -> None:
    proxy.script(Fault(Status(404, "NoSuchBucket"), "GET"))
    failed = failure(ask, lambda client: client.get(KEY, memory_of(b"x")))
    assert failed.code == "NoSuchBucket"


def test_a_closed_client_says_so(ask: Ask) -> None:
    async def step(client: S3fsClient) -> None:
        await client.close()
        await client.close()
        await client.head(KEY)

    assert failure(ask, step).code == "closed"
