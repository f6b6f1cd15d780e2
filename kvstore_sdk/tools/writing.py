"""Storing whole records through memory of the tool's own."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_sdk.backend import Backend, Deadline, Mode, Put, PutResult, PutStatus, TimedOutError
from kvstore_sdk.errors import BreachError, ClosedError, UnavailableError
from kvstore_sdk.tools.memory import ToolMemory
from kvstore_sdk.tools.retry import Retry

__all__ = ["Writer"]


class Writer:
    """Stores one record at a time. For one thread; whoever made it closes it."""

    def __init__(self, backend: Backend, retry: Retry) -> None:
        self._backend = backend
        self._retry = retry
        self._memory = ToolMemory(backend)

    def write(self, name: str, record: memoryview | bytes, mode: Mode) -> bool:
        """Store `record`, whole pages of 4,096 bytes. False: CREATE found that a record of this name is there.

        Raises:
            BackendError: it could not be stored; with some errors it may be there nevertheless, and is whole then.
        """
        return self._retry.call(f"put {name}", lambda deadline: self._write(name, record, mode, deadline))

    def close(self) -> None:
        """Give its memory back."""
        self._memory.close()

    def _write(self, name: str, record: memoryview | bytes, mode: Mode, deadline: Deadline) -> bool:
        buffer = self._memory.fit(len(record))
        buffer.view[:] = record
        results = self._backend.put([Put(name, (buffer,), mode)], deadline)
        if not isinstance(results, Sequence) or len(results) != 1 or not isinstance(results[0], PutResult):
            raise BreachError(f"put {name}: the backend answered what is no list of one PutResult; that is for its vendor to fix")
        result = results[0]
        match result.status:
            case PutStatus.STORED:
                return True
            case PutStatus.EXISTS:
                return False
            case PutStatus.IN_DOUBT:
                if result.ticket is None:
                    raise BreachError(f"put {name}: the backend answered IN_DOUBT without a ticket; its vendor can fix that")
                self._memory.doubt(result.ticket)
                raise TimedOutError(f"put {name}: no answer within {self._retry.timeout_s:g} s")
            case PutStatus.TIMED_OUT:
                raise TimedOutError(f"put {name}: no answer within {self._retry.timeout_s:g} s")
            case PutStatus.CLOSED:
                raise result.error or ClosedError(f"put {name}: the backend was closed")
            case PutStatus.UNKNOWN:
                # Repeating is safe, whatever the backend says of it.
                raise UnavailableError(f"put {name}: the answer was lost") from result.error
            case PutStatus.FAILED:
                raise result.error or UnavailableError(f"put {name}: failed, and the backend does not say why")
