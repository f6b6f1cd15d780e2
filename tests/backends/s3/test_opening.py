"""Options of an S3 store: what is refused before anything is sent, and what each may be."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.backend import Backend, ConfigError, backend_options, is_valid_name, open_backend
from kvstore_sdk_backends.s3.opening import check_location, open_s3

pytestmark = pytest.mark.usefixtures("in_this_process")

KEYS = {"access_key_id": "KEY", "secret_access_key": "a-secret"}

# A process of its own: this one may have imported anything.
IMPORTS_LITTLE = """
import sys
from kvstore_sdk.backend import backend_options
for scheme in ("s3", "gs", "abfs"):
    backend_options(scheme)
clients = {"s3fs", "fsspec", "aiobotocore", "botocore", "boto3", "aiohttp", "nixl", "torch", "gcsfs", "adlfs"}
loaded = sorted(clients & {name.split(".")[0] for name in sys.modules})
sys.exit(f"imported {loaded}" if loaded else 0)
"""

WITHOUT_S3FS = """
import sys
sys.modules["s3fs"] = None
from kvstore_sdk.backend import ConfigError, open_backend
try:
    open_backend("s3://bucket/prefix", {"endpoint": "http://127.0.0.1:1", "engine": "s3fs"})
except ConfigError as error:
    sys.exit(0 if error.field == "engine" and "pip install 'kvstore-sdk[s3]'" in str(error) else str(error))
sys.exit("it was opened")
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    return done.stderr[-2000:] if done.returncode else ""


def refused(location: str = "bucket/kv", **options: Any) -> ConfigError:
    """What is wrong, of a store that is never reached: nobody listens there."""
    with pytest.raises(ConfigError) as raised:
        open_s3(location, **({"endpoint": "http://127.0.0.1:1", "engine": "s3fs", "connect_timeout_s": 1.0} | KEYS | options))
    assert "\n" not in str(raised.value)
    return raised.value


def test_its_options_can_be_read_without_its_libraries() -> None:
    assert run(IMPORTS_LITTLE) == ""


def test_without_its_library_it_says_what_to_install() -> None:
    assert run(WITHOUT_S3FS) == ""


def test_every_option_is_explained() -> None:
    options = backend_options("s3")
    assert not [name for name, option in options.items() if not option.help]
    assert {name for name, option in options.items() if option.secret} == {"access_key_id", "secret_access_key", "session_token"}
    assert not [name for name, option in options.items() if option.required]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean endpoint"):
        open_backend("s3://bucket/kv?end_point=http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("location", "bucket", "prefix"),
    [
        ("bucket", "bucket", ""),
        ("bucket/", "bucket", ""),
        ("bucket/kv", "bucket", "kv"),
        ("bucket/kv/team=a/", "bucket", "kv/team=a"),
        ("my.bucket-1/.hidden", "my.bucket-1", ".hidden"),
    ],
)
def test_a_location_is_a_bucket_and_a_prefix(location: str, bucket: str, prefix: str) -> None:
    assert check_location("backend s3", location) == (bucket, prefix)


NO_LOCATIONS = ["", "/", "/kv", "b", "-bucket/kv", "bucket//kv", "bucket/../kv", "bucket/./kv", "bucket/k v", "bucket/kv\n"]
NO_LOCATIONS += ["s3://bucket/kv", "bücket/kv", f"bucket/{'x' * 800}", f"{'b' * 300}/kv", "bucket/kv?x", "bucket/a%20b"]


@pytest.mark.parametrize("location", NO_LOCATIONS)
def test_what_is_no_location_is_refused(location: str) -> None:
    assert refused(location).field == "location"


def test_a_slash_too_many_is_shown_to_be_dropped() -> None:
    assert str(refused("bucket//kv")).endswith("begins with a slash; write bucket/kv")


def test_a_directory_bucket_is_refused_since_it_lists_in_no_order() -> None:
    error = refused("kv--euc1-az1--x-s3/kv")
    assert error.field == "location"
    assert "not sorted" in str(error)


