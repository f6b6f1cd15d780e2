"""`kvstore bench` measures what it says, ends in bounded time whatever a store does, and leaves a store as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bench_backends

from kvstore_sdk.backend import Deadline, open_backend
from kvstore_sdk.bench.cells import Cell
from kvstore_sdk.cli import bench, main
from kvstore_sdk.cli.bench_report import Results, picture
from kvstore_sdk_backends.memory import open_memory

LOCATION = "cli-bench"
QUICK = ["--seconds", "1", "--rounds", "1", "--sizes", "4KiB,64KiB", "--threads", "1,2", "--bytes", "1MiB", "--timeout", "5"]


@pytest.fixture(autouse=True)
def healed() -> Iterator[None]:
    """What hangs in a store goes on when the test is over."""
    bench_backends.opened.clear()
    yield
    for backend in bench_backends.opened:
        backend.heal()


def left(location: str = LOCATION) -> list[str]:
    """Names in the store of that name."""
    return [entry.name for entry in open_memory(location).list("", Deadline.after(5)).entries]


def files(root: Path) -> list[str]:
    """All that is below a folder, but for what the backend `fs` keeps for itself."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if ".kvstore" not in path.relative_to(root).parts)


def faulty(how: str) -> list[str]:
    return ["bench", "bench_backends:open_faulty", "--location", LOCATION, "--option", f"how={how}"]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The JSON of a run, which succeeds."""

    def run(*arguments: str) -> dict[str, Any]:
        assert main(["bench", *QUICK, *arguments, "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_a_store_in_memory_is_measured_with_and_without_integrity_and_beside_memcpy(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("memory", "--location", LOCATION, "--seconds", "8")
    cells = {(cell["operation"], cell["place"], cell["payload_bytes"], cell["threads"]): cell["rates"] for cell in found["items"]}
    assert set(cells) == {
        (operation, "", size, threads) for operation in ("put", "get", "exists", "delete") for size in (4096, 65536) for threads in (1, 2)
    }
    for (operation, *_), rates in cells.items():
        assert set(rates) - {"memcpy"} == {"target", "again", "integrity off"}
        assert ("memcpy" in rates) is (operation in ("put", "get"))
        assert {len(found) for found in rates.values()} == {1}
        assert all(rate > 0.0 for found in rates.values() for rate in found)
    assert {(one["operation"], one["side"]) for one in found["latencies"]} == {
        (operation, "target") for operation in ("put", "get", "exists")
    }
    assert all(0.0 < one["p50_s"] <= one["p99_s"] and one["samples"] > 0 for one in found["latencies"])
    assert (found["command"], found["target"], found["against"]) == ("bench", f"memory at {LOCATION}", None)
    assert left() == []


def test_a_folder_is_measured_direct_cold_and_warm_beside_plain_files_and_is_left_as_it_was(
    tmp_path: Path, measured: Callable[..., dict[str, Any]]
) -> None:
    url = (tmp_path / "kv").as_uri()
    open_backend(url).close()
    (tmp_path / "kv" / "v1" / "other").mkdir(parents=True)
    (tmp_path / "kv" / "v1" / "other" / "file").write_text("of somebody else")
    before = files(tmp_path)
    found = measured(url, "--seconds", "15")
    names = {f"{cell['operation']} {cell['place']}" for cell in found["items"]}
    told = " ".join(found["notes"])
    assert {"put buffered", "get warm", "exists buffered", "delete buffered"} <= names
    # A filesystem without direct I/O, and one whose pages cannot be dropped, say so.
    assert ("get direct" in names and "put direct" in names) or "nothing was measured direct" in told
    assert "get cold" in names or "could not be dropped" in told
    assert all("plain files" in cell["rates"] for cell in found["items"] if cell["place"] in ("direct", "buffered", "warm"))
    assert files(tmp_path) == before


def test_a_store_that_was_told_how_to_do_its_input_and_output_is_measured_like_that(
    tmp_path: Path, measured: Callable[..., dict[str, Any]]
) -> None:
    found = measured((tmp_path / "kv").as_uri(), "--option", "direct_io=never")
    assert {cell["place"] for cell in found["items"]} <= {"buffered", "warm", "cold"}
    found = measured((tmp_path / "kv").as_uri() + "?direct_io=auto")
    assert {cell["place"] for cell in found["items"]} <= {"", "cold"}


def test_two_stores_are_compared_in_the_same_rounds(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("memory", "--location", LOCATION, "--against", (tmp_path / "kv").as_uri(), "--seconds", "8")
    assert found["against"] == (tmp_path / "kv").as_uri()
    assert all(len(cell["rates"]["against"]) == len(cell["rates"]["target"]) for cell in found["items"] if cell["place"] == "")
    assert {one["side"] for one in found["latencies"]} == {"target", "against"}
    assert left() == []
    assert files(tmp_path / "kv") == []


def test_one_store_is_compared_with_itself_under_other_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = (tmp_path / "kv").as_uri()
    assert main(["bench", url, "--option", "direct_io=never", "--against-option", "direct_io=auto", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "target / against" in printed
    assert f"against {url}" in printed


def test_tables_say_what_was_measured_in_text_and_markdown_and_the_plot_is_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "plot.svg"
    assert main(["bench", "memory", "--location", LOCATION, *QUICK, "--markdown", str(page), "--svg", str(plot)]) == 0
    printed = capsys.readouterr().out
    for text in (printed, page.read_text()):
        assert "MB/s of payload" in text
        assert "records a second" in text
        assert "target / target (noise)" in text
        assert "p99" in text
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) <= 3  # a table has equally many columns in all its rows


def test_a_plot_has_the_same_order_of_sides_however_rounds_were_drawn_and_no_interval_of_two_rounds() -> None:
    def plot(sides: list[str], rounds: int) -> str:
        cell = Cell("put", "", 4096, 1, {side: [1e3 + 100 * number for number in range(rounds)] for side in sides})
        return picture(Results([cell], [], {"target": "memory"}, []))

    sides = ["plain files", "memcpy", "target", "again", "integrity off"]
    assert plot(sides, 5) == plot(sides[::-1], 5)
    assert 'class="whisker"' in plot(sides, 5)
    assert 'class="whisker"' not in plot(sides, 2)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("wrong bytes", "corrupt"),
        ("get misses", "does not find what was stored"),
        ("get says another length", "corrupt (length)"),
        ("get finds and writes nothing", "corrupt"),
        ("get raises", "RuntimeError (a bug)"),
        ("get hangs", "get: the backend did not return within 0.5 s"),
        ("put exits", "SystemExit"),
        ("put says it is there", "that nobody has stored"),
        ("put answers nonsense", "no list of an answer for each item"),
        ("put is full after a while", "the disk is full"),
        ("exists misses", "does not find what was stored"),
        ("exists fails", "the store is down"),
    ],
)
@pytest.mark.parametrize("integrity", ["on", "off"])
def test_a_store_that_goes_wrong_is_one_clear_error_and_left_empty(
    how: str, said: str, integrity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*faulty(how), *QUICK, "--timeout", "0.5", "--integrity", integrity, "--json"]) == 1
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("kvstore: ")
    assert said in line
    assert said in json.loads(printed.out)["error"]
    assert left() == []


def test_a_put_that_never_returns_is_given_up_and_what_it_may_store_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*faulty("put hangs"), *QUICK, "--timeout", "0.5"]) == 1
    told, error = sorted(capsys.readouterr().err.splitlines(), key=lambda line: "did not return within" in line)
    assert "put: the backend did not return within 0.5 s" in error
    assert "a put that did not return may still store them" in told
    assert "kvstore prune --namespace" in told


def test_records_that_cannot_be_removed_are_told_with_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*faulty("delete fails"), *QUICK]) == 1
    told = next(line for line in capsys.readouterr().err.splitlines() if "prune" in line)
    names = left()
    namespace = told.partition("--namespace ")[2].split()[0]
    assert names
    assert all(name.startswith(f"v1/{namespace}/") for name in names)
    assert main(["prune", "memory", "--location", LOCATION, "--namespace", namespace]) == 0
    assert left() == []


def test_a_store_that_only_says_that_it_removes_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bench_backends:open_delete_lies", "--location", LOCATION, *QUICK]) == 1
    assert "says that it removed what is still there" in capsys.readouterr().err


def test_a_store_that_removes_nothing_is_written_to_only_when_records_may_stay(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["bench", "bench_backends:open_no_delete", "--location", "cli-bench-kept", *QUICK]
    assert main(target) == 1
    assert "--leave-records" in capsys.readouterr().err
    assert left("cli-bench-kept") == []
    assert main([*target, "--leave-records"]) == 0
    assert "(--leave-records)" in capsys.readouterr().err
    assert left("cli-bench-kept")


def test_a_read_only_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bench_backends:open_read_only", "--location", LOCATION, *QUICK]) == 1
    assert "read-only" in capsys.readouterr().err


def test_no_more_is_asked_of_a_store_than_it_declares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bench_backends:open_narrow", "--location", LOCATION, *QUICK]) == 0, capsys.readouterr().err
    assert "takes 1 calls at a time" in capsys.readouterr().out


def test_a_store_without_room_is_told_before_anything_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = (tmp_path / "kv").as_uri()
    assert main(["bench", f"{url}?max_bytes=1MiB", "--sizes", "256KiB", "--threads", "8"]) == 1
    assert "has room for" in capsys.readouterr().err
    assert files(tmp_path / "kv") == []


def test_a_record_that_the_store_does_not_take_is_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--location", LOCATION, "--option", "max_record_bytes=8192", "--sizes", "8KiB"]) == 2
    assert "--sizes" in capsys.readouterr().err


def test_buffers_that_would_take_the_memory_of_the_machine_are_a_wrong_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill the process, and records would stay."""
    assert main(["bench", "memory", "--location", LOCATION, "--sizes", "512MiB", "--threads", "256"]) == 2
    assert "bytes of memory with so many --threads" in capsys.readouterr().err
    monkeypatch.setattr(bench, "free_memory_bytes", lambda: 1 << 20)
    assert main(["bench", "memory", "--location", LOCATION, *QUICK, "--sizes", "1MiB"]) == 2
    assert left() == []


