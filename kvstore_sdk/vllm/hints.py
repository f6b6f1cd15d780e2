"""Which peer a request says has its chunks. A client or a router wrote that, so nothing of it is trusted.

`kv_transfer_params` of a request may hold, and the first of these that is good counts:

- `"kvstore": {"peer": "host:port", "wait_s": 5}`, our own; without `wait_s` the peer is asked for what it has now;
- `"remote_prefiller": {"remote_host": ..., "remote_port": ...}`, as vLLM's own `p2p` tier takes it: the peer has the chunks, or is about
  to compute them, and is waited for;
- `"remote_kv_source": {"remote_host": ..., "remote_port": ...}`, likewise: the peer may have them.

To which addresses a connection may be made at all is for the backend to say.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
import time
from collections.abc import Mapping

from kvstore_sdk.backend import Hint
from kvstore_sdk.vllm.guard import LOG_EVERY_S

__all__ = ["HintReader", "parse_hint"]

logger = logging.getLogger(__name__)

_OURS = "kvstore"
_FIELDS = ("peer", "wait_s")
_VLLMS = {"remote_prefiller": True, "remote_kv_source": False}
"""What vLLM's own tier looks at -> whether the peer is waited for."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
"""A host's name or an IPv4 address."""
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,32})?")
_PORT = re.compile(r"[0-9]{1,5}")


class HintReader:
    """Reads the hints of requests and says of bad ones, now and then, what is wrong with them."""

    def __init__(self, shown_as: str, max_wait_s: float) -> None:
        """`shown_as` names the tier in the log; no request waits longer for its peer than `max_wait_s`, whatever it says."""
        self._shown_as = shown_as
        self._max_wait_s = max_wait_s
        self._ignored = 0
        self._quiet_until_s = 0.0

    def read(self, params: object) -> Hint | None:
        """The hint in a request's `kv_transfer_params`. One that is bad is ignored and logged, once every `LOG_EVERY_S` at most."""
        if not params:
            return None
        hint, problem = parse_hint(params, self._max_wait_s)
        if problem:
            self._complain(problem)
        return hint

    def _complain(self, problem: str) -> None:
        self._ignored += 1
        now = time.monotonic()
        if now < self._quiet_until_s:
            return
        self._quiet_until_s = now + LOG_EVERY_S
        logger.warning(
            "%s: ignored what %d request(s) since the last such line said of a peer; the last one: kv_transfer_params %s",
            self._shown_as,
            self._ignored,
            problem,
        )
        self._ignored = 0


def parse_hint(params: object, max_wait_s: float) -> tuple[Hint | None, str]:
    """The first good hint, or None, and what is wrong with the last one that is bad, or nothing. Raises nothing, whatever is given.

    Args:
        params: A request's `kv_transfer_params`. What is not about peers is passed over.
        max_wait_s: Longest that the hint lets anybody wait.
    """
    if not isinstance(params, Mapping):
        return None, f"is no table but of type {type(params).__name__}"
    problem = ""
    for key in (_OURS, *_VLLMS):
        if (given := params.get(key)) is None:
            continue
        try:
            if not isinstance(given, Mapping):
                raise ValueError(f"is no table but {_shown(given)}")
            if key == _OURS:
                return _parse_ours(given, max_wait_s), problem
            peer = _address(given.get("remote_host"), given.get("remote_port"))
            return Hint(peer, max_wait_s if _VLLMS[key] else 0.0), problem
        except ValueError as cause:
            problem = f"{key!r} {cause}"
    return None, problem


def _parse_ours(given: Mapping[object, object], max_wait_s: float) -> Hint:
    for name in given:
        if name not in _FIELDS:
            raise ValueError(f"has a field {_shown(name)}; there are {' and '.join(_FIELDS)}")
    peer, wait_s = given.get("peer"), given.get("wait_s", 0)
    if not isinstance(peer, str):
        raise ValueError(f"has as peer {_shown(peer)}, which is no host:port")
    host, colon, port = peer.rpartition(":")
    if not (host and colon):
        raise ValueError(f"has as peer {_shown(peer)}, which is no host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"has as peer {_shown(peer)}; an IPv6 address stands in brackets")
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s < math.inf:
        raise ValueError(f"has as wait_s {_shown(wait_s)}, which is no number of seconds")
    return Hint(_address(host, port), float(min(wait_s, max_wait_s)))


def _address(host: object, port: object) -> str:
    """`host:port`, with brackets where the host is an IPv6 address."""
    if not isinstance(host, str) or not (_NAME.fullmatch(host) or (":" in host and _IPV6.fullmatch(host))):
        raise ValueError(f"has as host {_shown(host)}, which is none")
    if isinstance(port, str) and _PORT.fullmatch(port):
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"has as port {_shown(port)}, which is none")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shown(value: object) -> str:
    """Short, and in one line. Of what is no text the type: anything else may be endless, or fail to say what it is."""
    return reprlib.repr(value) if isinstance(value, str) else f"something of type {type(value).__name__}"
