"""Each item gets the answer that is true of it, whatever its requests met."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_client import Lost, ScriptedClient, lost_answer, refused, store_over

from kvstore_sdk.backend import (
    BackendError,
    Deadline,
    DeleteStatus,
    DeniedError,
    Failure,
    Get,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutStatus,
    ReadOnlyError,
    ThrottledError,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.client import AttemptError, ObjectInfo

RECORD = random.Random(3).randbytes(300_000)


def denied() -> AttemptError:
    return AttemptError(DeniedError("403"))


def soon() -> Deadline:
    return Deadline.after(10.0)


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def store(client: ScriptedClient) -> Iterator[S3Backend]:
    with store_over(client) as backend:
        yield backend


def test_a_record_is_one_object_under_the_prefix_and_its_bytes_alone(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    assert desk.put(store, "v1/a", RECORD).status is PutStatus.STORED
    assert client.objects == {"kv/v1/a": RECORD}
    result, record = desk.get(store, "v1/a", len(RECORD))
    assert (result.status, record) == (GetStatus.FOUND, RECORD)
    assert store.exists(["v1/a", "v1/b"], soon()) == [True, False]


def test_without_a_prefix_names_are_keys(desk: Any) -> None:
    client = ScriptedClient()
    with store_over(client, prefix="") as store:
        desk.put(store, "v1/a", b"x")
        assert list(client.objects) == ["v1/a"]
        assert [entry.name for entry in store.list("v1", soon()).entries] == ["v1/a"]


def test_what_is_not_there_is_missing(store: S3Backend, desk: Any) -> None:
    assert desk.get(store, "a", 10)[0].status is GetStatus.MISSING


@pytest.mark.parametrize("asked", [len(RECORD) - 1, len(RECORD) + 1, 0])
def test_another_size_is_told_and_no_byte_is_written(store: S3Backend, desk: Any, asked: int) -> None:
    desk.put(store, "a", RECORD)
    result, seen = desk.get(store, "a", asked)
    assert (result.status, result.size_bytes, result.asked_bytes) == (GetStatus.WRONG_SIZE, len(RECORD), asked)
    assert seen == b"\xee" * asked


def test_an_empty_record_is_a_record(store: S3Backend, desk: Any) -> None:
    assert desk.put(store, "a", b"").status is PutStatus.STORED
    assert desk.get(store, "a", 0)[0].status is GetStatus.FOUND
    assert store.put([Put("b", ())], soon())[0].status is PutStatus.STORED
    assert store.get([Get("b", ())], soon())[0].status is GetStatus.FOUND


@pytest.mark.parametrize("conditional", [True, False])
def test_creating_leaves_what_is_there_and_replacing_does_not(desk: Any, conditional: bool) -> None:
    client = ScriptedClient(conditional)
    with store_over(client) as store:
        assert desk.put(store, "a", b"first").status is PutStatus.STORED
        assert desk.put(store, "a", b"other").status is PutStatus.EXISTS
        assert client.objects["kv/a"] == b"first"
        assert desk.put(store, "a", b"third", Mode.REPLACE).status is PutStatus.STORED
        assert client.objects["kv/a"] == b"third"
        # Only where it has to does it look first.
        assert client.count("head") == (0 if conditional else 2)


def test_items_of_a_call_stand_for_themselves_and_keep_their_order(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.objects = {"kv/a": b"aaaa", "kv/long": b"12345678", "kv/denied": b"dddd", "kv/slow": b"ssss"}
    client.fail("get", denied(), key="kv/denied")
    client.fail("get", refused(), refused(), key="kv/slow")
    gets = [desk.get_item(name, 4) for name in ("slow", "none", "../bad", "long", "denied", "a")]
    results = store.get(gets, soon())
    assert [result.status.value for result in results] == ["found", "missing", "failed", "wrong_size", "failed", "found"]
    assert isinstance(results[2].error, InvalidError)
    assert isinstance(results[4].error, DeniedError)
    assert [bytes(gets[index].into[0].view) for index in (0, 5)] == [b"ssss", b"aaaa"]
    # What failed is asked again, and nothing else.
    assert sorted(key for _, key in client.requests) == ["kv/a", "kv/denied", "kv/long", "kv/none", "kv/slow", "kv/slow", "kv/slow"]


@pytest.mark.parametrize(("requests", "calls"), [(1, 64), (64, 64), (200, 200)])
def test_as_many_calls_as_requests_may_run_and_some_in_any_case(requests: int, calls: int) -> None:
    with store_over(ScriptedClient(), concurrency=requests) as store:
        assert store.capabilities.max_concurrency == calls


def test_an_empty_call_asks_nothing(client: ScriptedClient, store: S3Backend) -> None:
    assert (store.exists([], soon()), store.get([], soon()), store.put([], soon()), store.delete([], soon())) == ([], [], [], [])
    assert client.requests == []


def test_a_wish_that_does_not_fit_in_the_deadline_is_told(client: ScriptedClient, store: S3Backend) -> None:
    client.fail("head", AttemptError(ThrottledError("503 SlowDown", 60.0), retryable=True, retry_after_s=60.0))
    [answer] = store.exists(["a"], soon())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, ThrottledError)
    assert answer.error.retry_after_s == 60.0


def test_a_lost_answer_is_asked_for_again(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.fail("put", Lost(), key="kv/a")
    client.fail("put", lost_answer(), key="kv/b")
    results = [desk.put(store, name, b"x") for name in ("a", "b")]
    # The first attempt at a was done, and somebody else may as well have made what the second one met.
    assert [result.status for result in results] == [PutStatus.EXISTS, PutStatus.STORED]
    assert client.objects == {"kv/a": b"x", "kv/b": b"x"}


@pytest.mark.parametrize("then", [lost_answer(), refused(), denied(), RuntimeError("a fault")])
def test_a_put_whose_answer_was_lost_stays_unknown_whatever_its_repeats_meet(desk: Any, then: BaseException) -> None:
    client = ScriptedClient()
    with store_over(client, retries=1) as store:
        client.fail("put", Lost(), then)
        result = desk.put(store, "a", b"x", Mode.REPLACE)
    assert result.status is PutStatus.UNKNOWN
    assert result.error is not None
    assert "kv/a" in client.objects


def test_a_put_that_was_refused_each_time_failed(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.fail("put", denied())
    result = desk.put(store, "a", b"x")
    assert (result.status, type(result.error)) == (PutStatus.FAILED, DeniedError)
    assert client.objects == {}


def test_a_look_that_fails_before_a_put_makes_it_fail(desk: Any) -> None:
    client = ScriptedClient(conditional=False)
    client.fail("head", AttemptError(DeniedError("HEAD: 403")))
    with store_over(client) as store:
        assert desk.put(store, "a", b"x").status is PutStatus.FAILED
    assert client.count("put") == 0


def test_a_fault_of_the_client_is_told_without_what_it_says(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.objects["kv/a"] = b"x"
    for verb in ("get", "put", "head"):
        client.fail(verb, RuntimeError("secret_access_key=abc"))
    got, _ = desk.get(store, "a", 1)
    put = desk.put(store, "a", b"x")
    [exists] = store.exists(["a"], soon())
    assert isinstance(exists, Failure)
    # Nobody knows how far it came.
    assert (got.status, put.status) == (GetStatus.FAILED, PutStatus.UNKNOWN)
    for error in (got.error, put.error, exists.error):
        assert "s3://bucket/kv/a: raised RuntimeError" in str(error)
        assert "secret" not in str(error)


def test_what_cannot_be_taken_is_refused_before_anything_is_asked(client: ScriptedClient, desk: Any) -> None:
    with store_over(client, max_record_bytes=10) as store:
        large = desk.put(store, "a", b"x" * 11)
        parted = desk.put(store, "a", b"xxxx", cuts=(2,))
        parted_get, _ = desk.get(store, "a", 2, 2)
        names = [desk.put(store, name, b"x") for name in ("", "/a", "a//b", ".hidden", "a/../b", "x" * 256)]
    for result in [large, parted, parted_get, *names]:
        assert result.status.value == "failed"
        assert isinstance(result.error, InvalidError)
    assert "10" in str(large.error)
    assert client.requests == []


def test_a_store_that_is_read_only_changes_nothing(client: ScriptedClient, desk: Any) -> None:
    client.objects["kv/a"] = b"x"
    with store_over(client, read_only=True) as store:
        assert store.capabilities.read_only
        put = desk.put(store, "b", b"x")
        [deleted] = store.delete(["a"], soon())
        assert desk.get(store, "a", 1)[0].status is GetStatus.FOUND
    assert isinstance(put.error, ReadOnlyError)
    assert isinstance(deleted, Failure)
    assert isinstance(deleted.error, ReadOnlyError)
    assert client.objects == {"kv/a": b"x"}


def test_deleting_tells_what_was_there_in_one_request_for_all(client: ScriptedClient, store: S3Backend) -> None:
    client.objects = {f"kv/{number}": b"x" for number in range(50)}
    names = [str(number) for number in range(100)]
    answers = store.delete([*names, "../bad"], soon())
    assert answers[:100] == [DeleteStatus.DELETED] * 50 + [DeleteStatus.ABSENT] * 50
    assert isinstance(answers[100], Failure)
    assert (client.objects, client.count("delete")) == ({}, 1)


def test_only_what_was_not_deleted_is_deleted_again(client: ScriptedClient, store: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    client.objects = dict.fromkeys(("kv/a", "kv/b", "kv/c"), b"x")
    asked: list[list[str]] = []

    async def delete(keys: list[str]) -> dict[str, BackendError | None]:
        asked.append(list(keys))
        answers: dict[str, BackendError | None] = dict.fromkeys(keys)
        if len(asked) == 1:
            answers |= {"kv/a": ThrottledError("SlowDown"), "kv/c": DeniedError("AccessDenied")}
        return answers

    monkeypatch.setattr(client, "delete", delete)
    a, b, c = store.delete(["a", "b", "c"], soon())
    assert (a, b) == (DeleteStatus.DELETED, DeleteStatus.DELETED)
    assert isinstance(c, Failure)
    assert isinstance(c.error, DeniedError)
    assert asked == [["kv/a", "kv/b", "kv/c"], ["kv/a"]]


def test_a_delete_that_fails_says_so_for_each_record(client: ScriptedClient, store: S3Backend) -> None:
    client.objects = {"kv/a": b"x", "kv/b": b"x"}
    client.fail("delete", denied())
    client.fail("head", denied(), key="kv/c")
    answers = store.delete(["a", "none", "c", "b"], soon())
    assert [getattr(answer, "value", "failure") for answer in answers] == ["failure", "absent", "failure", "failure"]


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.sampled_from([f"{a}{b}{c}" for a in "abc" for b in ("", "/", "-") for c in ("x", "y1", "z")]) | st.just(".probe/x")),
    st.sampled_from(["", "a", "a/", "b-", "c/y1", "nothing"]),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_a_walk_meets_each_record_once_and_nothing_else(keys: set[str], prefix: str, limit: int, page_size: int) -> None:
    client = ScriptedClient()
    client.page = page_size
    client.objects = {f"kv/{key}": b"x" * len(key) for key in keys} | {"kv/": b"", "kv/folder/": b"", "kvx/a": b"", "a": b""}
    seen, cursor = [], None
    with store_over(client) as store:
        while True:
            page = store.list(prefix, soon(), cursor, limit)
            assert len(page.entries) <= limit
            seen += page.entries
            cursor = page.cursor
            if cursor is None:
                break
        usage = store.usage(soon())
    records = sorted(key for key in keys if not key.startswith("."))
    assert [entry.name for entry in seen] == [name for name in records if name.startswith(prefix)]
    assert all(entry.size_bytes == len(entry.name) for entry in seen)
    assert (usage.records, usage.used_bytes, usage.capacity_bytes) == (len(records), sum(map(len, records)), None)


def test_a_listing_of_more_than_a_page_is_put_together(client: ScriptedClient, store: S3Backend) -> None:
    client.objects = {f"kv/{number:05}": b"xy" for number in range(2500)}
    page = store.list("", soon(), limit=2300)
    assert (len(page.entries), page.cursor) == (2300, "02299")
    assert len(store.list("", soon(), page.cursor).entries) == 200
    assert store.usage(soon()).used_bytes == 5000


def test_objects_that_are_no_records_cost_no_requests(client: ScriptedClient, store: S3Backend) -> None:
    foreign = {f"kv/b/.{number}": b"x" for number in range(900)}
    client.objects = {f"kv/{name}": b"x" for name in ("a1", "a2", "c1", "c2")} | foreign
    page = store.list("", soon(), limit=3)
    assert [entry.name for entry in page.entries] == ["a1", "a2", "c1"]
    assert client.count("list") == 1
    rest = store.list("", soon(), page.cursor, limit=3)
    assert ([entry.name for entry in rest.entries], rest.cursor, client.count("list")) == (["c2"], None, 2)


@pytest.mark.parametrize("odd", ["\0", "b\0c", "b\u00e9", "b%2F", "../b", "b\ud800", "b" * 2000])
def test_a_cursor_or_prefix_that_no_store_takes_is_survived(client: ScriptedClient, store: S3Backend, odd: str) -> None:
    client.objects = {f"kv/{name}": b"x" for name in ("a", "b", "b-", "bz", "c")}
    after = [name for name in ("a", "b", "b-", "bz", "c") if name > odd]
    page = store.list("", soon(), odd)
    assert ([entry.name for entry in page.entries], page.cursor) == (after, None)
    assert store.list(odd, soon()).entries == []
    assert all(asked.isascii() and asked.isprintable() for _, asked in client.requests)
    assert all(after.isascii() and after.isprintable() for after in client.starts)


def test_a_listing_that_fails_raises_why(client: ScriptedClient, store: S3Backend) -> None:
    client.fail("list", denied(), denied())
    with pytest.raises(DeniedError):
        store.list("", soon())
    with pytest.raises(DeniedError):
        store.usage(soon())
    client.hang.add("list")
    with pytest.raises(TimedOutError, match="s3 list s3://bucket/kv: the deadline passed"):
        store.list("", Deadline.after(0.1))
    with pytest.raises(InvalidError, match="limit 0"):
        store.list("", soon(), limit=0)


def infos(*keys: str) -> list[ObjectInfo]:
    return [ObjectInfo(key, 1, 0.0) for key in keys]


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ((infos("kv/b", "kv/a"), False), "not sorted"),
        ((infos("kv/a", "kv/a"), False), "not sorted"),
        # The same page each time: no walk over it would end.
        ((infos("kv/a", "kv/b"), True), "not sorted"),
        (([], True), "nothing in it"),
    ],
)
def test_a_listing_from_which_no_walk_can_go_on_is_an_error(
    client: ScriptedClient, store: S3Backend, monkeypatch: pytest.MonkeyPatch, page: tuple[list[ObjectInfo], bool], problem: str
) -> None:
    async def list_page(*_: object) -> tuple[list[ObjectInfo], bool]:
        return page

    monkeypatch.setattr(client, "list_page", list_page)
    with pytest.raises(UnavailableError, match=problem):
        store.list("", soon())
    with pytest.raises(UnavailableError, match=problem):
        store.usage(soon())


def test_what_a_store_lists_although_it_was_not_asked_for_is_no_record(
    client: ScriptedClient, store: S3Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def list_page(*_: object) -> tuple[list[ObjectInfo], bool]:
        return infos("/etc/passwd", "a", "kv/a", "kv/b", "kvx/c", "other/abc/def"), False

    monkeypatch.setattr(client, "list_page", list_page)
    assert [entry.name for entry in store.list("", soon()).entries] == ["a", "b"]
    assert [entry.name for entry in store.list("b", soon()).entries] == ["b"]
    assert store.usage(soon()).records == 2


def test_nothing_is_listed_on_the_way_of_a_request(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    desk.put(store, "a", b"x")
    desk.get(store, "a", 1)
    store.exists(["a", "b"], soon())
    store.delete(["a", "b"], soon())
    assert client.count("list") == 0


def test_what_another_writer_stored_is_seen_at_once(client: ScriptedClient, store: S3Backend) -> None:
    """RACE-11"""
    assert store.exists(["a"], soon()) == [False]
    client.objects["kv/a"] = b"x"
    assert store.exists(["a"], soon()) == [True]
    del client.objects["kv/a"]
    assert store.exists(["a"], soon()) == [False]


failures = st.sampled_from(["ok", "refused", "lost", "done_and_lost", "denied"])


@settings(max_examples=150, deadline=None)
@given(st.lists(failures, max_size=4), st.sampled_from(Mode), st.booleans(), st.booleans())
def test_no_put_says_more_than_is_true(script: list[str], mode: Mode, there: bool, conditional: bool) -> None:
    made = {"refused": refused, "lost": lost_answer, "done_and_lost": Lost, "denied": denied}
    script = script[: script.index("ok")] if "ok" in script else script
    client = ScriptedClient(conditional)
    client.fail("put", *(made[step]() for step in script))
    if there:
        client.objects["kv/a"] = b"old"
    with store_over(client, retries=2) as store:
        store._requests._draw = lambda: 0.0
        buffer = desk_buffer(b"new")
        [result] = store.put([Put("a", (buffer,), mode)], soon())
        buffer.region.close()
    holds = client.objects.get("kv/a")
    if result.status is PutStatus.STORED:
        assert holds == b"new"
    elif result.status is PutStatus.EXISTS:
        assert mode is Mode.CREATE
        assert holds is not None
    elif result.status is PutStatus.FAILED:
        assert holds == (b"old" if there else None)
        assert result.error is not None
    else:
        assert result.status is PutStatus.UNKNOWN
        assert {"lost", "done_and_lost"} & set(script)


def desk_buffer(record: bytes) -> Any:
    from kvstore_sdk.backend import Region

    buffer = Region(4096).buffer(0, len(record))
    buffer.view[:] = record
    return buffer
