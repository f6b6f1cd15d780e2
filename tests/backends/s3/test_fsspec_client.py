"""Any file system of fsspec as an object store: s3fs, as one of many, against a server, and one of our own that fails as it is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from scripted_fs import ScriptedFileSystem, Store

from kvstore_sdk.backend import BackendError, ConfigError, DeniedError, InvalidError, ThrottledError, TimedOutError, UnavailableError
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.fsspec_client import FileSystemKind, FsspecClient
from kvstore_sdk_backends.s3.memory import ItemMemory, ReturnedError

LIMIT_S = 60.0
SIZE = 3 * 256 * 1024 + 17
DATA = random.Random(5).randbytes(SIZE)


async def end_s3fs(fs: Any) -> None:
    await fs._s3creator.__aexit__(None, None, None)


def on_s3(server: S3Server, bucket: str, **options: Any) -> FsspecClient:
    import s3fs

    kind = FileSystemKind("any", "s3fs", s3fs.S3FileSystem, end_s3fs)
    given = {"key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "endpoint_url": server.endpoint}
    given |= {"client_kwargs": {"region_name": REGION}, "config_kwargs": {"retries": {"max_attempts": 0}}} | options
    client = FsspecClient(kind, bucket, given, concurrency=4, request_timeout_s=LIMIT_S)
    client.conditional = True
    return client


def client_of(store: Store, *, conditional: bool = True, request_timeout_s: float = LIMIT_S) -> FsspecClient:
    kind = FileSystemKind("any", "scripted", ScriptedFileSystem, store.end)
    client = FsspecClient(kind, "b", {"store": store}, concurrency=3, request_timeout_s=request_timeout_s)
    client.conditional = conditional
    return client


def play(client: FsspecClient, scene: Callable[[FsspecClient], Coroutine[Any, Any, None]]) -> None:
    """Open, play, close; in a bounded time."""

    async def whole() -> None:
        await client.open()
        try:
            await scene(client)
        finally:
            await client.close()

    async def bounded() -> None:
        await asyncio.wait_for(whole(), LIMIT_S)

    asyncio.run(bounded())


def lent(data: bytes) -> ItemMemory:
    return ItemMemory(memoryview(bytearray(data)))


def room(size_bytes: int) -> tuple[bytearray, ItemMemory]:
    into = bytearray(b"\xaa" * size_bytes)
    return into, ItemMemory(memoryview(into))


class HttpError(Exception):
    """As libraries make them."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__("Bearer hidden-token")
        self.status_code = status
        self.headers = headers


def test_an_object_is_stored_read_replaced_and_removed_on_a_real_store(s3_server: S3Server, bucket: str) -> None:
    key = "kv/v1/n/ab/h-g0"

    async def scene(client: FsspecClient) -> None:
        into, memory = room(SIZE)
        assert await client.head(key) is None
        assert await client.get(key, memory) is None
        assert await client.put(key, lent(DATA), create=True)
        assert not await client.put(key, lent(DATA[::-1]), create=True)
        assert await client.head(key) == SIZE
        assert await client.get(key, memory) == SIZE
        assert into == DATA
        assert await client.put(key, lent(DATA[::-1]), create=False)
        assert await client.get(key, memory) == SIZE
        assert into == DATA[::-1]
        await client.refresh_credentials()
        assert await client.delete([key, "kv/v1/nothing"]) == {key: None, "kv/v1/nothing": None}
        assert await client.head(key) is None

    play(on_s3(s3_server, bucket), scene)
    assert s3_server.objects(bucket) == {}


@pytest.mark.parametrize("size_bytes", [0, 1, 100, 5000])
def test_a_record_of_another_size_is_told_and_never_written(s3_server: S3Server, bucket: str, size_bytes: int) -> None:
    async def scene(client: FsspecClient) -> None:
        assert await client.put("k", lent(DATA[:size_bytes]), create=False)
        for wanted in {size_bytes - 1, size_bytes + 1, 2 * size_bytes + 9} - {-1}:
            into, memory = room(wanted)
            assert await client.get("k", memory) == size_bytes
            assert into == b"\xaa" * wanted
        into, memory = room(size_bytes)
        assert await client.get("k", memory) == size_bytes
        assert into == DATA[:size_bytes]

    play(on_s3(s3_server, bucket), scene)


