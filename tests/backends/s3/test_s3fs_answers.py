"""Answers that no object store gives: of a proxy, a portal, or whoever else listens there. None of them is taken for a record's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("s3fs")

from client_steps import KEY, UNTOUCHED, Ask, asker, failure, getting, memory_of, some_bytes

from kvstore_sdk.backend import DeniedError, UnavailableError
from kvstore_sdk_backends.s3.http import MAX_ANSWER_BYTES
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient

LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated>%s</ListBucketResult>"


class Answers:
    """A server that answers everything as the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = b""
        self.endless = False
        self.seen: list[str] = []
        self.sent_bytes = 0
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                told.seen.append(f"{self.command} {self.path}")
                self.send_response_only(told.status)
                given = {} if told.endless else {"content-length": str(len(told.body))}
                for name, value in (given | told.headers).items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(told.body)
                while told.endless and told.sent_bytes < 100 * MAX_ANSWER_BYTES:
                    told.sent_bytes += self.wfile.write(bytes(1 << 16))
                self.close_connection = "content-length" not in given or not told.headers.get("content-length", "x")

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

            def log_message(self, *_: Any) -> None:
                """It says nothing."""

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.stop()


@pytest.fixture
def ask(answers: Answers) -> Ask:
    return asker(answers.endpoint, "bucket")


@pytest.mark.parametrize("status", [200, 201, 202, 203, 206, 226, 299])
def test_only_a_whole_object_is_one(ask: Ask, answers: Answers, status: int) -> None:
    answers.status, answers.body = status, some_bytes(100)
    found, memory = getting(100)
    if status == 200:
        assert ask(lambda client: client.get(KEY, memory)) == 100
        assert found == answers.body
        return
    for step in (lambda client: client.get(KEY, memory), lambda client: client.head(KEY)):
        failed = failure(ask, step)
        assert isinstance(failed.error, UnavailableError)
        assert f"HTTP {status}" in str(failed.error)
        assert (failed.retryable, failed.may_have_happened, failed.code) == (True, False, "body")
    assert set(found) == {UNTOUCHED}


def test_a_part_of_an_object_is_none(ask: Ask, answers: Answers) -> None:
    answers.body, answers.headers = some_bytes(100), {"content-range": "bytes 5-104/900"}
    found, memory = getting(100)
    assert failure(ask, lambda client: client.get(KEY, memory)).code == "body"
    assert set(found) == {UNTOUCHED}


@pytest.mark.parametrize("status", [202, 203, 205, 206, 226])
def test_a_promise_to_store_is_no_store(ask: Ask, answers: Answers, status: int) -> None:
    answers.status = status
    failed = failure(ask, lambda client: client.put(KEY, memory_of(b"x"), True))
    assert isinstance(failed.error, UnavailableError)
    assert (failed.may_have_happened, failed.code) == (True, "body")
    assert failure(ask, lambda client: client.delete([KEY])).code == "body"


@pytest.mark.parametrize("verb", ["head", "get"])
def test_an_answer_without_a_length_says_so(ask: Ask, answers: Answers, verb: str) -> None:
    answers.headers = {"content-length": ""}
    memory = memory_of(b"x")
    failed = failure(ask, (lambda client: client.head(KEY)) if verb == "head" else (lambda client: client.get(KEY, memory)))
    assert "comes without a length" in str(failed.error)
    assert isinstance(failed.error, UnavailableError)


NO_LISTINGS = [
    b"",
    b"<html>Welcome</html>",
    b"<ListBucketResult></ListBucketResult>",
    LISTING % b"<Contents><Key>a</Key></Contents>",
    LISTING % b"<Contents><Size>1</Size></Contents>",
    LISTING % b"<Contents><Key>a</Key><Size>-5</Size></Contents>",
]


@pytest.mark.parametrize("body", NO_LISTINGS)
def test_what_is_no_listing_is_no_empty_bucket(ask: Ask, answers: Answers, body: bytes) -> None:
    answers.body = body
    failed = failure(ask, lambda client: client.list_page("kv/", "", 10))
    assert isinstance(failed.error, UnavailableError)
    assert (failed.code, failed.retryable) == ("body", True)


