"""`kvstore health` says of each call whether it worked, in bounded time, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import health_backends

from kvstore_sdk.backend import Deadline
from kvstore_sdk.cli import main
from kvstore_sdk_backends.memory import open_memory

LOCATION = "cli-health"
READS = ["open", "exists", "get"]
WRITES = ["put", "get what was put", "delete"]


@pytest.fixture(autouse=True)
def healed() -> Iterator[None]:
    """What hangs in a store goes on when the test is over."""
    health_backends.opened.clear()
    yield
    for backend in health_backends.opened:
        backend.heal()


def target(how: str) -> list[str]:
    return ["health", "health_backends:open_faulty", "--location", LOCATION, "--option", f"how={how}"]


def calls(out: str) -> dict[str, str]:
    """The problem of each call, from the JSON that the command printed."""
    return {item["call"]: item["problem"] for item in json.loads(out)["items"]}


@pytest.mark.parametrize("writes", [False, True], ids=["reading", "writing"])
def test_a_store_that_works_is_healthy_and_is_left_as_it_was(writes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = (tmp_path / "kv").as_uri()
    (tmp_path / "kv").mkdir()
    assert main(["health", url, "--write"]) == 0
    capsys.readouterr()
    before = sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("."))
    assert main(["health", url, *(["--write"] if writes else []), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [item["call"] for item in printed["items"]] == [*READS, *(WRITES if writes else []), "close"]
    assert all(item["ok"] and item["ms"] >= 0.0 and not item["problem"] for item in printed["items"])
    assert (printed["command"], printed["target"], printed["healthy"]) == ("health", url, True)
    assert sorted(path for path in tmp_path.rglob("*") if not path.name.startswith(".")) == before


def test_each_call_is_a_line_with_its_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*target("nothing"), "--write"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [*READS, *WRITES, "close"]
    assert all(line.endswith(" ms  works") for line in lines[:-1])
    assert lines[-1] == "health_backends:open_faulty at cli-health is healthy"


@pytest.mark.parametrize(
    ("how", "failed", "said"),
    [
        ("exists raises", {"exists"}, ""),
        ("exists fails", {"exists"}, "the store is down"),
        ("exists lies", {"exists"}, "answered True for a name that nobody has stored"),
        ("exists answers nonsense", {"exists"}, "exists: the backend raised TypeError"),
        ("exists hangs", {"exists"}, "exists: the backend did not return within 3 s"),
        ("get raises", {"get", "get what was put"}, "RuntimeError (a bug)"),
        ("get hangs", {"get", "get what was put"}, "did not return within 3 s"),
        ("put is forbidden", {"put"}, "not for you"),
        ("wrong bytes", {"get what was put"}, "the bytes are not those that were stored"),
        ("delete fails", {"delete"}, "the store is down"),
    ],
)
def test_what_does_not_work_is_named_and_nothing_else(how: str, failed: set[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    # What hangs takes all of it, and nothing else comes near it.
    timeout_s = "3" if "hangs" in how else "60"
    assert main([*target(how), "--write", "--json", "--timeout", timeout_s]) == 1
    out = capsys.readouterr().out
    found = calls(out)
    assert {call for call, problem in found.items() if problem} == failed
    assert all(said in problem and "\n" not in problem for problem in found.values() if problem)
    assert json.loads(out)["healthy"] is False
    # Whatever failed before: what may have been stored is removed.
    assert set(found) >= {"delete", "close"}
    if "delete" not in failed:
        assert not open_memory(LOCATION).list("", Deadline.after(20.0)).entries


def test_without_write_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(target("put is forbidden")) == 0
    assert {event.op for event in health_backends.opened[0].log} <= {"exists", "get", "close"}


def test_what_could_not_be_removed_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "health_backends:open_no_delete", "--location", LOCATION, "--write"]) == 1
    assert "does not remove records" in capsys.readouterr().err
    assert not [event for event in health_backends.opened[0].log if event.op == "put"]
    assert main(["health", "health_backends:open_no_delete", "--location", LOCATION]) == 0


@pytest.mark.parametrize(
    ("name", "said"), [("open_down", "nobody answers"), ("open_hanging", "open: the backend did not return within 3 s")]
)
def test_a_store_that_cannot_be_opened_is_not_healthy(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", f"health_backends:{name}", "--location", LOCATION, "--json", "--timeout", "3"]) == 1
    found = calls(capsys.readouterr().out)
    assert list(found) == ["open"]
    assert said in found["open"]


def test_a_close_that_takes_its_time_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "health_backends:open_lazy", "--location", LOCATION, "--json", "--timeout", "20"]) == 0
    assert calls(capsys.readouterr().out)["close"] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/tmp/kv"], "health: target: is a path, not a URL; write file:///tmp/kv"),
        (["nope://x"], "nope"),
        (["health_backends:open_faulty", "--location", LOCATION, "--option", "who=me"], "who"),
        (["file:///nowhere/at/all"], "/nowhere/at"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*target("get raises"), "--option", "token=hunter2"]) == 1
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
