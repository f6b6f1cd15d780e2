"""Wrappers that make any backend slow, failing, hanging, lying or corrupting, by a script, and one that watches its caller.

For the tests of this SDK and of vendors. Nothing here imports a test framework. `docs/testing.md` has examples.
"""

from kvstore_sdk.testing.actions import (
    Hang,
    InDoubt,
    Raise,
    ReadLate,
    Return,
    ReturnLate,
    Say,
    SwapRecords,
    WriteLate,
    WrongBytes,
    WrongSize,
)
from kvstore_sdk.testing.faults import Action, Call, Fault
from kvstore_sdk.testing.faulty import Event, FaultyBackend
from kvstore_sdk.testing.recording import RecordedCall, RecordingBackend
from kvstore_sdk.testing.wrapper import BackendWrapper

__all__ = [
    "Action",
    "BackendWrapper",
    "Call",
    "Event",
    "Fault",
    "FaultyBackend",
    "Hang",
    "InDoubt",
    "Raise",
    "ReadLate",
    "RecordedCall",
    "RecordingBackend",
    "Return",
    "ReturnLate",
    "Say",
    "SwapRecords",
    "WriteLate",
    "WrongBytes",
    "WrongSize",
]
