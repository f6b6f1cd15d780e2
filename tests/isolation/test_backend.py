"""An isolated backend answers what the backend in the child answers."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from isolation_bench import LONG_S, Open, exists, get, put, wait_until

from kvstore_sdk import backend as sdk
from kvstore_sdk.backend import (
    BackendError,
    BreachError,
    ConfigError,
    Deadline,
    DeleteStatus,
    Failure,
    Fork,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    ListEntry,
    ListPage,
    Put,
    PutResult,
    PutStatus,
    Region,
    SupportsDelete,
    SupportsList,
    SupportsRegions,
    SupportsSettle,
    SupportsUsage,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    Usage,
)
from kvstore_sdk.isolation import IsolatedBackend, PolledBackend, in_child, open_isolated


def test_records_go_both_ways(child: IsolatedBackend, region: Region) -> None:
    assert put(child, region, "a/b", b"payload") == PutResult(PutStatus.STORED)
    assert get(child, region, "a/b", 7) == (GetResult(GetStatus.FOUND), b"payload")
    assert get(child, region, "a/b", 6)[0] == GetResult.wrong_size(7, 6)
    assert get(child, region, "a/c", 6)[0] == GetResult(GetStatus.MISSING)
    deadline = Deadline.after(LONG_S)
    assert child.exists(["a/b", "a/c"], deadline) == [True, False]
    assert child.list("a/", deadline) == ListPage([ListEntry("a/b", 7)], None)
    assert child.usage(deadline) == Usage(1, 7)
    assert child.delete(["a/b", "a/c"], deadline) == [DeleteStatus.DELETED, DeleteStatus.ABSENT]


def test_a_batch_answers_in_order_and_several_parts_are_one_record(child: IsolatedBackend, region: Region) -> None:
    region.view[:12] = b"abcdefghijkl"
    parts = (region.buffer(8, 4), region.buffer(0, 4))
    assert child.put([Put("x", parts), Put("y", (region.buffer(4, 4),))], Deadline.after(LONG_S)) == [PutResult(PutStatus.STORED)] * 2
    gets = [
        Get("no", (region.buffer(100, 4),)),
        Get("y", (region.buffer(104, 4),)),
        Get("x", (region.buffer(116, 2), region.buffer(108, 6))),
    ]
    statuses = [result.status for result in child.get(gets, Deadline.after(LONG_S))]
    assert statuses == [GetStatus.MISSING, GetStatus.FOUND, GetStatus.FOUND]
    assert bytes(region.view[104:118]) == b"efghklabcd\x00\x00ij"


def test_a_listing_goes_on_at_its_cursor(child: IsolatedBackend, region: Region) -> None:
    for name in "abc":
        put(child, region, name, b"1")
    page = child.list("", Deadline.after(LONG_S), None, 2)
    assert [entry.name for entry in page.entries] == ["a", "b"]
    assert [entry.name for entry in child.list("", Deadline.after(LONG_S), page.cursor, 2).entries] == ["c"]


def test_it_offers_what_the_backend_offers_and_says_what_isolation_adds(open_child: Open) -> None:
    full, plain = open_child(workers=3), open_child("open_plain")
    optional: list[Any] = [SupportsDelete, SupportsList, SupportsUsage]
    assert all(isinstance(full, surface) for surface in optional)
    assert not any(isinstance(plain, surface) for surface in optional)
    for backend in (full, plain):
        assert isinstance(backend, SupportsRegions)
        assert isinstance(backend, SupportsSettle)
        assert isinstance(backend, PolledBackend)
        assert backend.capabilities.in_doubt
        assert backend.capabilities.fork is Fork.REFUSES
    assert (full.capabilities.max_concurrency, full.capabilities.max_record_bytes) == (3, 1 << 20)


@pytest.mark.parametrize(
    "kind",
    [
        "UnavailableError",
        "TimedOutError",
        "NoSpaceError",
        "DeniedError",
        "ReadOnlyError",
        "UnsupportedError",
        "InvalidError",
        "ClosedError",
    ],
)
def test_errors_keep_their_class_and_text(child: IsolatedBackend, kind: str) -> None:
    failure = exists(child, f"do/fail/{kind}")
    assert isinstance(failure, Failure)
    assert (type(failure.error).__name__, str(failure.error)) == (kind, "told to fail")
    with pytest.raises(getattr(sdk, kind), match="told to raise"):
        exists(child, f"do/raise/{kind}")


def test_the_wish_of_a_store_to_wait_crosses(child: IsolatedBackend) -> None:
    with pytest.raises(ThrottledError, match="slow down") as raised:
        exists(child, "do/throttle")
    assert raised.value.retry_after_s == 2.5


@pytest.mark.parametrize("deed", ["do/raise_odd", "do/system_exit"])
def test_an_exception_of_any_kind_is_told_as_unavailable(child: IsolatedBackend, deed: str) -> None:
    with pytest.raises(UnavailableError):
        exists(child, deed)
    assert exists(child, "x") is False


@pytest.mark.parametrize("deed", ["do/short", "do/odd_type"])
def test_an_answer_that_the_contract_does_not_allow_fails_its_items(child: IsolatedBackend, region: Region, deed: str) -> None:
    assert isinstance(exists(child, deed).error, BreachError)
    answer, _ = get(child, region, deed, 4)
    assert answer.status is GetStatus.FAILED
    assert isinstance(answer.error, BreachError)
    stored = put(child, region, deed, b"1234")
    assert stored.status is PutStatus.UNKNOWN
    assert isinstance(stored.error, BreachError)
    with pytest.raises(BreachError):
        child.list(deed, Deadline.after(LONG_S))
    assert child.deaths == 0


def test_a_page_as_large_as_it_gets_crosses(open_child: Open, region: Region) -> None:
    backend = open_child()
    backend.register_region(region)
    many = [f"{number:05}" + "n" * 200 for number in range(2000)]
    for start in range(0, len(many), 500):
        backend.put([Put(name, (region.buffer(0, 1),)) for name in many[start : start + 500]], Deadline.after(LONG_S))
    page = backend.list("", Deadline.after(LONG_S), None, 1 << 40)
    assert [entry.name for entry in page.entries] == many


def test_memory_that_was_not_announced_is_refused(child: IsolatedBackend, region: Region) -> None:
    other = Region(4096)
    try:
        with pytest.raises(InvalidError, match="not registered"):
            child.get([Get("x", (other.buffer(0, 4),))], Deadline.after(LONG_S))
        child.unregister_region(region)
        with pytest.raises(InvalidError, match="not registered"):
            get(child, region, "x", 4)
    finally:
        other.close()


def test_a_region_that_the_backend_refuses_is_not_known(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child()
    (tmp_path / "refuse regions").touch()
    with pytest.raises(UnavailableError, match="no region now"):
        backend.register_region(region)
    with pytest.raises(InvalidError, match="not registered"):
        get(backend, region, "x", 4)


def test_regions_can_be_announced_and_given_up_many_times(open_child: Open, tmp_path: Path) -> None:
    """And the child maps no more than those that are announced."""
    backend = open_child()
    kept = Region(8192)
    backend.register_region(kept)
    for number in range(1, 50):
        region = Region(4096 * number)
        backend.register_region(region)
        backend.register_region(region)
        put(backend, region, "x", b"data")
        backend.unregister_region(region)
        backend.unregister_region(region)
        region.close()
    exists(backend, "do/note")
    assert _facts(tmp_path)["regions"] == [8192]
    maps = Path(f"/proc/{backend.pid}/maps").read_text()
    assert maps.count("memfd:kvstore") == 1
    kept.close()


def test_a_deadline_that_has_passed_is_answered_at_once_and_definitely(child: IsolatedBackend, region: Region) -> None:
    assert put(child, region, "do/die", b"1", timeout_s=-0.01).status is PutStatus.TIMED_OUT
    assert get(child, region, "do/die", 4, timeout_s=-0.01)[0].status is GetStatus.TIMED_OUT
    assert isinstance(exists(child, "do/die", timeout_s=-0.01).error, TimedOutError)


def test_errors_of_opening_are_raised_here(open_child: Open) -> None:
    with pytest.raises(ConfigError, match="is no place") as raised:
        open_child("open_wrong")
    assert (raised.value.where, raised.value.field) == ("backend wrong", "location")
    with pytest.raises(ConfigError, match="unknown option") as raised:
        open_child(wokers=3)
    assert raised.value.field == "wokers"
    with pytest.raises(BackendError, match="a bug of the vendor"):
        open_child("open_throws")
    with pytest.raises(UnavailableError, match="killed by SIGKILL"):
        open_child("open_dies")
    with pytest.raises(UnavailableError, match="closed its end of the line"):
        open_child("open_hangs_up")
    with pytest.raises(BreachError, match="no answer"):
        open_child("open_lies")
    with pytest.raises(UnavailableError, match="SystemExit"):
        open_child("open_exits")
    with pytest.raises(BackendError, match="JSON"):
        open_child(workers=object())


def test_the_child_is_confined(open_child: Open, tmp_path: Path) -> None:
    backend = open_child()
    exists(backend, "do/note")
    facts = _facts(tmp_path)
    assert facts.pop("files") <= 4096
    assert facts == {"core": 0, "sigint": True, "session": True, "in_child": True, "regions": [], "folder": os.getcwd()}
    assert not in_child()
    assert int(Path(f"/proc/{backend.pid}/oom_score_adj").read_text()) >= 500


def test_descriptors_of_the_child_are_bounded(child: IsolatedBackend) -> None:
    with pytest.raises(BackendError, match="EMFILE"):
        exists(child, "do/descriptors")


def test_secrets_show_nowhere(open_child: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backend = open_child(secret_key="hunter2-hunter2")
    shown = [Path(f"/proc/{backend.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
    assert b"hunter2" not in b"".join(shown)
    exists(backend, "do/say/hello")
    wait_until(lambda: "says hello" in caplog.text, "the child's record")
    exists(backend, "do/exit/7")
    assert "hunter2" not in caplog.text + repr(backend) + repr(vars(backend)) + repr(vars(backend._keeper))
    with pytest.raises(ConfigError) as raised:
        open_isolated("no-such://store?secret_key=hunter2-hunter2")
    assert "hunter2" not in str(raised.value)


def test_what_the_child_logs_is_logged_here_in_bounds(
    capfd: pytest.CaptureFixture[str], open_child: Open, caplog: pytest.LogCaptureFixture
) -> None:
    child = open_child()
    exists(child, "do/say/hello")
    wait_until(lambda: "says hello" in caplog.text, "the child's record")
    [record] = [record for record in caplog.records if "says hello" in record.getMessage()]
    assert (record.name, record.getMessage()) == ("kvstore_sdk.isolation", "it: child: vendor: says hello")
    written = capfd.readouterr()
    assert written.out == ""
    assert "printed hello" in written.err
    exists(child, "do/log_name")
    wait_until(lambda: "evil" in caplog.text, "the record of an odd name")
    caplog.clear()
    exists(child, "do/flood/3000")
    exists(child, "x")
    lines = [record.getMessage() for record in caplog.records]
    assert 0 < len(lines) < 1000
    assert max(map(len, lines)) < 5000
    assert not any("\x1b" in line or "\n" in line for line in lines)


def test_a_process_that_the_backend_forks_says_nothing_in_its_name(
    child: IsolatedBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exists(child, "do/fork")
    assert exists(child, "x") is False
    # Nor does it hold the engine's memory.
    assert (tmp_path / "held").read_text() == "0"
    assert "from the fork" not in caplog.text
    assert child.deaths == 0


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = ast.literal_eval((folder / "facts").read_text())
    return facts