def test_what_others_change_in_a_real_store_is_seen_at_once(s3_server: S3Server, bucket: str) -> None:
    boto = s3_server.client()

    async def scene(client: FsspecClient) -> None:
        for number in (1, 2, 3):
            boto.put_object(Bucket=bucket, Key="f/k", Body=DATA[:number])
            assert await client.head("f/k") == number
            assert [(found.key, found.size_bytes) for found in (await client.list_page("f/", "", 9))[0]] == [("f/k", number)]
            boto.delete_object(Bucket=bucket, Key="f/k")
            assert await client.head("f/k") is None
            assert await client.get("f/k", room(number)[1]) is None
            assert await client.list_page("f/", "", 9) == ([], False)

    play(on_s3(s3_server, bucket), scene)


def test_pages_of_a_real_store_hold_every_key_once_in_the_order_of_its_bytes(s3_server: S3Server, bucket: str) -> None:
    drawn = random.Random(7)
    keys = {"/".join(drawn.choices(["a", "a-b", "a.b", "ab", "B", "0", "_"], k=drawn.randint(1, 4))) for _ in range(40)}
    # A key cannot have others below it, as no record has.
    keys = {f"kv/{key}/r" for key in keys}
    wanted = sorted(keys, key=str.encode)
    boto = s3_server.client()
    for key in [*keys, "kw", "other/x"]:
        boto.put_object(Bucket=bucket, Key=key, Body=b"12")

    async def scene(client: FsspecClient) -> None:
        for prefix in ("kv/", "kv/a", "kv/a/", "kv/a-", "kv/nothing", "kv/nothing/"):
            for limit in (1, 7, 100):
                found: list[str] = []
                more = True
                while more:
                    page, more = await client.list_page(prefix, found[-1] if found else "", limit)
                    assert len(page) <= limit
                    assert all(info.size_bytes == 2 and info.modified_s > 1e9 for info in page)
                    found += [info.key for info in page]
                    assert len(found) <= len(wanted)
                assert found == [key for key in wanted if key.startswith(prefix)]

    play(on_s3(s3_server, bucket), scene)


def test_a_page_lists_only_the_folders_that_it_needs() -> None:
    store = Store({f"b/kv/{folder:02x}/k{n}": b"x" for folder in range(20) for n in range(10)})

    async def scene(client: FsspecClient) -> None:
        page, more = await client.list_page("kv/", "kv/0a/k3", 8)
        assert [info.key for info in page] == [f"kv/0a/k{n}" for n in range(4, 10)] + ["kv/0b/k0", "kv/0b/k1"]
        assert more
        assert store.listed == ["b/kv", "b/kv/0a", "b/kv/0b"]

    play(client_of(store), scene)


def test_a_get_asks_for_one_byte_more_than_it_wants() -> None:
    store = Store({"b/k": DATA})

    async def scene(client: FsspecClient) -> None:
        assert await client.get("k", room(100)[1]) == SIZE
        assert store.ranges == [(0, 101)]

    play(client_of(store), scene)


@pytest.mark.parametrize("cut", [0, 1, SIZE - 1])
def test_a_body_cut_short_is_an_error_and_never_data(cut: int) -> None:
    store = Store({"b/k": DATA}, cut=cut)
    into, memory = room(SIZE)

    async def scene(client: FsspecClient) -> None:
        with pytest.raises(AttemptError, match=rf"any get b/k: {cut} bytes came of an object of {SIZE}") as caught:
            await client.get("k", memory)
        assert caught.value.retryable
        assert into == b"\xaa" * SIZE
        store.cut = None
        assert await client.get("k", memory) == SIZE
        assert into == DATA

    play(client_of(store), scene)


def test_a_folder_is_no_record() -> None:
    async def scene(client: FsspecClient) -> None:
        assert await client.head("kv") is None

    play(client_of(Store({"b/kv/x": b"1"})), scene)


