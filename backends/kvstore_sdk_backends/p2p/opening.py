"""From the options of a node to one that listens."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from kvstore_sdk.backend import Backend, Bounds, ConfigError
from kvstore_sdk.isolation import in_child
from kvstore_sdk_backends.p2p.addresses import MAX_PEERS
from kvstore_sdk_backends.p2p.options import WHERE, Data, P2PSettings, check_options

__all__ = ["open_p2p"]


def open_p2p(
    location: str,
    *,
    peers: Annotated[str, "nodes to ask: host:port or host:first-last, with commas between; all addresses of a name"] = "",
    serve_bytes: Annotated[
        int, Bounds(ge=0, le=1 << 44), "host memory for records that are stored here, to be served to peers; 0: none"
    ] = 0,
    data: Annotated[Data, "what moves records: nixl, or the sockets of zmq; auto: what both sides have and may use"] = "auto",
    key_file: Annotated[str | None, "key of the group, made by kvstore keygen FILE: its whole path; needed off loopback"] = None,
    insecure: Annotated[bool, "off loopback without a key: whoever reaches the port reads and asks for KV"] = False,
    data_path_trusted: Annotated[bool, "let nixl move records off loopback, unencrypted, and open to whoever reaches its ports"] = False,
    fan_out: Annotated[int, Bounds(ge=1, le=64), "peers that are asked at once for what none is known to have"] = 4,
    max_peers: Annotated[int, Bounds(ge=1, le=MAX_PEERS), "nodes that are served at one time, and that are asked"] = 64,
    answer_timeout_s: Annotated[float, Bounds(ge=0.01, le=60), "for a peer's answer to a look-up"] = 1.0,
    lease_s: Annotated[float, Bounds(ge=0.1, le=300), "how long a record that was found is kept for the peer that asked"] = 10.0,
    resolve_s: Annotated[float, Bounds(ge=0.1, le=3600), "between two look-ups of the names in peers"] = 10.0,
    data_ports: Annotated[str, "first-last: for the sockets of the zmq data path, one a peer; without it any that is free"] = "",
    ucx_tls: Annotated[str, "transports of nixl, as UCX_TLS has them; without it tcp, on loopback cma as well"] = "",
    ucx_devices: Annotated[str, "devices of nixl, as UCX_NET_DEVICES has them; without it lo; needed off loopback"] = "",
    data_parallel_index: Annotated[int, Bounds(ge=0, le=65535), "added to the port of the location; under vLLM the engine's own"] = 0,
    max_record_bytes: Annotated[int, Bounds(ge=1, le=1 << 34), "refuse larger records"] = 1 << 30,
) -> Backend:
    """Open a node: `location` is `host:port` to listen on; port 0 is any that is free.

    Raises:
        ConfigError: an option is wrong, or one that trust needs is missing; the address cannot be listened on; pyzmq is not installed.
        BackendError: NIXL was asked for and does not come up.
    """
    if in_child():
        problem = "is not for p2p: its data path has a child process already, and what is served is the engine's memory; leave it out"
        raise ConfigError(WHERE, "isolation", problem)
    settings = check_options(
        location,
        peers=peers,
        data_parallel_index=data_parallel_index,
        data=data,
        key_file=key_file,
        insecure=insecure,
        data_path_trusted=data_path_trusted,
        data_ports=data_ports,
        ucx_tls=ucx_tls,
        ucx_devices=ucx_devices,
        serve_bytes=serve_bytes,
    )
    settings = dataclasses.replace(
        settings,
        fan_out=fan_out,
        max_peers=max_peers,
        answer_timeout_s=answer_timeout_s,
        lease_s=lease_s,
        resolve_s=resolve_s,
        max_record_bytes=max_record_bytes,
    )
    return _open(settings)


def _open(settings: P2PSettings) -> Backend:
    try:
        from kvstore_sdk_backends.p2p.backend import P2PBackend
    except ImportError as cause:
        problem = f"{cause.name or 'zmq'} cannot be imported ({cause}); pip install 'kvstore-sdk[p2p]'"
        raise ConfigError(WHERE, "backend", problem) from cause
    return P2PBackend(settings)
