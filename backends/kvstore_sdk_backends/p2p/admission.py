"""Who is let in on the sockets of a node that has a key: holders of that key, and nobody else."""

from __future__ import annotations

import hmac
import logging

import zmq
import zmq.asyncio
from zmq.utils import z85

from kvstore_sdk_backends.p2p.keys import CurveKey
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.security import ZAP_DOMAIN

__all__ = ["Admission"]

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks, once for each client that proved to hold the key that it shows (ZeroMQ's RFC 27)."""
_FRAMES = 7


class Admission:
    """Answers for all sockets of a context that carry `ZAP_DOMAIN`. Without it libzmq lets nobody in there."""

    def __init__(self, context: zmq.asyncio.Context, key: CurveKey, label: str) -> None:
        """On the loop's thread. `label`: of the node, in the log."""
        self._public = z85.decode(key.public)
        self._label = label
        self._notices = Notices()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)

    async def run(self) -> None:
        """Answer until it is cancelled."""
        while True:
            question = await self._socket.recv_multipart()
            admitted = self._admits(question)
            status = [b"200", b"OK"] if admitted else [b"400", b"not a member"]
            await self._socket.send_multipart([b"1.0", question[1] if len(question) > 1 else b"", *status, b"", b""])

    def close(self) -> None:
        """After `run` has ended. From then on nobody is let in."""
        self._socket.close()

    def _admits(self, question: list[bytes]) -> bool:
        if len(question) != _FRAMES:
            return False
        version, _, domain, address, _, mechanism, shown = question
        if (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE") and hmac.compare_digest(shown, self._public):
            return True
        host = address.decode("ascii", "replace")[:64]
        if (unsaid := self._notices.due(host)) is not None:
            logger.warning("%s: refused %s: its key is not the one of key_file here%s", self._label, host, Notices.more(unsaid))
        return False
