"""How a command is told its store: by a URL, a name or a factory, with secrets that no other user sees."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest

from kvstore_sdk.backend import ConfigError, Deadline
from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.table import human_age
from kvstore_sdk.cli.target import add_filter, add_output, add_target, add_threads, prefix_of, retry_of, target_of


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_target(parser)
    add_target(parser, "destination", "to-", "the other store")
    add_filter(parser)
    add_threads(parser)
    add_output(parser)
    return parser.parse_args(arguments)


def test_two_stores_are_told_apart() -> None:
    said = parsed("fs", "memory", "--location", "/a", "--option", "x=1", "--to-location", "/b", "--to-option", "y=2")
    first, second = target_of(said, "copy"), target_of(said, "copy", "destination")
    assert (first.backend, first.location, first.options) == ("fs", "/a", {"x": "1"})
    assert (second.backend, second.location, second.options) == ("memory", "/b", {"y": "2"})
    assert str(first) == "fs at /a"


def test_a_secret_comes_from_the_environment_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_SECRET", "hunter2=x")
    target = target_of(parsed("s3://bucket/kv?session_token=hunter3", "memory:", "--option", "secret_access_key=env:TOOL_SECRET"), "ls")
    assert target.options == {"secret_access_key": "hunter2=x"}
    assert str(target) == "s3://bucket/kv"
    assert "hunter2" not in repr(target)
    with pytest.raises(ConfigError, match="copy: secret_access_key: is to come from the environment, where NO_SUCH_SECRET is not set"):
        target_of(parsed("s3://b/kv", "memory:", "--option", "secret_access_key=env:NO_SUCH_SECRET"), "copy")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "memory:"], "ls: target: must not be empty"),
        (["/mnt/a b", "memory:"], "ls: target: is a path, not a URL; write file:///mnt/a%20b"),
        (["./kv", "memory:"], "is a path, not a URL; write file://"),
        (["fs", "memory:", "--option", "a=1", "--option", "a=2"], "ls: a: is given twice"),
    ],
)
def test_what_names_no_store_is_told_with_what_would(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        target_of(parsed(*arguments), "ls")
    assert said in str(raised.value)


def test_a_command_that_only_looks_opens_read_only_unless_told_otherwise(tmp_path: Path) -> None:
    url = (tmp_path / "kv").as_uri()
    with target_of(parsed(url, "memory:"), "prune").open(writes=True) as backend:
        assert not backend.capabilities.read_only
    for arguments, read_only in (
        ([url], True),
        ([f"{url}?read_only=false"], False),
        ([url, "--option", "read_only=false"], False),
        (["fs", "--location", str(tmp_path / "kv")], True),
    ):
        [target, *more] = arguments
        with target_of(parsed(target, "memory:", *more), "ls").open(writes=False) as backend:
            assert backend.capabilities.read_only is read_only
    with target_of(parsed("memory:", "memory:"), "ls").open(writes=False) as backend:
        assert not backend.capabilities.read_only


@pytest.mark.parametrize("query", ["?max_bytes=1GiB", "?direct_io=never&max_bytes=1GiB", "?max_bytes=1GiB&direct_io=never", ""])
def test_a_bound_copied_from_a_tiers_entry_is_no_hindrance_to_looking(tmp_path: Path, query: str) -> None:
    url = (tmp_path / "kv").as_uri()
    target_of(parsed(url, "memory:"), "prune").open(writes=True).__enter__().close()
    more = [] if query else ["--option", "max_bytes=1GiB"]
    with target_of(parsed(url + query, "memory:", *more), "ls").open(writes=False) as backend:
        assert backend.capabilities.read_only
    with target_of(parsed(url + query, "memory:", *more), "prune").open(writes=True, creates=False) as backend:
        assert not backend.capabilities.read_only
        assert backend.usage(Deadline.after(30)).capacity_bytes == 1 << 30


def test_a_command_that_removes_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    misspelt = target_of(parsed((tmp_path / "misspelt").as_uri(), "memory:"), "prune")
    with pytest.raises(ConfigError, match="does not exist"):
        misspelt.open(writes=True, creates=False)
    assert list(tmp_path.iterdir()) == []


def test_patience_threads_and_filters_are_what_was_said() -> None:
    said = parsed("fs", "fs", "--timeout", "2.5", "--threads", "7", "--namespace", "abc")
    assert (retry_of(said).timeout_s, said.threads, prefix_of(said)) == (2.5, 7, "v1/abc")
    assert prefix_of(parsed("fs", "fs", "--prefix", "v1/a")) == "v1/a"
    assert prefix_of(parsed("fs", "fs")) == ""
    for wrong in (["--threads", "0"], ["--threads", "257"], ["--timeout", "inf"], ["--timeout", "x"]):
        with pytest.raises(SystemExit):
            parsed("fs", "fs", *wrong)


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(("terminal", "flags", "shows"), [
    (True, [], True),
    (True, ["--no-progress"], False),
    (False, [], False),
    (False, ["--progress"], True),
])  # fmt: skip
def test_progress_goes_to_terminals_and_where_it_is_asked_for(
    terminal: bool, flags: list[str], shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    with Progress(parsed("fs", "fs", *flags)) as progress:
        progress.show("a long line of 3")
        progress.show("short")
        progress.clear()
        progress.show("last")
    text = screen.getvalue()
    assert ("a long line of 3" in text) is shows
    if terminal and shows:
        # A shorter line covers all of a longer one, and at the end nothing is left.
        assert "\rshort           \r" in text
        assert text.endswith("\rlast\r    \r")
    elif shows:
        assert text.splitlines() == ["a long line of 3", "short", "last"]


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(-3600, "in the future"), (-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (864000, "10 d")],
)
def test_ages_are_told_in_the_unit_that_fits(age_s: float, said: str) -> None:
    assert human_age(age_s) == said
