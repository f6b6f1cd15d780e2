"""The ways in which a `FaultProxy` fails."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Bandwidth",
    "Delay",
    "Fault",
    "Kind",
    "LongBody",
    "NeverAnswers",
    "ResetAfterBody",
    "ResetBefore",
    "ResetInsideBody",
    "ResetInsideRequest",
    "ShortBody",
    "Status",
    "WrongBytes",
    "clock_skew",
    "expired_token",
    "slow_down",
]


@dataclass(frozen=True)
class Status:
    """Answer this instead of asking the server. `code` is S3's own word for it, `retry_after` the header in seconds."""

    status: int
    code: str = "InternalError"
    retry_after: float | None = None


def slow_down(retry_after: float | None = None) -> Status:
    return Status(503, "SlowDown", retry_after)


def clock_skew() -> Status:
    return Status(403, "RequestTimeTooSkewed")


def expired_token() -> Status:
    return Status(400, "ExpiredToken")


@dataclass(frozen=True)
class Delay:
    """The server answers at once, and its answer arrives this much later."""

    seconds: float


@dataclass(frozen=True)
class Bandwidth:
    """Bodies go through at this rate, in both directions."""

    bytes_per_s: float


@dataclass(frozen=True)
class ResetBefore:
    """The connection is reset when the head of the request is there. The server sees nothing of it."""


@dataclass(frozen=True)
class ResetInsideRequest:
    """The connection is reset in the middle of the request's body. The server sees nothing of it."""


@dataclass(frozen=True)
class ResetInsideBody:
    """The head of the answer and these many bytes of its body arrive; then the connection is reset."""

    after_bytes: int = 0


@dataclass(frozen=True)
class ResetAfterBody:
    """The server does what it was asked; of its answer nothing arrives but a reset."""


@dataclass(frozen=True)
class ShortBody:
    """The last bytes of the answer's body are missing. `told`: its Content-Length says so; else the connection just ends early."""

    missing_bytes: int = 1
    told: bool = False


@dataclass(frozen=True)
class LongBody:
    """The answer's body is longer by these many bytes, and its Content-Length says so."""

    extra_bytes: int = 1


@dataclass(frozen=True)
class WrongBytes:
    """Some bytes of the answer's body are others, drawn from the seed; its length is right."""

    count: int = 1


@dataclass(frozen=True)
class NeverAnswers:
    """Nothing arrives until the client gives up or the proxy is healed, which resets the connection. `done`: the server did it."""

    done: bool = False


Kind = (
    Status | Delay | Bandwidth | ResetBefore | ResetInsideRequest | ResetInsideBody | ResetAfterBody | ShortBody | LongBody | WrongBytes
    | NeverAnswers
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to the next `times` requests of this method (`*`: any) whose decoded path contains `match`; None: to all of them."""

    kind: Kind
    verb: str = "*"
    match: str = ""
    times: int | None = None
