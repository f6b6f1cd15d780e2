"""The store that a command was told to use."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_sdk.backend import Backend, ConfigError, Deadline, SupportsUsage, open_backend
from kvstore_sdk.cli.table import human_bytes

__all__ = ["Store"]


@dataclass(frozen=True)
class Store:
    """A backend as configured: a URL, or a name or `module:factory` with a location."""

    backend: str
    location: str | None = None

    def open(self) -> Backend:
        """Open it, to be written to and to be shared with another process.

        Raises:
            ConfigError: the configuration is wrong, or the store is not of that kind. No record was written.
        """
        backend = open_backend(self.backend, location=self.location)
        problem = None
        if not backend.capabilities.shared:
            problem = "is not shared between processes; give a URL such as file:///mnt/kv"
        elif backend.capabilities.read_only:
            problem = "is read-only, and the demo stores; open it for writing"
        if problem is not None:
            backend.close()
            raise ConfigError("demo", "store", problem)
        return backend

    def entry(self) -> dict[str, str]:
        """For a vLLM tier, and for `Store(**entry)` in another process. Never for a command line, which every user can read."""
        return {"backend": self.backend, **({"location": self.location} if self.location is not None else {})}

    def __str__(self) -> str:
        # Without the URL's query, which may carry what is not for the screen. It has no fragment and no password, or it would not open.
        shown = self.backend.partition("?")[0]
        return shown if self.location is None else f"{shown} at {self.location}"

    def summary(self) -> str:
        """What is in it, as one sentence."""
        backend = self.open()
        try:
            if not isinstance(backend, SupportsUsage):
                return f"The records are in {self}."
            usage = backend.usage(Deadline.after(10))
            return f"{self} holds {usage.records} records, {human_bytes(usage.used_bytes)}."
        finally:
            backend.close()
