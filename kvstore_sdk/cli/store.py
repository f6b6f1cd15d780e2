"""The store that a command was told to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_sdk.backend import Backend, ConfigError, Deadline, SupportsUsage, open_backend
from kvstore_sdk.cli.table import human_bytes

__all__ = ["Store"]


@dataclass(frozen=True)
class Store:
    """A backend as configured: a URL, or a name or `module:factory` with a location; and options beside those of the URL.

    `temporary` is the folder that was made for it, if one was.

    Raises:
        ConfigError: `backend` is empty, or a path.
    """

    backend: str
    location: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    temporary: str | None = None

    def __post_init__(self) -> None:
        if not self.backend.strip():
            raise ConfigError("demo", "store", "must not be empty; write a URL, a backend's name, or module:factory")
        if ":" not in self.backend and self.backend.startswith(("/", ".", "~")):
            url = Path(self.backend).expanduser().absolute().as_uri()
            raise ConfigError("demo", "store", f"is a path, not a URL; write {url}")

    def open(self) -> Backend:
        """Open it, to be written to and to be shared with another process.

        Raises:
            ConfigError: the configuration is wrong, or the store is not of that kind. No record was written.
        """
        backend = open_backend(self.backend, self.options, location=self.location)
        problem = None
        if not backend.capabilities.shared:
            problem = (
                "its capabilities say shared=False, so engine B, another process, could not read what engine A stores; "
                "give a store that processes share, such as file:///mnt/kv, or declare shared=True if yours is one"
            )
        elif backend.capabilities.read_only:
            problem = "is read-only, and the demo stores; open it for writing"
        if problem is not None:
            backend.close()
            raise ConfigError("demo", "store", problem)
        return backend

    def entry(self) -> dict[str, str]:
        """For a vLLM tier. Never for a command line, which every user can read."""
        return {"backend": self.backend, **({"location": self.location} if self.location is not None else {}), **self.options}

    def __str__(self) -> str:
        # Without the URL's query, which may carry what is not for the screen. It has no fragment and no password, or it would not open.
        shown = self.backend.partition("?")[0]
        return shown if self.location is None else f"{shown} at {self.location}"

    def how_to_delete(self, namespaces: Sequence[str]) -> str:
        """Of what a demo left under these namespaces, as one line."""
        if self.temporary is not None:
            return f"To delete what the demo left: rm -r {self.temporary}"
        flags = " ".join(f"--namespace {namespace}" for namespace in namespaces)
        return f"It stays there. To delete it, give the same store to kvstore prune {flags}"

    def summary(self) -> str:
        """What is in it, as one sentence."""
        backend = self.open()
        try:
            if not isinstance(backend, SupportsUsage):
                return f"The records are in {self}."
            usage = backend.usage(Deadline.after(10))
            return f"{self} now holds {usage.records} records in all, manifests among them, {human_bytes(usage.used_bytes)}."
        finally:
            backend.close()
