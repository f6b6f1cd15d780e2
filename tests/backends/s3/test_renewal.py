"""Credentials that are renewed while requests wait: slow sources, sources that fail, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs")

from fault_proxy import FaultProxy
from proxy_faults import Fault, expired_token
from s3_server import REGION

from kvstore_sdk.backend import ConfigError, Deadline, DeniedError, Get, GetResult, GetStatus, Put, PutStatus, Region, TimedOutError
from kvstore_sdk_backends.s3 import S3Backend, open_s3
from kvstore_sdk_backends.s3.sessions import _Program

NAME = "v1/record"
SECRET = "secret/of+this-test=1"
SIZE_BYTES = 4096
LIMIT_S = 20.0
SLOW_S = 4.0


class Source:
    """A program that prints credentials, as a profile of the AWS configuration names one; and how often it ran."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "credentials.sh"
        self._runs = folder / "runs"
        self.config = folder / "config"
        self.config.write_text(f"[profile kv]\ncredential_process = sh {self._script}\n")
        self.credentials = folder / "credentials"
        self.credentials.write_text("")
        self.prints("KEYOLD")

    def prints(self, key: str, *, after_s: float = 0.0, valid_s: float | None = None) -> None:
        until = "" if valid_s is None else f', "Expiration": "{(datetime.now(UTC) + timedelta(seconds=valid_s)).isoformat()}"'
        made = f'{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "{SECRET}"{until}}}'
        self._script.write_text(f"echo $$ >> {self._runs}\nsleep {after_s}\necho '{made}'\n")

    def hangs(self) -> None:
        self._script.write_text(f"echo $$ >> {self._runs}\nexec sleep 600\n")

    def fails(self, word: str) -> None:
        self._script.write_text(f"echo {word} >&2\nexit 3\n")

    @property
    def runs(self) -> list[int]:
        """Process ids."""
        return [int(line) for line in self._runs.read_text().split()]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(made.config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(made.credentials))
    return made


@pytest.fixture
def opened(source: Source, proxy: FaultProxy, bucket: str, request: pytest.FixtureRequest) -> Callable[..., S3Backend]:
    def open_it(**options: Any) -> S3Backend:
        given = {"endpoint": proxy.endpoint, "profile": "kv", "probe": "off"} | options
        backend = open_s3(f"{bucket}/kv", engine="s3fs", region=REGION, **given)
        request.addfinalizer(backend.close)
        return backend

    return open_it


def get(backend: S3Backend, within_s: float = LIMIT_S) -> GetResult:
    region = Region(SIZE_BYTES)
    try:
        [result] = backend.get([Get(NAME, [region.buffer(0, SIZE_BYTES)])], Deadline.after(within_s))
    finally:
        region.close()
    return result


def put(backend: S3Backend) -> PutStatus:
    region = Region(SIZE_BYTES)
    try:
        [result] = backend.put([Put(NAME, [region.buffer(0, SIZE_BYTES)])], Deadline.after(LIMIT_S))
    finally:
        region.close()
    return result.status


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_source_slower_than_every_deadline_is_asked_once(opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy) -> None:
    backend = opened()
    assert put(backend) is PutStatus.STORED
    source.prints("KEYNEW", after_s=SLOW_S)
    # Whatever the old ones sign is refused, until the new ones are there.
    proxy.script(Fault(expired_token(), "GET"))
    statuses = []
    while len(source.runs) < 2 or is_running(source.runs[1]):
        statuses.append(get(backend, 0.25).status)
        assert len(statuses) < 100
    # While the last one waited the new ones came, and were refused too.
    assert set(statuses[:-1]) == {GetStatus.TIMED_OUT}
    proxy.heal()
    assert get(backend).status is GetStatus.FOUND
    assert len(source.runs) == 2
    assert any("KEYNEW" in seen.headers["authorization"] for seen in proxy.requests)


