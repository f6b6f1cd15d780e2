"""Wrappers that make any backend slow, failing, hanging, lying or corrupting, by a script, and one that watches its caller.

For the tests of this SDK and of vendors. Nothing here imports a test framework. `docs/testing.md` has examples.
"""

from kvstore_sdk.testing.actions import (
    Hang,
    InDoubt,
    NoSpace,
    Raise,
    ReadLate,
    Return,
    ReturnLate,
    Say,
    WriteLate,
)
from kvstore_sdk.testing.clock import JumpClock
from kvstore_sdk.testing.corruption import Stale, SwapRecords, Torn, WrongBytes, WrongSize
from kvstore_sdk.testing.faults import Action, Call, Fault
from kvstore_sdk.testing.faulty import Event, FaultyBackend
from kvstore_sdk.testing.recording import RecordedCall, RecordingBackend
from kvstore_sdk.testing.schedule import BREACHES, KINDS, Episode, Schedule, draw_episodes
from kvstore_sdk.testing.wrapper import BackendWrapper

__all__ = [
    "BREACHES",
    "KINDS",
    "Action",
    "BackendWrapper",
    "Call",
    "Episode",
    "Event",
    "Fault",
    "FaultyBackend",
    "Hang",
    "InDoubt",
    "JumpClock",
    "NoSpace",
    "Raise",
    "ReadLate",
    "RecordedCall",
    "RecordingBackend",
    "Return",
    "ReturnLate",
    "Say",
    "Schedule",
    "Stale",
    "SwapRecords",
    "Torn",
    "WriteLate",
    "WrongBytes",
    "WrongSize",
    "draw_episodes",
]
