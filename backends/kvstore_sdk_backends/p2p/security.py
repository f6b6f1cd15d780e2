"""Who may talk to a node, and what a connection may cost it: the options of every socket, set in one place."""

from __future__ import annotations

import random
from typing import Literal

import zmq

from kvstore_sdk.backend import ConfigError, UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address, is_loopback
from kvstore_sdk_backends.p2p.keys import CurveKey
from kvstore_sdk_backends.p2p.messages import MAX_FRAME_BYTES
from kvstore_sdk_backends.p2p.options import WHERE

__all__ = ["ZAP_DOMAIN", "Channel", "Security"]

Channel = Literal["control", "data"]

ZAP_DOMAIN = b"kvstore-p2p"
"""Connections of sockets that carry it are let in by `Admission` alone; while that does not run, nobody is."""

_HANDSHAKE_MS = 3000
"""For whatever comes before the first message: whoever opens a connection and says nothing keeps it no longer."""
_CONNECT_MS = 3000
_PING_MS, _SILENCE_MS = 500, 1500
_STUCK_MS = 3000
"""Bytes that the other side's kernel or reader has not taken for this long end a connection. Pings do not: they wait behind the data."""
_SEND_QUEUE = 128
"""Messages to one connection that wait to be sent."""
_FRAMING_BYTES = 4096
"""What headers and encryption add to a message, and more."""


class Security:
    """What all sockets of one node have in common. With a key both ends prove that they hold it, and bytes are encrypted."""

    def __init__(
        self,
        host: str,
        *,
        key: CurveKey | None = None,
        insecure: bool = False,
        data_ports: range | None = None,
        max_record_bytes: int = 1 << 30,
    ) -> None:
        """`host`: where this node listens, as a number. `insecure`: connect elsewhere than to loopback without a key, too."""
        self.host = host
        self.key = key
        self._anywhere = key is not None or insecure
        self._data_ports = data_ports
        self._max_data_bytes = max_record_bytes + _FRAMING_BYTES

    def may_connect(self, address: Address) -> bool:
        """Whether a socket may be connected there. What a name stands for has to be asked for as well."""
        return self._anywhere or is_loopback(address.host)

    def secure_server(self, socket: zmq.Socket, channel: Channel) -> None:
        """Set the options of a socket that is going to be bound; before that."""
        self._limit(socket, channel)
        socket.ipv6 = ":" in self.host
        if self.key is not None:
            socket.zap_domain = ZAP_DOMAIN
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.curve_server = True
            socket.curve_secretkey = self.key.secret

    def secure_client(self, socket: zmq.Socket, channel: Channel, address: Address) -> None:
        """Set the options of a socket that is going to be connected to `address`; before that. It does not reconnect by itself."""
        self._limit(socket, channel)
        if channel == "control":
            # The other end, whose connections are anybody's, need not ping: it is told with each ping how long silence may be.
            socket.heartbeat_ivl = _PING_MS
            socket.heartbeat_timeout = socket.heartbeat_ttl = _SILENCE_MS
        socket.ipv6 = ":" in address.host
        socket.reconnect_ivl = -1
        socket.connect_timeout = _CONNECT_MS
        if self.key is not None:
            socket.curve_serverkey = self.key.public
            socket.curve_publickey = self.key.public
            socket.curve_secretkey = self.key.secret

    def bind(self, socket: zmq.Socket, port: int) -> int:
        """Bind the control socket, which `secure_server` has seen. Port 0: any that is free.

        Returns:
            The port.

        Raises:
            ConfigError: the address is in use, not this machine's, or not to be had.
        """
        address = Address(self.host, port)
        try:
            return _bind(socket, address)
        except zmq.ZMQError as cause:
            problem = f"cannot listen on {address}: {cause.strerror}; name a free port, and an address of this machine"
            raise ConfigError(WHERE, "location", problem) from None

    def bind_data(self, socket: zmq.Socket) -> int:
        """Bind a data socket, which `secure_server` has seen, to a free port of `data_ports`, or to any.

        Returns:
            The port.

        Raises:
            UnavailableError: none is free.
        """
        ports = list(self._data_ports or [0])
        random.shuffle(ports)
        for port in ports:
            try:
                return _bind(socket, Address(self.host, port))
            except zmq.ZMQError as cause:
                if cause.errno != zmq.EADDRINUSE:
                    raise UnavailableError(f"p2p: no data socket on {self.host}: {cause.strerror}") from None
        raise UnavailableError(f"p2p: all {len(ports)} ports of data_ports are in use; each peer that loads needs one")

    def _limit(self, socket: zmq.Socket, channel: Channel) -> None:
        socket.linger = 0
        if socket.context.get(zmq.IO_THREADS) > 1:
            # Bulk data has a thread of its own, and look-ups do not wait behind it.
            socket.affinity = 1 if channel == "control" else 2
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.sndhwm = _SEND_QUEUE
        # What is not read is bounded in bytes, by `Unread`: libzmq 4.3.5 ends the process when a connection is lost whose queue is full and
        # something is to be sent to it, a ping or the answer to one; and a second connection with the identity of a first, which nobody
        # reads, would stay for ever.
        socket.rcvhwm = 0
        if channel == "control":
            socket.maxmsgsize = MAX_FRAME_BYTES + _FRAMING_BYTES
        else:
            socket.maxmsgsize = self._max_data_bytes
        # An idle link that was cut, and one with bytes on the way.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
        socket.tcp_keepalive_cnt = 3
        socket.tcp_maxrt = _STUCK_MS


def _bind(socket: zmq.Socket, address: Address) -> int:
    socket.bind(address.endpoint)
    return int(socket.last_endpoint.rpartition(b":")[2].rstrip(b"\0"))
