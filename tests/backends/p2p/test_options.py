"""What an operator writes is checked, and refused in one line, before anything listens, connects or starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvstore_sdk.backend import ConfigError, backend_options, open_backend, parse_options
from kvstore_sdk.isolation import open_isolated
from kvstore_sdk_backends.p2p import opening
from kvstore_sdk_backends.p2p.keys import read_key, write_key
from kvstore_sdk_backends.p2p.options import P2PSettings


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[P2PSettings]:
    """What would have been opened."""
    found: list[P2PSettings] = []
    monkeypatch.setattr(opening, "_open", found.append)
    return found


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    write_key("a test", str(tmp_path / "group.key"))
    return str(tmp_path / "group.key")


def settings(opened: list[P2PSettings], location: str = "127.0.0.1:0", **options: Any) -> P2PSettings:
    # As an entry of a configuration, where a number may be text.
    opening.open_p2p(location, **parse_options("a test", backend_options("p2p"), options))
    return opened.pop()


def refusal(location: str = "127.0.0.1:0", **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        opening.open_p2p(location, **parse_options("backend p2p", backend_options("p2p"), options))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("backend p2p: ")
    return refused.value


def test_without_options_it_listens_on_loopback_alone(opened: list[P2PSettings]) -> None:
    for made in (settings(opened), settings(opened, "127.0.0.1:0")):
        assert str(made.listen) == "127.0.0.1:0"
        assert (made.peers, made.serve_bytes, made.data, made.off_loopback, made.key) == ((), 0, "auto", False, None)


def test_a_url_carries_the_address_and_the_options(opened: list[P2PSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_sdk.backend.registry._check", lambda *_: None)
    open_backend("p2p://[::1]:7400?peers=127.0.0.1:7401-7403,localhost:7500&serve_bytes=1GiB&answer_timeout_s=500ms&data=zmq")
    made = opened.pop()
    assert str(made.listen) == "[::1]:7400"
    assert [str(peer) for peer in made.peers] == [*(f"127.0.0.1:{port}" for port in (7401, 7402, 7403)), "localhost:7500"]
    assert (made.serve_bytes, made.answer_timeout_s, made.data) == (1 << 30, 0.5, "zmq")


def test_the_data_parallel_index_is_added_to_a_port_that_was_given(opened: list[P2PSettings]) -> None:
    assert settings(opened, "127.0.0.1:7400", data_parallel_index=3).listen.port == 7403
    assert settings(opened, "127.0.0.1:0", data_parallel_index=3).listen.port == 0
    assert refusal("127.0.0.1:65534", data_parallel_index=2).field == "location"


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("0.0.0.0:7400", {}),
        ("[::]:7400", {}),
        ("10.0.0.1:7400", {}),
        ("a-name:7400", {}),
        ("127.0.0.1:0", {"peers": "10.0.0.1:7400"}),
        ("127.0.0.1:0", {"peers": "127.0.0.1:1,kv-headless:7400"}),
    ],
)
def test_off_loopback_a_key_is_needed_or_the_word_insecure(
    opened: list[P2PSettings], location: str, options: dict[str, Any], key_file: str
) -> None:
    refused = refusal(location, **options)
    assert refused.field == "key_file"
    assert "kvstore keygen" in refused.problem
    assert "insecure=true" in refused.problem
    assert opened == []
    assert settings(opened, location, **options, insecure="true").insecure
    made = settings(opened, location, **options, key_file=key_file)
    assert made.key == read_key("a test", key_file)
    assert made.key is not None
    assert made.key.secret.decode() not in repr(made)


def test_off_loopback_nixl_needs_the_word_trusted_and_the_devices(opened: list[P2PSettings], key_file: str) -> None:
    off = {"location": "10.0.0.1:7400", "key_file": key_file}
    assert settings(opened, **off).data == "zmq"
    refused = refusal(**off, data="nixl")
    assert refused.field == "data"
    assert "data_path_trusted=true" in refused.problem
    for data in ("nixl", "auto"):
        assert refusal(**off, data=data, data_path_trusted=True).field == "ucx_devices"
        made = settings(opened, **off, data=data, data_path_trusted=True, ucx_devices="eth0")
        assert (made.data, made.ucx_devices) == (data, "eth0")
    assert settings(opened, **off, data="zmq", data_path_trusted=True).data == "zmq"
    # On loopback there is nothing to trust.
    assert settings(opened, data="nixl").data == "nixl"


def test_a_key_and_insecure_contradict_each_other(key_file: str) -> None:
    assert refusal("127.0.0.1:1", key_file=key_file, insecure=True).field == "insecure"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peers", "127.0.0.1"),
        ("peers", "127.0.0.1:0"),
        ("data_ports", "7400"),
        ("data_ports", "9-1"),
        ("data", "rdma"),
        ("serve_bytes", -1),
        ("serve_bytes", 1),
        ("serve_bytes", "4KiB"),
        ("fan_out", 0),
        ("max_peers", 100_000),
        ("answer_timeout_s", 0),
        ("lease_s", "an hour"),
        ("ucx_devices", "eth0 --evil"),
        ("ucx_tls", "tcp\nx"),
        ("max_record_bytes", 0),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_option(field: str, value: object) -> None:
    assert refusal(**{field: value}).field == field


def test_where_it_listens_is_to_be_said() -> None:
    refused = refusal("")
    assert refused.field == "location"
    assert "where this node listens, host:port" in refused.problem


def test_a_path_to_a_key_is_not_expanded_and_said_so() -> None:
    assert "~ stands for nothing here" in refusal(key_file="~/group.key").problem
    assert "a relative one begins where this process was started" in refusal(key_file="keys/group.key").problem
    assert "bring the group's file there" in refusal(key_file="/nonexistent/group.key").problem
    assert "is no path" in refusal(key_file="a\0b").problem


def test_a_misspelt_option_is_refused_with_what_was_meant() -> None:
    assert "did you mean peers?" in str(refusal(peer="127.0.0.1:1"))


def test_in_a_child_of_its_own_it_is_refused() -> None:
    """The child would serve none of the engine's memory, and have a second child for its data."""
    with pytest.raises(ConfigError, match="isolation: is not for p2p"):
        open_isolated("p2p", location="127.0.0.1:0")


