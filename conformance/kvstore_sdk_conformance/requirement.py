"""What a requirement is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["CONTRACT_VERSION", "Level", "Need", "Profile", "Requirement"]

CONTRACT_VERSION = "0.1"
"""Of the table of requirements. A new MUST, or a stricter one, comes with a new number."""


class Level(Enum):
    """By RFC 2119.

    Attributes:
        MUST: A backend that breaks it is not conformant.
        SHOULD: Breaking it is an advisory, unless the run is strict.
    """

    MUST = "MUST"
    SHOULD = "SHOULD"


class Profile(Enum):
    """What a backend can be trusted with: one verdict each."""

    CORE = "core"
    ATOMICITY = "atomicity"
    CONCURRENCY = "concurrency"
    LIVENESS = "liveness"
    ERRORS = "errors"
    SHARING = "sharing"
    DURABILITY = "durability"
    DELETION = "deletion"
    LISTING = "listing"
    CAPACITY = "capacity"
    REGIONS = "regions"
    TIER = "tier"
    PERFORMANCE = "performance"
    VLLM = "vllm"


class Need(Enum):
    """What a requirement is about; a backend that does not offer it cannot break the requirement.

    The value completes the sentence "not applicable: ...".
    """

    WRITABLE = "the backend declares read_only"
    READ_ONLY = "the backend does not declare read_only"
    SEVERAL_PARTS = "the backend declares max_parts=1"
    SEVERAL_ITEMS = "the backend declares max_batch=1"
    SEVERAL_CALLS = "the backend declares max_concurrency=1"
    SHARED = "the backend does not declare shared"
    READ_AFTER_WRITE = "the backend does not declare read_after_write"
    PROCESS_CRASH = "the backend declares durability NONE"
    IN_DOUBT = "the backend does not declare in_doubt"
    DELETE = "the backend does not implement SupportsDelete"
    LIST = "the backend does not implement SupportsList"
    USAGE = "the backend does not implement SupportsUsage"
    BOUNDED = "the backend has no capacity of at most 256 MiB; give it one with an option, such as max_bytes=64MiB"
    REGIONS = "the backend does not implement SupportsRegions"
    SECRETS = "no option of the backend has a name that says it is secret"
    VLLM = "vllm is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One clause of the contract.

    Attributes:
        id: `KV-<PROFILE>-<number>`; never given twice.
        level: What breaking it means.
        profile: The verdict it counts for.
        sentence: What is required, as one sentence.
        why: What goes wrong for a user otherwise.
        needs: What a backend has to offer for this to apply.
        builds_on: Requirements without which this one cannot be judged: when one of those fails, a failure of this one is *blocked*.
    """

    id: str
    level: Level
    profile: Profile
    sentence: str
    why: str
    needs: tuple[Need, ...] = ()
    builds_on: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """Of its heading in docs/requirements.md."""
        return self.id.lower()
