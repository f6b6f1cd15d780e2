"""Where nodes listen: `host:port` as an operator writes it, and what a name stands for."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

__all__ = ["MAX_PEERS", "Address", "is_loopback", "parse_address", "parse_peers", "parse_port_range", "resolve"]

MAX_PEERS = 1024
"""Addresses in one list of peers, ranges of ports written out."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?")
_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^\]\s]+)\]|(?P<host>[^\[\]:\s]+)):(?P<ports>[0-9]{1,5}(?:-[0-9]{1,5})?)")
_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, by name or by number, and a TCP port. An IPv6 number is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """As a socket takes it."""
        return f"tcp://{self}"

    @property
    def is_numeric(self) -> bool:
        """Whether the host is a number, so that there is nothing to resolve."""
        return _number(self.host) is not None


def parse_address(text: str, *, any_port: bool = False) -> Address:
    """`host:port` or `[IPv6]:port`. `any_port`: port 0 is one, too.

    Raises:
        ValueError: it is none. The message is one clause.
    """
    host, first, last = _split(text)
    if first != last:
        raise ValueError(f"{_shown(text)} is a range of ports; write host:port")
    if not first and not any_port:
        raise ValueError(f"{_shown(text)} has port 0, where nobody can be found; write the port that the peer listens on")
    return Address(host, first)


def parse_peers(text: str) -> tuple[Address, ...]:
    """A list with commas between `host:port` and `host:first-last`, without what stands in it twice.

    Raises:
        ValueError: an entry is no address, or there are more than `MAX_PEERS`. The message is one clause.
    """
    found: dict[Address, None] = {}
    for entry in text.split(","):
        if not (entry := entry.strip()):
            continue
        host, first, last = _split(entry)
        if not first:
            raise ValueError(f"{_shown(entry)} has port 0, where nobody can be found; write the port that the peer listens on")
        if last - first >= MAX_PEERS:
            raise ValueError(f"{_shown(entry)} is a range of more than {MAX_PEERS} ports; write a shorter one")
        found.update(dict.fromkeys(Address(host, port) for port in range(first, last + 1)))
        if len(found) > MAX_PEERS:
            raise ValueError(f"names more than {MAX_PEERS} addresses; write fewer, or a name that stands for several")
    return tuple(found)


def parse_port_range(text: str) -> range | None:
    """`first-last`, both included; None for an empty text: any port.

    Raises:
        ValueError: it is no range of ports. The message is one clause.
    """
    if not text:
        return None
    match = _RANGE.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError(f"{_shown(text)} is no range of ports; write first-last, 21000-21063 for example")
    return range(int(match[1]), int(match[2]) + 1)


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine and can be reached from nowhere else. Of names `localhost` alone is."""
    if (number := _number(host)) is None:
        return host.rstrip(".").lower() == "localhost"
    mapped = getattr(number, "ipv4_mapped", None)
    return bool((mapped or number).is_loopback)


def resolve(address: Address) -> tuple[Address, ...]:
    """All numeric addresses of a name, in a fixed order; a numeric one is itself. Blocks as long as the resolver does.

    Raises:
        OSError: the name does not resolve.
    """
    if address.is_numeric:
        return (address,)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as cause:
        raise OSError(f"{address.host}: is no name of a host") from cause
    # A zone (fe80::1%eth0) stays: without it a link-local number leads nowhere.
    return tuple(sorted({Address(str(sockaddr[0]), address.port) for *_, sockaddr in found}))


def _split(text: str) -> tuple[str, int, int]:
    match = _ADDRESS.fullmatch(text.strip()) if len(text) <= 300 else None
    if match is None:
        raise ValueError(f"{_shown(text)} is no address; write host:port, or [IPv6]:port")
    host, (first, _, last) = match["bracketed"] or match["host"], match["ports"].partition("-")
    number = _number(host)
    if match["bracketed"] is not None and (number is None or number.version != 6):
        raise ValueError(f"{_shown(text)}: {_shown(host)} is no IPv6 address; brackets are for those alone")
    if number is None and (not _NAME.fullmatch(host) or host.replace(".", "").isdigit()):
        raise ValueError(f"{_shown(text)}: {_shown(host)} is neither a name of a host nor an address")
    low, high = int(first), int(last or first)
    if not low <= high <= 65535:
        problem = "a range goes upwards" if low > high else "a port is a number up to 65535"
        raise ValueError(f"{_shown(text)}: {problem}")
    return host, low, high


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