def test_a_store_that_does_not_open_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    assert main(["bench", "bench_backends:open_hanging", "--location", LOCATION, "--timeout", "0.2"]) == 1
    assert time.monotonic() - began_s < 15.0
    assert "did not return within 0.2 s" in capsys.readouterr().err


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TOKEN", "hunter2")
    assert main([*faulty("nothing"), "--option", "token=env:BENCH_TOKEN", *QUICK, "--progress"]) == 0
    assert main([*faulty("wrong bytes"), "--option", "token=env:BENCH_TOKEN", *QUICK]) == 1
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err


def test_a_location_is_published_without_what_may_be_secret_in_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "plot.svg"
    command = ["bench", "bench_backends:open_with_a_secret_location", "--location", "store://me:hunter2@there/kv?token=hunter2", *QUICK]
    assert main([*command, "--markdown", str(page), "--svg", str(plot)]) == 0
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    shown = printed.out + printed.err + page.read_text() + plot.read_text()
    assert "at store://there/kv" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    "wrong",
    [
        ["--sizes", "1000"],
        ["--sizes", ""],
        ["--threads", "0"],
        ["--threads", "257"],
        ["--seconds", "0"],
        ["--rounds", "x"],
        ["--bytes", "1"],
    ],
    ids=" ".join,
)
def test_arguments_out_of_bounds_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "memory", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_an_hour_is_spent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "memory", "--location", LOCATION, "--svg", str(tmp_path / "nowhere" / "plot.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_fails_beside_the_target_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "memory", "--location", LOCATION, *QUICK, "--against", "bench_backends:open_faulty"]
    assert main([*command, "--against-location", "cli-bench-other", "--against-option", "how=wrong bytes"]) == 1
    assert "against: get " in capsys.readouterr().err
    assert left() == left("cli-bench-other") == []


def test_a_backend_that_fails_to_take_memory_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bench_backends:open_without_memory", "--location", LOCATION, *QUICK]) == 1
    assert "register_region: the backend raised MemoryError" in capsys.readouterr().err


def test_fio_takes_part_when_it_is_asked_for_and_leaves_no_files(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = (tmp_path / "kv").as_uri()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        assert main(["bench", url, *QUICK, "--fio"]) == 2
        assert "apt-get install fio" in capsys.readouterr().err
        # One that fails is an error like any other.
        (tmp_path / "fio").write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
        (tmp_path / "fio").chmod(0o755)
        if main(["bench", url, *QUICK, "--option", "direct_io=always", "--fio"]) == 2:
            pytest.skip("no direct I/O here")
        assert "fio: no such thing" in capsys.readouterr().err
    if shutil.which("fio") is not None:
        found = measured(url, "--option", "direct_io=always", "--fio")
        assert all("fio" in cell["rates"] for cell in found["items"] if cell["operation"] in ("put", "get"))
    assert files(tmp_path / "kv") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    command = [sys.executable, "-m", "kvstore_sdk", "bench", root.as_uri(), "--sizes", "64KiB", "--seconds", "120", "--rounds", "1000"]
    # Started by a background shell or `nohup`, say, it would not hear of them.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
    try:
        end_s = time.monotonic() + 60.0
        while not list(root.glob("v1/*/*/*")):
            assert process.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.kill(process.pid, number)
        if number is not signal.SIGINT:
            # Whoever ends a process asks more than once.
            os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60.0)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, b"")
    assert files(root) == []
    assert [path.name for path in root.iterdir()] == [".kvstore"]


def test_what_a_run_would_need_is_shared_out_over_its_seconds() -> None:
    """A run has a bound: each cell gets its part of the time that is left."""
    assert bench._sizes("4KiB,4096,1MiB") == [4096, 1 << 20]
    assert bench._threads("1,8,1") == [1, 8]
