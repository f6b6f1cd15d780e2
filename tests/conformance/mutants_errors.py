"""Backends that break the profile errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Self
from urllib.parse import unquote

from mutant import FsMutant, MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    Deadline,
    DeniedError,
    Failure,
    GetResult,
    GetStatus,
    InvalidError,
    KVStoreError,
    PutResult,
    PutStatus,
    UnavailableError,
    is_valid_name,
)

Proceed = Callable[[Sequence[Any]], Any]


class AboutLongNames(MemoryMutant):
    """Has an answer of its own for names that are too long."""

    breaks = "KV-ERR-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        answers = proceed(items)
        if op not in ("exists", "get", "put"):
            return answers
        names = [getattr(item, "name", item) for item in items]
        return [self.refuse(op, answer) if len(name) > 255 else answer for name, answer in zip(names, answers, strict=True)]

    def refuse(self, op: str, answer: Any) -> Any:
        raise NotImplementedError


class FailsWithoutAnError(AboutLongNames):
    def refuse(self, op: str, answer: Any) -> Any:
        return GetResult(GetStatus.FAILED) if op == "get" else PutResult(PutStatus.FAILED) if op == "put" else answer


class FailsWithAText(AboutLongNames):
    def refuse(self, op: str, answer: Any) -> Any:
        return Failure("the name is too long") if op == "exists" else answer  # type: ignore[arg-type]


class FailsWithAForeignError(AboutLongNames):
    def refuse(self, op: str, answer: Any) -> Any:
        return Failure(OSError(36, "File name too long")) if op == "exists" else answer  # type: ignore[arg-type]


class JoinsPaths(FsMutant):
    """Takes every name for a path below its root."""

    breaks = "KV-ERR-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op not in ("exists", "get", "put", "delete"):
            return proceed(items)
        answers = []
        for item in items:
            name = getattr(item, "name", item)
            if is_valid_name(name) or not self.is_mine(name):
                answers += proceed([item])
            else:
                answers.append(self.follow(op, item, os.path.join(self.inner._root, self.path(name))))
        return answers

    def is_mine(self, name: str) -> bool:
        return "\0" not in name and len(name) < 200

    def path(self, name: str) -> str:
        return name

    def follow(self, op: str, item: Any, path: str) -> Any:
        try:
            if op == "exists":
                return os.path.isfile(path)
            if op == "get":
                with open(path, "rb") as file:
                    item.into[0].view[:] = file.read()
                return GetResult(GetStatus.FOUND)
            if op == "put":
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(item.parts[0].view)
                return PutResult(PutStatus.STORED)
            raise UnavailableError(f"delete {path}: not now")
        except (OSError, ValueError) as cause:
            error = InvalidError(f"{op} {path!r}: {cause}")
            return PutResult.failed(error) if op == "put" else GetResult.failed(error) if op == "get" else Failure(error)


class DecodesNamesAfterItCheckedThem(JoinsPaths):
    def is_mine(self, name: str) -> bool:
        return "%" in name

    def path(self, name: str) -> str:
        return unquote(name)


class TakesAnyName(MemoryMutant):
    breaks = "KV-ERR-03"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        inner._bad_name = lambda doing, name: None  # type: ignore[attr-defined]


class WithASecret(MemoryMutant):
    """Takes an option that is secret by its name."""

    breaks = "KV-ERR-04"

    def __init__(self, inner: Backend, secret_key: str | None = None) -> None:
        super().__init__(inner)
        self.secret_key = secret_key

    @classmethod
    def open(cls, location: str, *, secret_key: str | None = None) -> Self:
        return cls(cls.good(location), secret_key)


class ShowsItsSecretInItsRepr(WithASecret):
    def __repr__(self) -> str:
        return f"ShowsItsSecretInItsRepr(secret_key={self.secret_key!r})"


class LogsItsSecret(WithASecret):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        logging.getLogger("acme.wire").debug("%s with Authorization: %s", op, self.secret_key)
        return proceed(items)


class TellsItsSecretInAnError(WithASecret):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        answers = proceed(items)
        if op != "get":
            return answers
        error = InvalidError(f"get: bad request https://acme/?key={self.secret_key}&name=...")
        return [GetResult.failed(error) if answer.status is GetStatus.FAILED else answer for answer in answers]


class IsDeniedWithItsSecret(WithASecret):
    def __init__(self, inner: Backend, secret_key: str | None = None) -> None:
        super().__init__(inner, secret_key)
        if secret_key is not None:
            try:
                raise PermissionError(f"signature of {secret_key} does not match")
            except PermissionError as cause:
                raise DeniedError("acme open: denied") from cause


class IsDeniedWithItsSecretInTheOpen(WithASecret):
    def __init__(self, inner: Backend, secret_key: str | None = None) -> None:
        super().__init__(inner, secret_key)
        if secret_key is not None:
            raise DeniedError(f"acme open: signature of {secret_key} does not match")


class SaysError(MemoryMutant):
    breaks = "KV-ERR-05"
    text = "error 22"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        answers = proceed(items)
        if op not in ("exists", "get", "put", "delete"):
            return answers
        return [self.shorten(op, answer) for answer in answers]

    def shorten(self, op: str, answer: Any) -> Any:
        error = getattr(answer, "error", None)
        if not isinstance(error, BackendError):
            return answer
        short = type(error)(self.text)
        if isinstance(answer, Failure):
            return Failure(short)
        return type(answer)(answer.status, short)


class SaysErrorAtLength(SaysError):
    """The names of all operations are in it, and none of them as a word."""

    text = "the thread's offset was resized already: a counter that was reset, a listener that was deleted_at, input of coexistence"


class RaisesWhatItsSystemRaised(FsMutant):
    breaks = "KV-ERR-06"

    @classmethod
    def open(cls, location: str) -> Self:
        try:
            return super().open(location)
        except KVStoreError as error:
            raise RuntimeError(f"cannot open {location}") from error


class LooksUpItsOptionInATable(MemoryMutant):
    breaks = "KV-ERR-06"

    @classmethod
    def open(cls, location: str, *, codec: str = "none") -> Self:
        opened = super().open(location)
        opened.codec = {"none": 0, "lz4": 1}[codec]  # type: ignore[attr-defined]
        return opened


MUTANTS = (
    FailsWithoutAnError,
    FailsWithAText,
    FailsWithAForeignError,
    JoinsPaths,
    DecodesNamesAfterItCheckedThem,
    TakesAnyName,
    ShowsItsSecretInItsRepr,
    LogsItsSecret,
    TellsItsSecretInAnError,
    IsDeniedWithItsSecret,
    IsDeniedWithItsSecretInTheOpen,
    SaysError,
    SaysErrorAtLength,
    RaisesWhatItsSystemRaised,
    LooksUpItsOptionInATable,
)
