"""`kvstore keygen` makes a key that nodes take, that nobody else can read, and that is never lost to a second run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_sdk.cli import main


def test_the_key_is_one_that_a_node_takes_and_its_users_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    from kvstore_sdk_backends.p2p.keys import read_key

    path = tmp_path / "group.key"
    before = os.umask(0)
    try:
        assert main(["keygen", str(path)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_key("a test", str(path))
    printed = capsys.readouterr()
    assert str(path) in printed.out
    assert key.secret.decode() not in printed.out + printed.err + repr(key)


def test_two_keys_differ(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    assert main(["keygen", str(tmp_path / "a")]) == main(["keygen", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_there_already_stays(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    path = tmp_path / "group.key"
    if kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(tmp_path / "elsewhere")
    assert main(["keygen", str(path)]) == 2
    assert f"{path}: exists" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    assert kind != "file" or path.read_text() == "precious"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    assert main(["keygen", str(tmp_path / "no" / "group.key")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be written: No such file or directory; name a file in a folder that is there" in said


WITHOUT_ZMQ = """
import sys
sys.modules["zmq"] = None
from kvstore_sdk.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_pyzmq_it_names_the_extra_and_other_commands_work(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", WITHOUT_ZMQ, *arguments], capture_output=True, text=True, timeout=250, check=False)

    done = run("keygen", str(tmp_path / "group.key"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "kvstore-sdk[p2p]" in done.stderr
    assert not (tmp_path / "group.key").exists()
    listed = run("backends", "p2p")
    assert listed.returncode == 0
    assert "key_file" in listed.stdout