def test_a_store_without_conditional_writes_replaces() -> None:
    store = Store({"b/k": b"old"})

    async def scene(client: FsspecClient) -> None:
        assert not client.conditional
        assert await client.put("k", lent(b"new"), create=True)
        assert store.objects == {"b/k": b"new"}

    play(client_of(store, conditional=False), scene)


@pytest.mark.parametrize(
    ("cause", "kind", "retryable", "may_have_happened", "stale"),
    [
        (PermissionError("hidden-token"), DeniedError, False, False, False),
        (HttpError(403), DeniedError, False, False, False),
        (OSError("Forbidden: b/k\nhidden-token"), DeniedError, False, False, False),
        (HttpError(401), DeniedError, False, False, True),
        (type("RefreshError", (Exception,), {})("hidden-token"), DeniedError, False, False, True),
        (HttpError(503, {"Retry-After": "3"}), ThrottledError, True, True, False),
        (HttpError(429), ThrottledError, True, True, False),
        (HttpError(500), UnavailableError, True, True, False),
        (HttpError(400), InvalidError, False, False, False),
        (HttpError(404), UnavailableError, False, False, False),
        (FileNotFoundError("b"), UnavailableError, False, False, False),
        (TimeoutError("hidden-token"), TimedOutError, True, True, False),
        (ConnectionResetError(104, "hidden-token"), UnavailableError, True, True, False),
        (RuntimeError("hidden-token"), UnavailableError, True, True, False),
        (TypeError("hidden-token"), UnavailableError, False, True, False),
    ],
)
def test_a_failed_put_says_what_may_be_done_about_it_and_no_secret(
    cause: Exception, kind: type[BackendError], retryable: bool, may_have_happened: bool, stale: bool
) -> None:
    store = Store(faults=[("pipe", cause)])

    async def scene(client: FsspecClient) -> None:
        with pytest.raises(AttemptError) as caught:
            await client.put("k", lent(b"x"), create=True)
        error = caught.value
        assert type(error.error) is kind
        assert (error.retryable, error.may_have_happened, error.stale_credentials) == (retryable, may_have_happened, stale)
        assert error.retry_after_s == (3.0 if getattr(cause, "headers", None) else 0.0)
        assert str(error.error).startswith("any put b/k: ")
        assert "hidden-token" not in str(error.error)
        assert error.__suppress_context__
        assert await client.put("k", lent(b"x"), create=True)

    play(client_of(store), scene)


def test_a_key_that_cannot_be_removed_does_not_keep_the_others() -> None:
    store = Store({f"b/k{n}": b"x" for n in range(10)}, faults=[("rm", HttpError(500))])

    async def scene(client: FsspecClient) -> None:
        results = await client.delete([f"k{n}" for n in range(10)])
        assert [key for key, error in results.items() if error is not None] == ["k0"]
        assert isinstance(results["k0"], UnavailableError)
        assert list(store.objects) == ["b/k0"]
        assert store.peak == 3

    play(client_of(store), scene)


def test_where_none_can_be_removed_whoever_asked_may_ask_again() -> None:
    """With other credentials for example."""
    store = Store({"b/k0": b"x", "b/k1": b"x"}, faults=[("rm", HttpError(401)), ("rm", HttpError(401))])

    async def scene(client: FsspecClient) -> None:
        with pytest.raises(AttemptError) as caught:
            await client.delete(["k0", "k1"])
        assert caught.value.stale_credentials
        assert await client.delete(["k0", "k1"]) == {"k0": None, "k1": None}

    play(client_of(store), scene)


def test_a_store_that_refuses_for_good_has_one_file_system_made() -> None:
    store = Store(faults=[("info", HttpError(401)) for _ in range(5)])

    async def scene(client: FsspecClient) -> None:
        stale = []
        for _ in range(5):
            with pytest.raises(AttemptError) as caught:
                await client.head("k")
            stale.append(caught.value.stale_credentials)
            if stale[-1]:
                await client.refresh_credentials()
        assert stale == [True, False, False, False, False]
        assert len(store.made) == 2

    play(client_of(store), scene)