@pytest.mark.parametrize("what", ["gone", "half written", "fails", "no JSON"])
def test_credentials_that_cannot_be_read_anew_are_for_the_operator_to_mend(
    opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy, what: str
) -> None:
    backend = opened()
    assert put(backend) is PutStatus.STORED
    if what == "gone":
        source.config.write_text("")
    elif what == "half written":
        source.credentials.write_text("[kv]\naws_access_key_id")
    elif what == "fails":
        source.fails("vault-is-sealed")
    else:
        source.prints("KEY'; echo 'more")
    proxy.script(Fault(expired_token(), "GET", times=1))
    error = get(backend).error
    assert type(error) is DeniedError
    assert "credentials cannot be had: " in str(error)
    assert "profile" in str(error)
    assert what != "fails" or "CredentialRetrievalError: custom-process" in str(error)
    assert "vault" not in str(error), "a source's own words may be credentials"
    assert "for this backend to fix" not in str(error)
    assert "\n" not in str(error)
    assert get(backend).status is GetStatus.FOUND, "the old ones are as good as they were"


def test_a_source_that_fails_while_a_store_is_opened_is_named(opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy) -> None:
    source.fails("vault-is-sealed")
    with pytest.raises(ConfigError, match=r"profile: .*CredentialRetrievalError: custom-process") as raised:
        opened()
    assert "\n" not in str(raised.value)
    assert "vault" not in str(raised.value)
    assert raised.value.__context__ is None
    assert proxy.requests == []


def test_a_source_that_hangs_while_a_store_is_opened_is_named_and_ended(
    opened: Callable[..., S3Backend], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_sdk_backends.s3.opening.CREDENTIALS_S", 1.0)
    source.hangs()
    with pytest.raises(TimedOutError, match="finding credentials: not done within 1 s"):
        opened()
    until(lambda: not any(map(is_running, source.runs)))


def test_a_program_is_over_when_whoever_waited_for_it_was_cancelled_twice() -> None:
    """As by the end of a loop, while it is being ended. Otherwise nobody hears of its end, which warns when it is collected."""

    async def steps() -> int | None:
        program = await _Program.start("sleep", "600", stdout=asyncio.subprocess.PIPE)
        waiting = asyncio.create_task(program.communicate())
        await asyncio.sleep(0)
        # The first one takes some turns to get there.
        for _ in range(6):
            waiting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return program.returncode

    assert asyncio.run(steps()) == -signal.SIGKILL


def test_a_request_waits_for_credentials_that_expire_on_no_clock_of_its_own(
    opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy
) -> None:
    """The time-outs of a request begin when it does."""
    source.prints("KEYOLD", valid_s=300)
    backend = opened(connect_timeout_s=2.5, read_timeout_s=2.5, request_timeout_s=3.0, request_retries=0)
    # From here on they last.
    source.prints("KEYNEW", after_s=SLOW_S, valid_s=7200)
    assert put(backend) is PutStatus.STORED
    runs = len(source.runs)
    assert get(backend).status is GetStatus.FOUND
    assert len(source.runs) == runs
    assert all("KEYNEW" in seen.headers["authorization"] for seen in proxy.requests)


def test_closing_ends_a_source_that_hangs(
    opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened()
    source.hangs()
    proxy.script(Fault(expired_token(), "GET"))
    assert get(backend, 2.5).status is GetStatus.TIMED_OUT
    until(lambda: len(source.runs) == 2)
    assert is_running(source.runs[1])
    backend.close()
    until(lambda: not is_running(source.runs[1]))
    # Whatever was left open warns when it is collected, and warnings are errors.
    gc.collect()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_no_task_is_left_whose_failure_nobody_saw(
    opened: Callable[..., S3Backend], source: Source, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened()
    source.fails("vault-is-sealed")
    proxy.script(Fault(expired_token(), "GET"))
    for _ in range(3):
        assert isinstance(get(backend).error, DeniedError)
    backend.close()
    gc.collect()
    assert [record for record in caplog.records if record.name == asyncio.__name__] == []
