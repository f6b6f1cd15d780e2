"""Addresses are read as they are written, and what is none is refused in one clause."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_backends.p2p.addresses import MAX_PEERS, Address, is_loopback, parse_address, parse_peers, parse_port_range, resolve


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        (" kv-0.kv.default.svc.cluster.local:7400 ", "kv-0.kv.default.svc.cluster.local", 7400),
        ("node_1:1", "node_1", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:7400", "fe80::1%eth0", 7400),
    ],
)
def test_what_an_operator_writes_is_read(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address
    assert address.endpoint == f"tcp://{address}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":7400",
        "host:",
        "host:port",
        "host:65536",
        "host:99999",
        "::1:7400",
        "[127.0.0.1]:7400",
        "[host]:7400",
        "1.2.3:7400",
        "256.1.1.1:7400",
        "ho st:7400",
        "-host:7400",
        "host..a:7400",
        "tcp://host:7400",
        "host:7400/",
        "user@host:7400",
        "host:7400-7401",
        "h" * 254 + ":1",
        "host:7400;host:1",
        "*:7400",
        "host\n:7400",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|neither|port|address") as refused:
        parse_address(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_port_0_is_for_listening_alone() -> None:
    assert parse_address("127.0.0.1:0", any_port=True).port == 0
    for parse in (parse_address, parse_peers):
        with pytest.raises(ValueError, match="port 0"):
            parse("127.0.0.1:0")


def test_a_list_of_peers_writes_ranges_out_and_holds_each_once() -> None:
    assert parse_peers("") == parse_peers(" , ") == ()
    found = parse_peers("a:1, b:7400-7402 ,a:1,[::1]:5")
    assert list(map(str, found)) == ["a:1", "b:7400", "b:7401", "b:7402", "[::1]:5"]


def test_a_list_of_peers_is_bounded() -> None:
    assert len(parse_peers(f"a:1-{MAX_PEERS}")) == MAX_PEERS
    for text in (f"a:1-{MAX_PEERS + 1}", f"a:1-{MAX_PEERS},b:1", "a:1-60000"):
        with pytest.raises(ValueError, match=str(MAX_PEERS)):
            parse_peers(text)
    with pytest.raises(ValueError, match="upwards"):
        parse_peers("a:5-4")


def test_a_range_of_ports_includes_both_ends() -> None:
    ports = parse_port_range("21000-21003")
    assert ports is not None
    assert list(ports) == [21000, 21001, 21002, 21003]
    assert parse_port_range("") is None
    for text in ("21000", "0-5", "5-4", "1-65536", "a-b", "1-2-3"):
        with pytest.raises(ValueError, match="range of ports"):
            parse_port_range(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.0.9", "::1", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"])
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "fe80::1", "localhost.example", "::ffff:10.0.0.1", "", "127.1"])
def test_what_is_not_loopback_is_never_taken_for_it(host: str) -> None:
    """`0.0.0.0` is every interface; `127.1` is what some resolvers make 127.0.0.1 of, and others a name."""
    assert not is_loopback(host)


def test_numbers_resolve_to_themselves_without_asking_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked"))
    assert resolve(Address("::1", 5)) == (Address("::1", 5),)


def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 1, 6, "", (host, 7)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve(Address("kv", 7)) == (Address("10.0.0.1", 7), Address("10.0.0.2", 7))


def test_a_name_that_is_no_name_to_the_resolver_is_an_os_error() -> None:
    with pytest.raises(OSError, match="host"):
        resolve(Address("a" * 64 + ".b", 7))


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert 1 <= address.port <= 65535
    assert parse_address(str(address)) == address