def test_a_file_system_that_cannot_be_made_anew_is_for_the_operator_to_mend() -> None:
    store = Store({"b/k": b"x"})
    client = client_of(store)

    async def scene(client: FsspecClient) -> None:
        client._options["token"] = "hidden-token"
        client._options["loop"] = None
        with pytest.raises(
            AttemptError, match="any credentials for b: credentials cannot be had: storage_options: scripted cannot"
        ) as caught:
            await client.refresh_credentials()
        assert isinstance(caught.value.error, DeniedError)
        assert "hidden-token" not in str(caught.value.error)
        assert await client.head("k") == 1, "the old one is as good as it was"

    play(client, scene)


def test_an_attempt_ends_at_its_time_out_and_the_next_succeeds() -> None:
    async def never() -> None:
        await asyncio.sleep(LIMIT_S)

    store = Store({"b/k": b"x"}, faults=[("info", never)])

    async def scene(client: FsspecClient) -> None:
        with pytest.raises(AttemptError, match="any head b/k: TimeoutError") as caught:
            await client.head("k")
        assert isinstance(caught.value.error, TimedOutError)
        assert caught.value.retryable
        assert await client.head("k") == 1

    play(client_of(store, request_timeout_s=1.5), scene)


def test_memory_given_back_while_bytes_are_on_their_way_is_not_touched() -> None:
    into, memory = room(SIZE)

    async def give_back() -> None:
        memory.give_back()

    store = Store({"b/k": DATA}, faults=[("cat", give_back)])

    async def scene(client: FsspecClient) -> None:
        with pytest.raises(ReturnedError):
            await client.get("k", memory)
        assert into == b"\xaa" * SIZE
        with pytest.raises(ReturnedError):
            await client.put("k", memory, create=False)
        assert store.objects == {"b/k": DATA}

    play(client_of(store), scene)


def test_no_cache_of_fsspec_is_asked_for_and_no_instance_is_shared() -> None:
    store = Store()

    async def scene(client: FsspecClient) -> None:
        loop = asyncio.get_running_loop()
        await client.refresh_credentials()
        first, second = store.made
        assert first is not second
        for fs in (first, second):
            assert fs.options == {"asynchronous": True, "loop": loop, "use_listings_cache": False}
            assert not fs.dircache.use_listings_cache
        assert ScriptedFileSystem._cache == {}

    play(client_of(store), scene)


def test_old_credentials_serve_what_began_with_them_and_are_closed_after_it() -> None:
    going = asyncio.Event()
    began = asyncio.Event()

    async def wait() -> None:
        began.set()
        await going.wait()

    store = Store({"b/k": b"x"}, faults=[("info", wait)])

    async def scene(client: FsspecClient) -> None:
        slow = asyncio.ensure_future(client.head("k"))
        await began.wait()
        await client.refresh_credentials()
        assert store.ended == []
        going.set()
        assert await slow == 1
        assert store.ended == store.made[:1]

    play(client_of(store), scene)
    assert store.ended == store.made


def test_a_closed_client_answers_with_an_error() -> None:
    store = Store({"b/k": b"x"})
    client = client_of(store)

    async def scene(client: FsspecClient) -> None:
        await client.close()
        with pytest.raises(AttemptError, match="any head b/k: the client is closed"):
            await client.head("k")

    play(client, scene)
    assert store.calls == 0


def test_storage_options_that_cannot_be_used_are_refused_without_showing_them() -> None:
    def make(**options: Any) -> None:
        raise ValueError(f"what is {options['sas_token']}")

    async def end(_: Any) -> None:
        """Nothing was made."""

    kind = FileSystemKind("any", "scripted", make, end)
    client = FsspecClient(kind, "b", {"sas_token": "hidden-token"}, concurrency=1, request_timeout_s=1.0)
    with pytest.raises(
        ConfigError, match=r"backend any: storage_options: scripted cannot make a file system of it \(ValueError\)"
    ) as caught:
        asyncio.run(client.open())
    assert "hidden-token" not in f"{caught.value} {client!r}"
    assert caught.value.__suppress_context__
