"""The backend under test: how to open it, at a location that nobody else uses."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from kvstore_sdk.backend import Backend, ConfigError, backend_options, open_backend

__all__ = ["FRESH", "Place", "Target"]

FRESH = "{fresh}"
"""In a target or a location: stands for a name that was never used before."""


@dataclass(frozen=True)
class Place:
    """One location of a target. Opening it twice, in this process or another, means the same store.

    Attributes:
        target: As `open_backend` takes it.
        options: Options of the backend.
        location: None where the target is a URL, which says it itself.
        folder: A folder that everything of the location lies in and nothing else: it is removed in the end. None: there may be none.
        import_path: What a process that opens it has to have on its `sys.path`.
    """

    target: str
    options: Mapping[str, str]
    location: str | None
    folder: str | None = None
    import_path: tuple[str, ...] = ()

    def open(self) -> Backend:
        """Open it.

        Raises:
            KVStoreError: as `open_backend`.
        """
        return open_backend(self.target, self.options, location=self.location)

    def beside(self, number: int) -> Place:
        """Another location, which is written like this one and `number` characters more: whoever tells them apart by a prefix does not."""
        more = "0" * number
        if self.location is not None:
            # A temporary folder holds both, and goes with the first one.
            own = self.folder is not None and self.location.startswith(self.folder) and self.location != self.folder
            return replace(self, location=self.location + more, folder=None if own or self.folder is None else self.folder + more)
        url, mark, query = self.target.partition("?")
        return replace(self, target=f"{url}{more}{mark}{query}", folder=None if self.folder is None else self.folder + more)

    def discard(self) -> None:
        """Remove the folder, if there is one. What lies elsewhere is removed record by record, by whoever stored it."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target, "options": dict(self.options), "location": self.location, "import_path": list(self.import_path)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Place:
        return cls(found["target"], found["options"], found["location"], None, tuple(found["import_path"]))


@dataclass(frozen=True)
class Target:
    """What `--kvstore-backend`, `--kvstore-location` and `--kvstore-option` say.

    Without a location, `module:factory` and the name of a backend get the path of something that does not exist yet, in a temporary folder
    that does. `{fresh}` in a URL or a location stands for a name that is new each time; a URL without it gets one more segment.
    """

    target: str
    options: Mapping[str, str] = field(default_factory=dict)
    location: str | None = None
    import_path: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """What to know of the location when it cannot be opened; "" if it is as it was given."""
        if self.location is not None or FRESH in self.target or "://" not in self.target:
            return ""
        return f"a new segment is put at the end of the URL for each check; {FRESH} in the URL says where else a new name goes"

    @property
    def shown(self) -> str:
        """The target without what its URL carries as options, which may be secret."""
        url, query, _ = self.target.partition("?")
        return f"{url}{'?...' if query else ''}"

    def fresh(self) -> Place:
        """A new location. Nothing is opened or created there."""
        name = f"kvstore-{secrets.token_hex(8)}"
        if self.location is not None:
            if FRESH not in self.location:
                raise ConfigError("conformance", "location", f"must hold {FRESH}, which stands for a name that is new each time")
            location = self.location.replace(FRESH, name)
            return self._place(self.target, location, _own_folder(location, name))
        if "://" in self.target or self.target.endswith(":") or FRESH in self.target:
            url = self.target.replace(FRESH, name) if FRESH in self.target else _below(self.target, name)
            parts = urlsplit(url)
            return self._place(url, None, None if parts.netloc else _own_folder(unquote(parts.path), name))
        folder = tempfile.mkdtemp(prefix="kvstore-conformance-")
        return self._place(self.target, str(Path(folder) / name), folder)

    def secrets(self) -> dict[str, str]:
        """The given options that are secret by their name, those of the URL included."""
        schema = backend_options(self.target.replace(FRESH, "x"))
        query = dict(parse_qsl(self.target.partition("?")[2]))
        return {name: value for name, value in (query | dict(self.options)).items() if name in schema and schema[name].secret and value}

    def _place(self, target: str, location: str | None, folder: str | None) -> Place:
        return Place(target, self.options, location, folder, self.import_path)


def _own_folder(path: str, name: str) -> str | None:
    """The folder of this new name, of which nobody else knows, if the location is a path of this machine."""
    whole = Path(path)
    parts = next((number for number, part in enumerate(whole.parts, 1) if name in part), 0)
    return str(Path(*whole.parts[:parts])) if whole.is_absolute() and parts else None


def _below(url: str, name: str) -> str:
    parts = urlsplit(url)
    path = f"{parts.path.rstrip('/')}/{name}" if parts.netloc or parts.path else name
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, parts.fragment))
