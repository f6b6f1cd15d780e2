"""What every command promises: results on standard output, errors as one line and an exit code."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kvstore_sdk.cli import demo_vllm, main
from kvstore_sdk.cli.report import Report


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvstore-sdk {version('kvstore-sdk')}\n"


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvstore_sdk", "--version"], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, f"kvstore-sdk {version('kvstore-sdk')}\n")


def test_a_missing_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["backends", "nope"], "backend nope: backend: is not known; installed are abfs, file, fs, gs, memory, p2p, s3"),
        (["backends", "no_such_module:factory"], "no_such_module"),
        (["demo", "--no-vllm", "--store", "memory:"], "demo: store: its capabilities say shared=False, so engine B"),
        (["demo", "--no-vllm", "--location", "/tmp"], "demo: location: goes with --store"),
        (["demo", "--no-vllm", "--option", "a=1"], "demo: option: goes with --store"),
        (["demo", "--no-vllm", "--store", "fs", "--option", "a=1", "--option", "a=2"], "demo: option: names one option twice"),
        (["demo", "--no-vllm", "--store", ""], "demo: store: must not be empty"),
        (["demo", "--no-vllm", "--store", "/tmp/a b"], "demo: store: is a path, not a URL; write file:///tmp/a%20b"),
        (["demo", "--no-vllm", "--store", "file:///nowhere/at/all"], "location: /nowhere/at does not exist"),
    ],
    ids=[
        "unknown backend",
        "unknown module",
        "store of one process",
        "location alone",
        "option alone",
        "option twice",
        "nothing",
        "path",
        "missing folder",
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvstore: ")
    assert named in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("--prompts", "x", "argument --prompts: 'x' must be a whole number from 1 to 1000"),
        ("--prompts", "0", "argument --prompts: '0' must be a whole number from 1 to 1000"),
        ("--option", "hunter2", "argument --option: must be NAME=VALUE"),
    ],
)
def test_a_wrong_argument_is_told_with_what_it_must_be(argument: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--no-vllm", argument, value])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "hunter2" not in printed


@pytest.mark.parametrize("query", ["secret_key=hunter2", "read_only=true"])
def test_a_refused_store_is_left_as_it_is_and_values_are_not_shown(query: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--no-vllm", "--store", f"file://{tmp_path}?{query}"]) == 2
    printed = capsys.readouterr()
    assert query.partition("=")[0] in printed.err or "read-only" in printed.err
    assert "hunter2" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); from kvstore_sdk.cli import main; sys.exit(main(['backends']))"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        # It begins when there is nobody any more.
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(250) == 1


def test_without_a_standard_output_the_exit_code_tells() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m kvstore_sdk backends >&-"
    ran = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=250, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_an_interrupted_report_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Report("verify", as_json=True):
        raise KeyboardInterrupt
    assert json.loads(capsys.readouterr().out) == {"command": "verify", "items": [], "error": "interrupted"}


def test_the_demo_without_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_vllm, "missing_packages", lambda: ["vllm"])
    assert main(["demo"]) == 2
    assert "kvstore demo --no-vllm" in capsys.readouterr().err
