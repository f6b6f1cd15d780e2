"""The command `kvstore conformance` says how a run ended, whatever the backend does to the process that it runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

GOOD = (
    "from kvstore_sdk_backends.memory import MemoryBackend, open_memory\n\n\ndef open_store(location):\n    return open_memory(location)\n"
)
WRONG_BYTES = """
from kvstore_sdk.testing import Fault, FaultyBackend, WrongBytes
from kvstore_sdk_backends.memory import open_memory


def open_store(location):
    return FaultyBackend(open_memory(location), [Fault("get", WrongBytes())])


"""
HIDES_ITS_EXIT = "import atexit\nimport os\n\natexit.register(os._exit, 0)\n"
ENDS_THE_PROCESS = "import os\n\nMemoryBackend.put = lambda *_: os._exit(0)\n"
KEEPS_THE_PROCESS = "import threading\n\nthreading.Thread(target=threading.Event().wait).start()\n"


def conformance(folder: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "acme_store.py").write_text(source)
    command = [sys.executable, "-m", "kvstore_sdk", "conformance", "acme_store:open_store", "--profile=core", "--largest=64KiB", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=250)
    finally:
        process.kill()
    return process.returncode, out, err


ONE_CHECK = "-k=test_get_answers_found_with_exactly_the_bytes_that_were_stored"


def test_a_backend_that_hides_the_exit_code_cannot_turn_a_failure_into_a_success(tmp_path: Path) -> None:
    code, out, _ = finished(conformance(tmp_path, WRONG_BYTES + HIDES_ITS_EXIT, ONE_CHECK))
    assert code == 1
    assert "KV-CORE-01" in out


def test_a_backend_that_ends_the_process_gets_no_verdict(tmp_path: Path) -> None:
    code, _, err = finished(conformance(tmp_path, GOOD + ENDS_THE_PROCESS, ONE_CHECK))
    assert (code, err) == (1, "kvstore conformance: the backend ended the process before the run was over: no verdict\n")


def test_a_backend_that_keeps_the_process_is_left_behind(tmp_path: Path) -> None:
    code, out, _ = finished(conformance(tmp_path, GOOD + KEEPS_THE_PROCESS, ONE_CHECK))
    assert code == 0
    assert "1 pass" in out


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore SIGINT, and all that is started there inherits that; a handler is not inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_ends_and_fails(tmp_path: Path, sent: signal.Signals, interruptible: None) -> None:
    slow = GOOD + "import time\nput = MemoryBackend.put\nMemoryBackend.put = lambda *given: (time.sleep(0.5), put(*given))[1]\n"
    (tmp_path / "acme_store.py").write_text(slow)
    process = conformance(tmp_path, slow)
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end_s = time.monotonic() + 60.0
    while not (children := started.read_text().split()):
        assert time.monotonic() < end_s, "the run did not start"
        time.sleep(0.05)
    # Into the run, or what comes before: both are to end.
    time.sleep(2.0)
    # As a terminal does, to the whole group; a supervisor sends SIGTERM to one.
    os.kill(process.pid, sent)
    if sent is signal.SIGINT:
        for child in children:
            os.kill(int(child), sent)
    code, _, _ = finished(process)
    assert code not in (0, 4)
    end_s = time.monotonic() + 60.0
    while left := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < end_s, f"processes {left} were left behind"
        time.sleep(0.05)
