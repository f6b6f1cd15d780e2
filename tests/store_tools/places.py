"""Stores that tools work on, and what a command that worked on one printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

from kvstore_sdk.backend import open_backend

__all__ = ["SECRET_VARIABLE", "Bucket", "Place", "Ran"]

SECRET_VARIABLE = "KVSTORE_TEST_SECRET"


@dataclass(frozen=True)
class Place:
    """A store under test.

    Attributes:
        url: As it is named on a command line.
        tree: What lies in it, without its backend.
        options: Of its backend.
    """

    url: str
    tree: Any
    options: dict[str, str] = field(default_factory=dict)

    def open(self, **options: object) -> Any:
        """Its backend. Whoever opens it closes it."""
        return open_backend(self.url, self.options | options)

    def arguments(self, flag: str = "--option") -> list[str]:
        """What a command is told beside the URL, with `flag` for each option."""
        return [part for name, value in self.options.items() for part in (flag, f"{name}={value}")]


@dataclass(frozen=True)
class Ran:
    """What came of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Bucket(Place):
    """A prefix of a bucket. The command takes the secret from `SECRET_VARIABLE`."""

    @classmethod
    def at(cls, endpoint: str, bucket: str, tree: Any) -> Bucket:
        options = {"endpoint": endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": f"env:{SECRET_VARIABLE}"}
        return cls(f"s3://{bucket}/kv", tree, options | {"region": REGION, "addressing": "path", "engine": "s3fs"})

    def open(self, **options: object) -> Any:
        return open_backend(self.url, self.options | {"secret_access_key": SECRET_ACCESS_KEY} | options)
