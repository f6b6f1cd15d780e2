"""Values out of msgpack, each of the type, the length and the range that it has to have.

No error says anything of a value that is none but a number.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgpack

from kvstore_sdk.backend import InvalidError, is_valid_name

__all__ = [
    "MAX_TEXT_BYTES",
    "MessageError",
    "as_array",
    "as_binary",
    "as_integer",
    "as_name",
    "as_names",
    "as_text",
    "as_versions",
    "unpack",
]

MAX_TEXT_BYTES = 4096


class MessageError(InvalidError):
    """A frame is not a message of this protocol. The text has one line and holds nothing of what the frame said but numbers."""


def unpack(frame: bytes | memoryview, *, max_binary_bytes: int, max_entries: int) -> Any:
    """What a frame holds, arrays as tuples: no maps, no extensions, no text of more than `MAX_TEXT_BYTES`, nothing after it.

    These are the bounds of all versions, so they must not become narrower, and no frame may be made that needs wider ones.

    Raises:
        MessageError: it is not of this form.
    """
    try:
        return msgpack.unpackb(
            frame,
            use_list=False,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=max_binary_bytes,
            max_array_len=max_entries,
            max_map_len=0,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except Exception as cause:  # noqa: BLE001  # the library's own kinds, its ValueErrors and the UnicodeDecodeError of a bent text
        raise MessageError(f"p2p: frame is not msgpack as the protocol uses it ({type(cause).__name__})") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError("extension type")


def as_integer(what: str, value: Any, low: int, high: int) -> int:
    # `True` is an int of Python's, and none of the protocol's.
    if type(value) is not int:
        raise MessageError(f"p2p: {what} is not an integer")
    if not low <= value <= high:
        raise MessageError(f"p2p: {what} is {value}, allowed are {low} to {high}")
    return value


def as_array(what: str, value: Any, low: int, high: int) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise MessageError(f"p2p: {what} is not an array")
    if not low <= len(value) <= high:
        raise MessageError(f"p2p: {what} has {len(value)} entries, allowed are {low} to {high}")
    return value


def as_binary(what: str, value: Any, low: int, high: int) -> bytes:
    if type(value) is not bytes:
        raise MessageError(f"p2p: {what} is not binary")
    if not low <= len(value) <= high:
        raise MessageError(f"p2p: {what} has {len(value)} bytes, allowed are {low} to {high}")
    return value


def as_text(what: str, value: Any, form: re.Pattern[str]) -> str:
    if type(value) is not str or form.fullmatch(value) is None:
        raise MessageError(f"p2p: {what} does not have its form")
    return value


def as_name(value: Any) -> str:
    if type(value) is not str or not is_valid_name(value):
        raise MessageError("p2p: a name is not one of a record")
    return value


def as_names(value: Any, high: int) -> tuple[str, ...]:
    names = as_array("names", value, 1, high)
    for name in names:
        as_name(name)
    return names


def as_versions(value: Any, high: int) -> tuple[int, int]:
    """The lowest and the highest that somebody speaks."""
    lowest, highest = as_array("versions", value, 2, 2)
    lowest = as_integer("lowest version", lowest, 0, high)
    return lowest, as_integer("highest version", highest, lowest, high)
