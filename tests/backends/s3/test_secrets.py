"""Credentials are shown nowhere: not in what anybody logs at any level, nor in a repr, an error or on the terminal."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Fault, Kind, ResetBefore, Status, clock_skew, expired_token

from kvstore_sdk.backend import ConfigError, Deadline, KVStoreError, PutStatus

CREDENTIALS = {
    "access_key_id": "AKIACANARYOFTHEKEYID",
    "secret_access_key": "canary/of+the/secret0access+key",
    "session_token": "canary-of-the-session-token==",
}


class Lines(logging.Handler):
    """Everything that is logged, as a file of it would have it: with its arguments and tracebacks."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lines: list[str] = []
        self.loggers: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.loggers.add(record.name.partition(".")[0])


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What all loggers of the process say from here on, those that do not pass it on too."""
    handler = Lines()
    root = logging.getLogger()
    every = [root, *(found for found in root.manager.loggerDict.values() if isinstance(found, logging.Logger))]
    for logger in every:
        monkeypatch.setattr(logger, "level", 1)
        logger._cache.clear()
    listened = [logger for logger in every if logger is root or not logger.propagate]
    for logger in listened:
        logger.addHandler(handler)
    yield handler
    for logger in listened:
        logger.removeHandler(handler)
    monkeypatch.undo()
    for logger in every:
        logger._cache.clear()


def check_hidden(texts: list[str]) -> None:
    for text in texts:
        for name, value in CREDENTIALS.items():
            assert value not in text, f"{name} in {text}"


def told(error: BaseException | None) -> list[str]:
    return [] if error is None else [str(error), repr(error), *traceback.format_exception(error), *map(repr, vars(error).values())]


KINDS: list[Kind] = [Status(500), Status(403, "InvalidAccessKeyId"), expired_token(), ResetBefore()]


def test_nothing_that_a_store_says_or_logs_holds_a_secret(
    open_store: Callable[..., Any], engine: str, desk: Any, proxy: FaultProxy, logged: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    store = open_store(engine, **CREDENTIALS)
    assert desk.put(store, "k", b"abc").status is PutStatus.STORED
    desk.get(store, "k", 3)
    store.list("", Deadline.after(10.0))
    for kind in KINDS:
        proxy.script(Fault(kind))
        deadline = Deadline.after(0.7)
        [exists], [deleted] = store.exists(["k"], deadline), store.delete(["k"], deadline)
        [got] = store.get([desk.get_item("k", 3)], Deadline.after(0.7))
        [put] = store.put([desk.put_item("new", b"x")], Deadline.after(0.7))
        for answer in (exists, deleted, got, put):
            texts += [repr(answer), *told(answer.error)]
        with pytest.raises(KVStoreError) as raised:
            store.list("", deadline)
        texts += told(raised.value)
        proxy.heal()
    texts += [repr(store), str(store), repr(store.capabilities), *map(repr, vars(store).values())]
    store.close()
    assert {"botocore", "aiobotocore"} <= logged.loggers, "the libraries were silent, so this proves nothing"
    check_hidden([*texts, *logged.lines, *capfd.readouterr()])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, Status(403, "InvalidAccessKeyId")),
        ({}, clock_skew()),
        ({}, Status(500)),
        ({"endpoint": "http://127.0.0.1:9"}, None),
        ({"endpoint": "no url at all"}, None),
        ({"secret_access_key": None}, None),
        ({"location": "no/../bucket"}, None),
        ({"max_bytes": 1 << 30}, None),
    ],
    ids=str,
)
def test_nothing_that_opening_says_holds_a_secret(
    open_store: Callable[..., Any], proxy: FaultProxy, logged: Lines, options: dict[str, Any], kind: Kind | None
) -> None:
    if kind is not None:
        proxy.script(Fault(kind))
    with pytest.raises(KVStoreError) as raised:
        open_store("s3fs", **(CREDENTIALS | options))
    if kind is None:
        assert isinstance(raised.value, ConfigError)
    check_hidden([*told(raised.value), *logged.lines])
