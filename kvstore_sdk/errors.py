"""What can go wrong, named after what the caller may do about it.

::

    KVStoreError
    ├── ConfigError (ValueError)      a setting is wrong: no record was written, fix the field that is named
    └── BackendError                  one operation on a store failed
        ├── UnavailableError          advice RETRY: try again later
        │   ├── TimedOutError (TimeoutError)
        │   └── ThrottledError        carries `retry_after_s`
        ├── NoSpaceError              advice FREE_SPACE: full, over quota, or out of inodes
        ├── DeniedError               advice FIX_CONFIG: permission or credentials
        ├── ReadOnlyError             advice FIX_CONFIG: the store takes no writes
        ├── UnsupportedError          advice GIVE_UP: the backend does not offer this
        ├── InvalidError              advice GIVE_UP: the request itself is wrong (name, size, buffer)
        ├── ClosedError               advice GIVE_UP: `close` was called
        └── BreachError               advice GIVE_UP: the backend broke its contract
"""

from __future__ import annotations

import errno
from enum import Enum
from typing import ClassVar

__all__ = [
    "Advice",
    "BackendError",
    "BreachError",
    "ClosedError",
    "ConfigError",
    "DeniedError",
    "InvalidError",
    "KVStoreError",
    "NoSpaceError",
    "ReadOnlyError",
    "ThrottledError",
    "TimedOutError",
    "UnavailableError",
    "UnsupportedError",
    "error_from_os",
    "text_of",
]


class Advice(Enum):
    """What the caller of a failed operation may do."""

    RETRY = "retry later"
    GIVE_UP = "give up"
    FREE_SPACE = "free space"
    FIX_CONFIG = "fix the configuration"


class KVStoreError(Exception):
    """Root of every error this SDK raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """A setting is wrong. Raised before a record is written, and before the store is opened wherever that can be told without it.

    Args:
        where: The thing being configured, `backend fs` for example.
        field: The option that is at fault.
        problem: What is wrong with it and what to write instead, as one clause.
    """

    def __init__(self, where: str, field: str, problem: str) -> None:
        super().__init__(f"{where}: {field}: {problem}")
        self.where = where
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.where, self.field, self.problem)


class BackendError(KVStoreError):
    """One operation on a store failed; `advice` says what the caller may do.

    The message should name the operation or the record that it is about, better both, and must not hold secrets.
    """

    advice: ClassVar[Advice] = Advice.GIVE_UP


class UnavailableError(BackendError):
    """The store cannot serve this now: unreachable, overloaded, an I/O error."""

    advice = Advice.RETRY


class TimedOutError(UnavailableError, TimeoutError):
    """The deadline passed before the operation ended."""


class ThrottledError(UnavailableError):
    """The store asks for fewer requests. `retry_after_s` is its wish, 0.0 when it gave none."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoSpaceError(BackendError):
    """No room: the volume, a quota or the inode table is full."""

    advice = Advice.FREE_SPACE


class DeniedError(BackendError):
    """Permission or credentials do not allow this."""

    advice = Advice.FIX_CONFIG


class ReadOnlyError(BackendError):
    """The store takes no writes."""

    advice = Advice.FIX_CONFIG


class UnsupportedError(BackendError):
    """The backend does not offer this operation."""


class InvalidError(BackendError):
    """The request is wrong in itself: a name, a size or a buffer the backend cannot take."""


class ClosedError(BackendError):
    """`close` was called before or during this operation."""


class BreachError(BackendError):
    """The backend broke its contract, for example with a result list of another length."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EMLINK}
_DENIED = {errno.EACCES, errno.EPERM}
_INVALID = {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EFBIG}


def error_from_os(doing: str, cause: OSError) -> BackendError:
    """Map an `OSError` to the tree. `doing` names the operation and the object."""
    code = cause.errno
    name = errno.errorcode.get(code, str(code)) if code is not None else type(cause).__name__
    message = f"{doing}: {name} ({cause.strerror or cause})"
    if isinstance(cause, TimeoutError):
        return TimedOutError(message)
    if code in _FULL:
        return NoSpaceError(message)
    if code in _DENIED:
        return DeniedError(message)
    if code == errno.EROFS:
        return ReadOnlyError(message)
    if code in _INVALID:
        return InvalidError(message)
    return UnavailableError(message)


def text_of(error: BaseException) -> str:
    """The first line of what an error says; vendor code may raise one that cannot say it."""
    try:
        return (str(error).splitlines() or [""])[0][:300]
    except BaseException:  # noqa: BLE001  # whatever it is, it is raised while another error is being told
        return "(its text cannot be had)"
