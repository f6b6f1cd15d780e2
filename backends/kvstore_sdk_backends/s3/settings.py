"""What an operator may set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "MAX_PUT_BYTES",
    "TLS_OFF",
    "WHERE",
    "Addressing",
    "Checksums",
    "ConditionalWrites",
    "Engine",
    "Probe",
    "S3Settings",
]

WHERE = "backend s3"
MAX_PUT_BYTES = 5 << 30
"""The largest object that S3 takes in one request; a record is never written in several."""

TLS_OFF = "nixl always verifies certificates; write s3fs, or give ca_bundle instead of verify_tls=false"

Engine = Literal["auto", "nixl", "s3fs"]
Addressing = Literal["auto", "path", "virtual"]
Checksums = Literal["when_required", "when_supported", "off"]
ConditionalWrites = Literal["auto", "always", "never"]
Probe = Literal["write", "read", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """How to reach and use an object store. `open_s3` says what each option means.

    The secrets do not show in `repr`. Nothing is checked here: `open_s3` does that.
    """

    engine: Engine = "auto"
    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    ca_bundle: str | None = None
    verify_tls: bool = True
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    checksums: Checksums = "when_required"
    conditional_writes: ConditionalWrites = "auto"
    concurrency: int = 64
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    retries: int = 4
    storage_class: str | None = None
    tags: str | None = None
    read_only: bool = False
    max_record_bytes: int = 1 << 30
    probe: Probe = "write"
