"""The error tree: what failed, and what the caller may do about it."""

from __future__ import annotations

import copy
import errno

import pytest

from kvstore_sdk import errors
from kvstore_sdk.backend import (
    Advice,
    BackendError,
    ConfigError,
    DeniedError,
    InvalidError,
    KVStoreError,
    NoSpaceError,
    ReadOnlyError,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    error_from_os,
)


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.ENOSPC, NoSpaceError, Advice.FREE_SPACE),
        (errno.EDQUOT, NoSpaceError, Advice.FREE_SPACE),
        (errno.EMLINK, NoSpaceError, Advice.FREE_SPACE),
        (errno.EACCES, DeniedError, Advice.FIX_CONFIG),
        (errno.EPERM, DeniedError, Advice.FIX_CONFIG),
        (errno.EROFS, ReadOnlyError, Advice.FIX_CONFIG),
        (errno.ENAMETOOLONG, InvalidError, Advice.GIVE_UP),
        (errno.EISDIR, InvalidError, Advice.GIVE_UP),
        (errno.ENOTDIR, InvalidError, Advice.GIVE_UP),
        (errno.ELOOP, InvalidError, Advice.GIVE_UP),
        (errno.EFBIG, InvalidError, Advice.GIVE_UP),
        (errno.EIO, UnavailableError, Advice.RETRY),
        (errno.ESTALE, UnavailableError, Advice.RETRY),
        (errno.EMFILE, UnavailableError, Advice.RETRY),
        (errno.ETIMEDOUT, TimedOutError, Advice.RETRY),
        (errno.ECONNREFUSED, UnavailableError, Advice.RETRY),
    ],
)
def test_each_errno_says_what_may_be_done(code: int, kind: type[BackendError], advice: Advice) -> None:
    error = error_from_os("fs put /mnt/kv/a", OSError(code, "the reason"))
    assert type(error) is kind
    assert error.advice is advice
    assert str(error) == f"fs put /mnt/kv/a: {errno.errorcode[code]} (the reason)"


@pytest.mark.parametrize("cause", [OSError("no number"), OSError(99999, "odd"), TimeoutError("late")])
def test_an_os_error_without_a_known_number_is_still_mapped(cause: OSError) -> None:
    error = error_from_os("p2p connect", cause)
    assert isinstance(error, UnavailableError)
    assert str(error).startswith("p2p connect: ")


def test_there_is_one_root_and_built_in_parents_where_they_fit() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert all(issubclass(kind, KVStoreError) for kind in kinds)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(TimedOutError, TimeoutError)
    assert not issubclass(ConfigError, BackendError)


def test_a_config_error_keeps_its_parts_when_it_is_copied() -> None:
    """It crosses from a worker process to the one that reports it."""
    error = ConfigError("backend fs", "location", "is a file; name a folder")
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert (twin.where, twin.field, twin.problem, str(twin)) == (error.where, error.field, error.problem, str(error))
    assert str(error) == "backend fs: location: is a file; name a folder"


def test_a_throttled_error_says_when_to_come_back() -> None:
    assert ThrottledError("s3 get: slow down").retry_after_s == 0.0
    assert ThrottledError("s3 get: slow down", 1.5).retry_after_s == 1.5