@given(st.text())
def test_whatever_is_accepted_makes_keys_that_fit(location: str) -> None:
    try:
        bucket, prefix = check_location("backend s3", location)
    except ConfigError:
        return
    assert bucket
    assert len(f"{prefix}/{'n' * 255}".encode()) <= 1024
    assert is_valid_name(bucket) or "." in bucket


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("endpoint", {"endpoint": "127.0.0.1:9000"}),
        ("endpoint", {"endpoint": "ftp://host"}),
        ("endpoint", {"endpoint": "http://"}),
        ("endpoint", {"endpoint": "http://host:99999"}),
        ("endpoint", {"endpoint": "http://ho st"}),
        ("endpoint", {"endpoint": "http://host/?x=1"}),
        ("addressing", {"endpoint": "http://10.0.0.1:9000", "addressing": "virtual"}),
        ("addressing", {"endpoint": "http://[::1]:9000", "addressing": "virtual"}),
        ("region", {"region": "eu central 1"}),
        ("ca_bundle", {"ca_bundle": "/no/such/file"}),
        ("ca_bundle", {"ca_bundle": __file__}),
        ("ca_bundle", {"ca_bundle": "/no/such/file", "verify_tls": False}),
        ("secret_access_key", {"secret_access_key": None}),
        ("access_key_id", {"access_key_id": None}),
        ("session_token", {"access_key_id": None, "secret_access_key": None, "session_token": "t"}),
        ("secret_access_key", {"secret_access_key": "a-secret\n"}),
        ("access_key_id", {"access_key_id": ""}),
        ("profile", {"profile": "kv"}),
        ("profile", {"access_key_id": None, "secret_access_key": None, "profile": ""}),
        ("profile", {"access_key_id": None, "secret_access_key": None, "profile": "no-such-profile"}),
        ("profile", {"access_key_id": None, "secret_access_key": None, "profile": "no-such\nprofile"}),
        ("storage_class", {"storage_class": "GLACIER"}),
        ("storage_class", {"storage_class": "DEEP_ARCHIVE"}),
        ("storage_class", {"storage_class": "two words"}),
        ("tags", {"tags": ""}),
        ("tags", {"tags": "name"}),
        ("tags", {"tags": "a=1&a=2"}),
        ("tags", {"tags": "=1"}),
        ("tags", {"tags": "&".join(f"k{number}=v" for number in range(11))}),
        ("tags", {"tags": f"{'k' * 129}=v"}),
        ("max_bytes", {"max_bytes": 1 << 30}),
    ],
)
def test_an_option_that_cannot_be_used_is_named(field: str, options: dict[str, Any]) -> None:
    error = refused(**options)
    assert error.field == field
    assert "a-secret" not in str(error)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:hunter2@host",
        "http://host/#hunter2",
        "http://host?token=hunter2",
        "user:hunter2@host:9000",
        "http://user:hunter2@host:99999",
        "http://user:hunter2[@host",
        "http:/user:hunter2@host",
    ],
)
def test_an_endpoint_with_credentials_is_not_repeated(endpoint: str) -> None:
    assert "hunter2" not in str(refused(endpoint=endpoint))


def test_an_endpoint_of_the_environment_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:1")
    error = refused(endpoint=None)
    assert error.field == "endpoint"
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("concurrency", 0),
        ("concurrency", 1025),
        ("request_retries", -1),
        ("connect_timeout_s", 0),
        ("read_timeout_s", "1d"),
        ("request_timeout_s", 0),
        ("max_record_bytes", "6GiB"),
        ("checksums", "sometimes"),
        ("addressing", "dns"),
        ("engine", "boto3"),
        ("conditional_writes", True),
        ("probe", "maybe"),
    ],
)
def test_a_value_out_of_bounds_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        open_backend("s3://bucket/kv", {"endpoint": "http://127.0.0.1:1", option: value})
    assert raised.value.field == option


def test_a_size_for_all_is_refused_with_a_way_out() -> None:
    text = str(refused(max_bytes=1 << 40))
    assert "lifecycle rule" in text
    assert "kvstore prune" in text


def test_a_bundle_of_certificates_is_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    import certifi

    assert refused(ca_bundle=certifi.where()).field == "endpoint", "nobody listens there, but the bundle is good"
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    assert refused(ca_bundle=str(empty)).field == "ca_bundle"


def test_opening_in_vain_leaves_no_thread() -> None:
    pytest.importorskip("s3fs")
    import threading

    before = set(threading.enumerate())
    assert refused().field == "endpoint"
    # Whoever looked the name up has said so, and is about to end.
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    assert set(threading.enumerate()) <= before


def opened(**options: Any) -> Backend:
    return open_s3("bucket/kv", **({"endpoint": "http://127.0.0.1:1", "region": "us-east-1", "probe": "off"} | KEYS | options))


def logged(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    [record] = [record for record in caplog.records if record.name == "kvstore_sdk_backends.s3.opening"]
    return record.levelname, record.getMessage()


@pytest.mark.parametrize("engine", ["s3fs", "nixl"])
def test_the_engine_that_was_taken_is_logged_once(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(engine)
    caplog.set_level(logging.INFO)
    opened(engine=engine).close()
    assert logged(caplog) == ("INFO", f"s3://bucket/kv at http://127.0.0.1:1: engine {engine}")


@pytest.mark.parametrize(("installed", "level"), [(True, "WARNING"), (False, "INFO")])
def test_auto_tells_why_it_does_without_nixl(
    installed: bool, level: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loudly where somebody installed it for this."""
    pytest.importorskip("s3fs")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: installed or None if name == "nixl" else find_spec(name, *more))
    caplog.set_level(logging.INFO)
    # One of the settings that nixl cannot follow.
    opened(verify_tls=False).close()
    said = logged(caplog)
    assert said[0] == level
    assert said[1].startswith(
        "s3://bucket/kv at http://127.0.0.1:1: engine s3fs, since nixl cannot be used: nixl always verifies certificates"
    )
    with pytest.raises(ConfigError, match="engine: nixl always verifies certificates"):
        opened(engine="nixl", verify_tls=False)


def test_what_led_to_a_refusal_is_not_kept_with_it() -> None:
    """It holds the request, with what that was signed with."""
    pytest.importorskip("s3fs")
    assert refused().__context__ is None