def test_a_listing_needs_no_times(ask: Ask, answers: Answers) -> None:
    answers.body = LISTING % b"<Contents><Key>a</Key><Size>5</Size></Contents>"
    found, more = ask(lambda client: client.list_page("", "", 10))
    assert [(info.key, info.size_bytes) for info in found] == [("a", 5)]
    assert not more


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Welcome</html>",
        b"<DeleteResult></DeleteResult>",
        b"<DeleteResult><Error><Key>other</Key><Code>AccessDenied</Code></Error></DeleteResult>",
        b"<DeleteResult><Deleted><Key>other</Key></Deleted></DeleteResult>",
    ],
)
def test_what_an_answer_does_not_name_is_not_deleted(ask: Ask, answers: Answers, body: bytes) -> None:
    answers.body = body
    gone = ask(lambda client: client.delete(["a", "b"]))
    assert list(gone) == ["a", "b"]
    assert all(isinstance(error, UnavailableError) for error in gone.values())


def test_each_key_has_the_answer_that_names_it(ask: Ask, answers: Answers) -> None:
    answers.body = (
        b"<DeleteResult><Deleted><Key>a</Key></Deleted><Error><Key>b</Key><Code>Access\nDenied</Code></Error>"
        b"<Error><Key>c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    gone = ask(lambda client: client.delete(["a", "b", "c"]))
    assert gone["a"] is gone["c"] is None
    assert str(gone["b"]).endswith("bucket/b: Access Denied")


def step_of(verb: str) -> Any:
    steps: dict[str, Any] = {
        "get": lambda client: client.get(KEY, memory_of(b"x")),
        "head": lambda client: client.head(KEY),
        "put": lambda client: client.put(KEY, memory_of(some_bytes(1000)), False),
        "delete": lambda client: client.delete([KEY]),
        "deletes": lambda client: client.delete([KEY, "other"]),
        "list": lambda client: client.list_page("", "", 1),
    }
    return steps[verb]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("verb", ["get", "head", "put", "delete", "deletes", "list"])
def test_nobody_is_followed_to_another_host(ask: Ask, answers: Answers, verb: str, status: int) -> None:
    """It would be told the token, and give its own bytes for the store's."""
    other = Answers()
    try:
        answers.status, answers.headers = status, {"location": f"{other.endpoint}/bucket/key"}
        failed = failure(ask, step_of(verb), session_token="a-session-token")
        assert other.seen == []
    finally:
        other.stop()
    assert isinstance(failed.error, DeniedError)
    assert "set region or endpoint" in str(failed.error)
    assert (failed.status, failed.retryable, failed.may_have_happened) == (status, False, False)


@pytest.mark.parametrize(("verb", "status"), [("list", 200), ("get", 500), ("put", 500), ("deletes", 200)])
def test_an_endless_answer_is_not_collected(ask: Ask, answers: Answers, verb: str, status: int) -> None:
    answers.status, answers.endless = status, True
    failed = failure(ask, step_of(verb), read_timeout_s=30.0)
    assert isinstance(failed.error, UnavailableError)
    assert failed.retryable
    assert answers.sent_bytes < 20 * MAX_ANSWER_BYTES, "much of it is in buffers of sockets"


def test_bytes_that_came_are_not_in_the_words_of_an_error(ask: Ask, answers: Answers) -> None:
    """More of a body than its length says is taken for the next answer, which it is not."""
    answers.body, answers.headers = b"hidden-bytes of a record" * 4, {"content-length": "5"}

    async def step(client: S3fsClient) -> list[str]:
        texts = []
        for _ in range(4):
            try:
                await client.get(KEY, memory_of(b"12345"))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is shown
                texts.append(f"{error} {error!r}")
        return texts

    assert "hidden-bytes" not in " ".join(ask(step))
