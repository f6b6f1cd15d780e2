"""Errors, items and results as plain JSON values, and back. What comes back is checked: the other end runs a vendor's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from kvstore_sdk import errors
from kvstore_sdk.backend import (
    BackendError,
    BreachError,
    Capabilities,
    ConfigError,
    DeleteStatus,
    Durability,
    Failure,
    Fork,
    GetResult,
    GetStatus,
    KVStoreError,
    ListEntry,
    ListPage,
    PutResult,
    PutStatus,
    ThrottledError,
    Usage,
    error_from_os,
)
from kvstore_sdk.errors import text_of
from kvstore_sdk.isolation.wire import WireError

__all__ = [
    "pack_capabilities",
    "pack_error",
    "pack_results",
    "unpack_capabilities",
    "unpack_error",
    "unpack_results",
]

_MAX_TEXT = 1000
_LONGEST_WISH_S = 86_400.0
"""A store that wants to be left alone for longer than a day has made a mistake."""
_LARGEST = 1 << 62
_LATEST_S = 1e12
"""Unix time of some tens of thousands of years."""
_KINDS: dict[str, type[BackendError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BackendError)
}

Keep = Callable[[Any], int]
"""Puts a ticket of the backend away, under a number that can cross."""


def pack_error(error: BaseException, doing: str) -> list[Any]:
    """An error of any kind as a class of `kvstore_sdk.errors`, its text, and what else that class has."""
    try:
        if isinstance(error, ConfigError):
            return ["ConfigError", *(str(part)[:_MAX_TEXT] for part in (error.where, error.field, error.problem))]
        if isinstance(error, OSError) and not isinstance(error, BackendError):
            error = error_from_os(doing, error)
        if isinstance(error, BackendError):
            kind = next(name for name in (parent.__name__ for parent in type(error).__mro__) if name in _KINDS)
            wish = vars(error).get("retry_after_s", 0.0)
            is_wish = isinstance(wish, (int, float)) and 0.0 <= wish <= _LONGEST_WISH_S
            return [kind, text_of(error), float(wish) if is_wish else 0.0]
    except BaseException:  # noqa: BLE001  # an error of a vendor's class may do anything when it is looked at
        return ["UnavailableError", f"{doing}: raised {type(error).__name__}", 0.0]
    return ["UnavailableError", f"{doing}: raised {type(error).__name__}: {text_of(error)}", 0.0]


def unpack_error(packed: object) -> KVStoreError:
    """The error again.

    Raises:
        WireError: it is of no known class, or of another form.
    """
    if not isinstance(packed, list) or not packed or not all(isinstance(part, str) for part in packed[:2]):
        raise WireError("an error has another form")
    kind, *rest = packed
    if kind == "ConfigError" and len(rest) == 3 and all(isinstance(part, str) for part in rest):
        where, field, problem = (_line(part) for part in rest)
        return ConfigError(where, field, problem)
    if kind not in _KINDS or len(rest) != 2:
        raise WireError("an error is of an unknown class")
    text, wish = rest
    if kind == "ThrottledError":
        if not isinstance(wish, float) or not 0.0 <= wish <= _LONGEST_WISH_S:
            raise WireError("an error has another form")
        return ThrottledError(_line(text), wish)
    return _KINDS[kind](_line(text))


def pack_capabilities(found: Capabilities) -> dict[str, Any]:
    packed = {field.name: getattr(found, field.name) for field in dataclasses.fields(Capabilities)}
    return packed | {"durability": found.durability.value, "fork": found.fork.value}


def unpack_capabilities(packed: object) -> Capabilities:
    """
    Raises:
        WireError: something is missing, too much, or out of bounds.
    """
    try:
        values = dict(cast(Any, packed))
        return Capabilities(**values | {"durability": Durability(values["durability"]), "fork": Fork(values["fork"])})
    except (TypeError, ValueError, KeyError) as cause:
        raise WireError(f"capabilities have another form ({text_of(cause)})") from None


def pack_results(op: str, count: int, results: Any, doing: str, keep: Keep | None) -> Any:
    """What a backend returned, after a look at it.

    Args:
        op: The method.
        count: How many results it must have.
        results: As the backend returned them.
        doing: What was done, for errors.
        keep: Puts tickets away; None when the backend may not be in doubt.

    Raises:
        BreachError: the answer is not what the contract allows.
    """
    if op == "list":
        if not isinstance(results, ListPage):
            raise BreachError(f"{doing}: answered a {type(results).__name__}, a ListPage was expected")
        return [[[entry.name, entry.size_bytes, entry.modified_s] for entry in results.entries], results.cursor]
    if op == "usage":
        if not isinstance(results, Usage):
            raise BreachError(f"{doing}: answered a {type(results).__name__}, a Usage was expected")
        return [results.records, results.used_bytes, results.capacity_bytes]
    if not isinstance(results, (list, tuple)) or len(results) != count:
        size = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        raise BreachError(f"{doing}: answered {size}, a list of {count} results was expected")
    return [_pack_result(op, place, result, doing, keep) for place, result in enumerate(results)]


def _pack_result(op: str, place: int, result: Any, doing: str, keep: Keep | None) -> Any:
    kind = _RESULTS.get(op)
    if kind is None:
        if op == "delete" and isinstance(result, DeleteStatus):
            return result.value
        if op != "delete" and (result is True or result is False):
            return result
        if op in ("exists", "delete") and isinstance(result, Failure) and isinstance(result.error, BackendError):
            return pack_error(result.error, doing)
    if kind is None or not isinstance(result, kind) or not isinstance(result.status, _STATUSES[op]):
        raise BreachError(f"{doing}: item {place} is a {type(result).__name__} that the contract does not allow")
    status, error = result.status.value, result.error
    in_doubt = status == "in_doubt"
    lacks = (status == "failed" and error is None) or (in_doubt and (result.ticket is None or keep is None))
    if lacks or not (error is None or isinstance(error, BackendError)):
        raise BreachError(f"{doing}: item {place} is {status.upper()}, and without what goes with it")
    sizes = [result.size_bytes, result.asked_bytes] if isinstance(result, GetResult) and status == "wrong_size" else [None, None]
    if error is None and not in_doubt and sizes == [None, None]:
        return status
    packed = None if error is None else pack_error(error, doing)
    return [status, packed, keep(result.ticket) if in_doubt and keep is not None else None, *sizes]


def unpack_results(op: str, count: int, packed: Any) -> Any:
    """The results again. Tickets are the child's numbers.

    Raises:
        WireError: something is of another type, length or range.
    """
    if op == "list":
        return _unpack_page(packed)
    if op == "usage":
        if not isinstance(packed, list) or len(packed) != 3 or not all(_is_size(number) for number in packed[:2]):
            raise WireError("a usage has another form")
        records, used_bytes, capacity_bytes = packed
        if capacity_bytes is not None and not _is_size(capacity_bytes):
            raise WireError("a usage has another form")
        return Usage(records, used_bytes, capacity_bytes)
    if not isinstance(packed, list) or len(packed) != count:
        raise WireError(f"{len(packed) if isinstance(packed, list) else 'no'} results came for {count} items")
    return [_unpack_result(op, result) for result in packed]


def _unpack_result(op: str, packed: Any) -> Any:
    if op in ("put", "get"):
        if isinstance(packed, str):
            packed = [packed, None, None, None, None]
        if not isinstance(packed, list) or len(packed) != 5:
            raise WireError("a result has another form")
        value, error, ticket, size_bytes, asked_bytes = packed
        status = _status(op, value)
        failure = None if error is None else _backend_error(error)
        if (status.value == "failed" and failure is None) or (status.value == "in_doubt") != _is_size(ticket):
            raise WireError("a result lacks what goes with its status")
        if op == "put":
            return PutResult(status, failure, ticket)
        if (status is GetStatus.WRONG_SIZE) != (_is_size(size_bytes) and _is_size(asked_bytes)):
            raise WireError("a result lacks what goes with its status")
        return GetResult(status, failure, ticket, size_bytes, asked_bytes)
    if op != "delete" and (packed is True or packed is False):
        return packed
    if op == "delete" and isinstance(packed, str):
        return _status(op, packed)
    if op in ("exists", "delete"):
        return Failure(_backend_error(packed))
    raise WireError("a result has another form")


def _unpack_page(packed: Any) -> ListPage:
    if not isinstance(packed, list) or len(packed) != 2 or not isinstance(packed[0], list):
        raise WireError("a page of a listing has another form")
    entries, cursor = packed
    if cursor is not None and not isinstance(cursor, str):
        raise WireError("a page of a listing has another form")
    return ListPage([_entry(entry) for entry in entries], cursor)


def _entry(packed: Any) -> ListEntry:
    if isinstance(packed, list) and len(packed) == 3:
        name, size_bytes, modified_s = packed
        is_number = isinstance(modified_s, (int, float)) and not isinstance(modified_s, bool)
        is_time = modified_s is None or (is_number and 0 <= modified_s < _LATEST_S)
        if isinstance(name, str) and _is_size(size_bytes) and is_time:
            return ListEntry(name, size_bytes, modified_s)
    raise WireError("an entry of a listing has another form")


_RESULTS: dict[str, type[PutResult] | type[GetResult]] = {"put": PutResult, "get": GetResult}
_STATUSES: dict[str, Any] = {"put": PutStatus, "get": GetStatus, "delete": DeleteStatus}


def _status(op: str, value: Any) -> Any:
    try:
        return _STATUSES[op](value)
    except ValueError:
        raise WireError("a status is unknown") from None


def _backend_error(packed: object) -> BackendError:
    error = unpack_error(packed)
    if not isinstance(error, BackendError):
        raise WireError("an error is of a class that no result may have")
    return error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _line(text: str) -> str:
    """One line that can be shown, whatever a vendor's error says."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])
