"""The key of a group: a CURVE pair in a file. Whoever holds it is a member."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import Any

from kvstore_sdk.backend import ConfigError

__all__ = ["CurveKey", "read_key", "write_key"]

_MAX_FILE_BYTES = 64 << 10
_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_LINE = re.compile(rf'\s*(public|secret)-key\s*=\s*"?({_Z85})"?\s*')
_TEXT = """\
# The CURVE key of a group of kvstore nodes. Whoever can read this file is a member of the group.
# Copy it to each node over a channel that you trust, and keep it from other users (mode 0600).
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class CurveKey:
    """A pair of CURVE keys in the 40 letters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def read_key(where: str, path: str) -> CurveKey:
    """The key in a file of the form that `write_key` writes, which is ZeroMQ's own for certificates.

    The file must be its user's alone: of mode 0600 or less, or, where it belongs to root, readable by the group as well.

    Raises:
        ConfigError: it cannot be read, is open to others, or holds no pair that belongs together. `where` begins the message, which shows
            neither the path nor anything of the file.
    """
    zmq = _zmq(where)
    text = _read(where, path)
    found = {match[1]: match[2].encode() for line in text.splitlines() if (match := _LINE.fullmatch(line))}
    if set(found) != {"public", "secret"}:
        raise ConfigError(where, "key_file", "holds no pair of keys; make one with kvstore keygen, and copy the whole file")
    if zmq.curve_public(found["secret"]) != found["public"]:
        raise ConfigError(where, "key_file", "holds two keys that do not belong together; make a pair with kvstore keygen")
    return CurveKey(found["public"], found["secret"])


def write_key(where: str, path: str) -> CurveKey:
    """Make a pair and write it to a new file of mode 0600.

    Raises:
        ConfigError: there is a file already, it cannot be made, or this pyzmq has no CURVE.
        OSError: it cannot be written; then none is left behind.
    """
    zmq = _zmq(where)
    public, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        problem = "exists; a key that nodes use is not to be lost: name a new file, or remove this one first"
        raise ConfigError(where, path, problem) from None
    except OSError as cause:
        problem = f"cannot be written: {os.strerror(cause.errno or 0)}; name a file in a folder that is there, and yours to write to"
        raise ConfigError(where, path, problem) from None
    try:
        with open(descriptor, "w") as file:
            # Whatever the umask left.
            os.fchmod(file.fileno(), 0o600)
            file.write(_TEXT.format(public=public.decode(), secret=secret.decode()))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)
        raise
    return CurveKey(public, secret)


def _read(where: str, path: str) -> str:
    if "\0" in path:
        raise ConfigError(where, "key_file", "is no path; name the file that kvstore keygen wrote")
    try:
        # A FIFO in its place is not waited for.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(where, "key_file", "is no file; name the one that kvstore keygen wrote")
            _check_mode(where, status)
            return file.read(_MAX_FILE_BYTES).decode("ascii", "replace")
    except OSError as cause:
        # Without the path, which the text of the error has: what is called key is shown to nobody.
        instead = "bring the group's file there, or make one for a new group with kvstore keygen FILE"
        if not os.path.isabs(path):
            instead = "write the whole path: a relative one begins where this process was started, and ~ stands for nothing here"
        raise ConfigError(where, "key_file", f"cannot be read: {os.strerror(cause.errno or 0)}; {instead}") from None


def _check_mode(where: str, status: os.stat_result) -> None:
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if owner not in (0, os.geteuid()):
        raise ConfigError(where, "key_file", f"belongs to user {owner}, who could change it; make it root's or your own")
    # A mounted secret belongs to root, and to a group that the engine's user is in.
    allowed = 0o740 if owner == 0 != os.geteuid() else 0o700
    if mode & ~allowed & 0o777:
        raise ConfigError(where, "key_file", f"is of mode {mode:04o}, open to others; chmod 600 (in a mounted secret defaultMode 0400)")


def _zmq(where: str) -> Any:
    try:
        import zmq
    except ImportError as cause:
        raise ConfigError(where, "backend", f"zmq cannot be imported ({cause}); pip install 'kvstore-sdk[p2p]'") from cause
    if not zmq.has("curve"):
        raise ConfigError(where, "key_file", "this build of pyzmq has no CURVE; install the wheel of pyzmq")
    return zmq
