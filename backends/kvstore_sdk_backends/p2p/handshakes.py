"""What a connection that did not come to be means, in words for whoever set up both sides."""

from __future__ import annotations

import errno
import os

import zmq

__all__ = ["FAILED_HANDSHAKES", "why_not_connected", "why_refused"]

FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of a socket's monitor."""

_OTHER_KEY = "another key"
_ZMTP = zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED


def why_not_connected(event: int, value: int, *, secured: bool) -> str:
    """For the side that connects: why a handshake failed, and what to do, as one clause. `secured`: this side has a key."""
    here = "this node's key_file" if secured else "this node, which has no key_file,"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it does not admit this node's key; give both the same key_file"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"{here} and it do not speak the same: {_protocol(value)}; is it a kvstore node, with the same key_file?"
    if value in (errno.ETIMEDOUT, errno.EAGAIN):
        return "it took the connection and did not answer; is it a kvstore node?"
    return f"it broke the handshake off; {here} and its own are not the same, or it is no kvstore node, or has no room for one more"


def why_refused(event: int, value: int, *, secured: bool) -> str:
    """For the side that listens: why a client's handshake failed, as one clause; empty where `Admission` said it already."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return ""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "it has no key_file, and this node has one" if secured else "it has a key_file, and this node has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC or (secured and value & _ZMTP):
            return "its key_file is not this node's"
        return f"it does not speak the protocol of a node: {_protocol(value)}"
    if value in (errno.ETIMEDOUT, errno.EAGAIN):
        return "it connected and did not say what it wants"
    if value == errno.EFAULT:
        # Of libzmq, where nobody answers it about admission.
        return "its key cannot be checked now"
    return f"it went away during the handshake: {os.strerror(value) if value else 'the connection ended'}"


def _protocol(value: int) -> str:
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one of them has a key, the other none"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "what it sent was sealed with another key"
    return f"protocol error {value:#x}"