def test_a_key_file_is_not_taken_from_where_others_could_have_put_or_read_it(key_file: str, tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620, 0o666):
        os.chmod(key_file, mode)
        assert f"mode {mode:04o}" in refusal(key_file=key_file).problem
    os.chmod(key_file, 0o400)
    assert read_key("a test", key_file).public
    if os.geteuid() == 0:
        os.chown(key_file, 12345, -1)
        assert "belongs to user 12345" in refusal(key_file=key_file).problem


def test_a_mounted_secret_is_a_link_and_is_read(key_file: str, tmp_path: Path, opened: list[P2PSettings]) -> None:
    (tmp_path / "mounted").symlink_to(key_file)
    assert settings(opened, key_file=str(tmp_path / "mounted")).key == read_key("a test", key_file)


@pytest.mark.parametrize("kind", ["missing", "empty", "half", "swapped", "rubbish", "folder", "fifo"])
def test_what_is_no_key_is_refused_and_not_shown(kind: str, key_file: str, tmp_path: Path) -> None:
    path = tmp_path / "looked-at"
    text = Path(key_file).read_text()
    other = tmp_path / "other.key"
    write_key("a test", str(other))
    contents = {
        "empty": "",
        "half": "\n".join(text.splitlines()[:-1]),
        "swapped": "\n".join([*text.splitlines()[:-1], other.read_text().splitlines()[-1]]),
        "rubbish": "public-key = \0\x7f" * 9000,
    }
    if kind in contents:
        path.write_text(contents[kind])
        path.chmod(0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    refused = refusal(key_file=str(path))
    assert refused.field == "key_file"
    assert "looked-at" not in str(refused)
    assert not any(line.split('"')[1] in str(refused) for line in text.splitlines() if '"' in line)
