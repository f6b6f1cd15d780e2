"""What a check says when a requirement is broken."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CallRaised", "ConformanceFailure", "NotApplicable", "require", "show", "show_difference"]

_SHOWN_BYTES = 8


class ConformanceFailure(Exception):
    """A requirement is broken.

    Args:
        expected: In the vendor's words: what the contract asks for.
        seen: What there was instead.
        note: Where and when, if that helps.
        breaks: The requirement that this breaks, if it is another than the one that is being checked: then that one fails, and the one
            that is being checked is blocked by it. Where that one does not apply, the one that is being checked fails.
    """

    def __init__(self, expected: str, seen: str, *, note: str = "", breaks: str | None = None) -> None:
        super().__init__(f"expected {expected}; seen {seen}")
        self.expected = expected
        self.seen = seen
        self.note = note
        self.breaks = breaks


class CallRaised(ConformanceFailure):
    """A call of the backend raised; `error` is what it raised."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(f"an answer from {call}", f"{type(error).__name__}: {error}")
        self.error = error


class NotApplicable(Exception):
    """The check found out that the backend does not offer what the requirement is about; the text says what."""


def require(holds: object, expected: str, seen: object, *, note: str = "", breaks: str | None = None) -> None:
    """Fail the requirement unless `holds`.

    Raises:
        ConformanceFailure: it does not hold.
    """
    if not holds:
        raise ConformanceFailure(expected, show(seen), note=note, breaks=breaks)


def show(value: object) -> str:
    """A value in a report: never a whole record."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        head = bytes(value[:_SHOWN_BYTES])
        return repr(head) if len(value) <= _SHOWN_BYTES else f"{len(value)} bytes starting {head.hex(' ')}"
    if isinstance(value, Sequence) and len(value) > 8:
        return f"[{', '.join(map(_show_item, value[:8]))}, ... {len(value) - 8} more]"
    return f"[{', '.join(map(_show_item, value))}]" if isinstance(value, list) else _show_item(value)


def show_difference(wanted: bytes, seen: bytes) -> str:
    """Where two records differ."""
    if len(wanted) != len(seen):
        return f"{len(seen)} bytes instead of {len(wanted)}"
    wrong = [index for index, (one, other) in enumerate(zip(wanted, seen, strict=True)) if one != other]
    if not wrong:
        return "no difference"
    at = wrong[0]
    here, there = seen[at : at + 4].hex(" "), wanted[at : at + 4].hex(" ")
    return f"{len(wrong)} of {len(seen)} bytes differ, the first at offset {at}: {here} instead of {there}"


def _show_item(value: object) -> str:
    status = getattr(value, "status", None)
    if status is None:
        error = getattr(value, "error", None)
        return f"Failure({type(error).__name__}: {error})" if error is not None else repr(value)
    details = [
        f"{name}={getattr(value, name)!r}"
        for name in ("error", "ticket", "size_bytes", "asked_bytes")
        if getattr(value, name, None) is not None
    ]
    return f"{getattr(status, 'name', status)}{'(' + ', '.join(details) + ')' if details else ''}"
