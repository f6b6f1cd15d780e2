"""What an operator may set of a node, checked before anything listens or connects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvstore_sdk.backend import ConfigError
from kvstore_sdk_backends.p2p.addresses import Address, is_loopback, parse_address, parse_peers, parse_port_range
from kvstore_sdk_backends.p2p.keys import CurveKey, read_key

__all__ = ["WHERE", "Data", "P2PSettings", "check_options"]

WHERE = "backend p2p"

Data = Literal["auto", "nixl", "zmq"]
T = TypeVar("T")

SMALLEST_BYTES = 8192
"""Of a record: a page of header and one of payload."""

_UCX_LIST = re.compile(r"[A-Za-z0-9_^:.,*?@-]{0,400}")


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PSettings:
    """A node as it is to be. `open_p2p` says what each option means; nothing is checked here, `check_options` does that.

    Attributes:
        listen: Where it listens; port 0 is any that is free.
        peers: As they were written, names unresolved.
        key: Of the group; None: nothing is encrypted, and nobody asked who they are.
        off_loopback: Whether it listens, or is told to connect, anywhere but on loopback.
        data: Never "auto" where NIXL may not be used: then "zmq".
        data_ports: For the sockets of the ZMQ data path; None: any.
    """

    listen: Address
    peers: tuple[Address, ...] = ()
    serve_bytes: int = 0
    data: Data = "auto"
    key: CurveKey | None = field(default=None, repr=False)
    insecure: bool = False
    data_path_trusted: bool = False
    off_loopback: bool = False
    fan_out: int = 4
    max_peers: int = 64
    answer_timeout_s: float = 1.0
    lease_s: float = 10.0
    resolve_s: float = 10.0
    data_ports: range | None = None
    ucx_tls: str = ""
    ucx_devices: str = ""
    max_record_bytes: int = 1 << 30


def check_options(
    location: str,
    *,
    peers: str,
    data_parallel_index: int,
    data: Data,
    key_file: str | None,
    insecure: bool,
    data_path_trusted: bool,
    data_ports: str,
    ucx_tls: str,
    ucx_devices: str,
    serve_bytes: int,
) -> P2PSettings:
    """What is given as text, parsed, and whether it may be used together.

    Raises:
        ConfigError: it may not; the message names the option and what to write.
    """
    listen = _listen(location, data_parallel_index)
    known = _checked("peers", parse_peers, peers)
    ports = _checked("data_ports", parse_port_range, data_ports)
    off_loopback = next((str(address) for address in (listen, *known) if not is_loopback(address.host)), "")
    if key_file is not None and insecure:
        raise ConfigError(WHERE, "insecure", "contradicts key_file; leave one of them out")
    if off_loopback and key_file is None and not insecure:
        problem = f"must be given, since {off_loopback} is not on loopback: the key of the group, which kvstore keygen FILE makes"
        raise ConfigError(WHERE, "key_file", f"{problem}; or write insecure=true, and let whoever reaches the port read and ask for KV")
    if off_loopback and data == "nixl" and not data_path_trusted:
        problem = f"nixl moves records unencrypted and lets whoever reaches it read and write memory, and {off_loopback} is not on loopback"
        raise ConfigError(WHERE, "data", f"{problem}; write data_path_trusted=true if nobody else is on that network, or data=zmq")
    if data == "auto" and off_loopback and not data_path_trusted:
        data = "zmq"
    if data != "zmq" and off_loopback and not ucx_devices:
        problem = "must be given with data_path_trusted off loopback: the devices that nixl listens on, as UCX_NET_DEVICES has them"
        raise ConfigError(WHERE, "ucx_devices", f"{problem}: eth0 or mlx5_0:1 for example")
    if 0 < serve_bytes < SMALLEST_BYTES:
        problem = (
            f"{serve_bytes} bytes hold no record, whose least are {SMALLEST_BYTES}; write how much memory they may have, 8GiB for example"
        )
        raise ConfigError(WHERE, "serve_bytes", f"{problem}, or leave it out to keep none")
    for name, value in (("ucx_tls", ucx_tls), ("ucx_devices", ucx_devices)):
        if not _UCX_LIST.fullmatch(value):
            raise ConfigError(WHERE, name, f"{value[:80]!r} is no list of names with commas between; write it as UCX takes it")
    return P2PSettings(
        listen=listen,
        peers=known,
        data=data,
        key=read_key(WHERE, key_file) if key_file is not None else None,
        insecure=insecure,
        data_path_trusted=data_path_trusted,
        off_loopback=bool(off_loopback),
        data_ports=ports,
        ucx_tls=ucx_tls,
        ucx_devices=ucx_devices,
        serve_bytes=serve_bytes,
    )


def _listen(location: str, data_parallel_index: int) -> Address:
    if not location:
        problem = "must be given: where this node listens, host:port, 0.0.0.0:7400 for example; 127.0.0.1:0 for one that nobody has to find"
        raise ConfigError(WHERE, "location", problem)
    try:
        address = parse_address(location, any_port=True)
    except ValueError as cause:
        raise ConfigError(WHERE, "location", f"{cause}; it is where this node listens, 0.0.0.0:7400 for all interfaces") from None
    if not address.port:
        return address
    if (port := address.port + data_parallel_index) > 65535:
        raise ConfigError(
            WHERE, "location", f"port {address.port} leaves none for data parallel index {data_parallel_index}; write a smaller"
        )
    return Address(address.host, port)


def _checked(field: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as cause:
        raise ConfigError(WHERE, field, str(cause)) from None
