"""The object-store backend with NIXL for the bytes: what NIXL cannot do, or cannot tell, the client is asked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal
from urllib.parse import urlsplit

from kvstore_sdk.backend import (
    Advice,
    BackendError,
    Buffer,
    ClosedError,
    ConfigError,
    Deadline,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Put,
    PutResult,
    PutStatus,
    TimedOutError,
    UnsupportedError,
)
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.calls import Call, Item
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.items import GetItem, PutItem
from kvstore_sdk_backends.s3.loop import EventLoop
from kvstore_sdk_backends.s3.nixl_agent import MAX_STAGED_BYTES, NixlAgents, Slot, State
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient
from kvstore_sdk_backends.s3.sessions import Credentials
from kvstore_sdk_backends.s3.settings import WHERE, S3Settings

__all__ = ["NixlS3Backend"]

PATIENCE_S = 2.0
"""For a transfer, before the store is asked what is the matter; not more than half of the call's time. NIXL says nothing for 25 s."""
CREDENTIALS_WAIT_S = 5.0
CREDENTIALS_EVERY_S = 60.0
CREDENTIALS_SOON_S = 5.0
"""How often they are looked at, since NIXL has a copy of them, and those of a chain expire; and how often while transfers fail."""

_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_PAUSES = 24
"""A pause between two looks is this part of the age of the oldest transfer: it adds 2 % to what a transfer takes. The longest one is
how late `close` and the deadline may be seen."""

_FOUND = GetResult(GetStatus.FOUND)
_STORED = PutResult(PutStatus.STORED)


class _Fate(Enum):
    """What became of a transfer.

    Attributes:
        UNSENT: Nothing, when the call ended.
        DONE: What was asked.
        AGAIN: NIXL cannot do it, or did not. The client is asked.
        LEFT: It goes on, and nobody waits for it: the call ended, or the store answers errors meanwhile.
    """

    UNSENT = "unsent"
    DONE = "done"
    AGAIN = "again"
    LEFT = "left"


@dataclass(slots=True)
class _Transfer:
    """One record on its way. `error` may come with LEFT, `call` comes with AGAIN, `answer` is what that came to."""

    index: int
    name: str
    buffer: Buffer | None
    fate: _Fate = _Fate.UNSENT
    slot: Slot | None = None
    begun_s: float = 0.0
    error: BackendError | None = None
    call: Call[Any] | None = None
    answer: Any = None

    @property
    def size_bytes(self) -> int:
        return self.buffer.length if self.buffer else 0


class NixlS3Backend(S3Backend):
    """`S3Backend` whose puts and gets go through NIXL, and through its client where NIXL failed or cannot.

    NIXL knows no conditional write: CREATE replaces. It knows no storage class and no tags either: with those, puts are the client's.
    What NIXL still stores when its call ends is UNKNOWN. What it still fetches ends in memory of this backend: no item is IN_DOUBT.
    """

    def __init__(self, client: S3fsClient, loop: EventLoop, *, bucket: str, shown: str, prefix: str, settings: S3Settings) -> None:
        """As `S3Backend`. `client` and `loop` stay the caller's when this fails.

        Raises:
            ImportError: there is no NIXL.
            ConfigError: it cannot be used here, or with these settings.
            BackendError: the credentials cannot be had now.
        """
        if not settings.verify_tls:
            raise ConfigError(
                WHERE, "engine", "nixl always verifies certificates; write s3fs, or give ca_bundle instead of verify_tls=false"
            )
        super().__init__(client, loop, shown=shown, prefix=prefix, settings=settings)
        self._s3fs = client
        self._bucket = bucket
        self._settings = settings
        self._writes = not settings.storage_class and not settings.tags
        # Seconds that one takes, by verb and size class; each new one counts for an eighth.
        self._usual_s: dict[tuple[str, int], float] = {}
        self._looking = threading.Lock()
        self._looked_s = time.monotonic()
        self._failed = False
        try:
            self._credentials = loop.run(f"s3 open {shown}", client.credentials, CREDENTIALS_WAIT_S)
        except AttemptError as failed:
            raise failed.error from None
        self._agents = self._make_agents(self._credentials)

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if not self._writes or self._refused("put"):
            return super().put(puts, deadline)
        refused = [self._refused_put(put) for put in puts]
        transfers = [
            _Transfer(index, put.name, put.parts[0] if put.parts else None) for index, put in enumerate(puts) if not refused[index]
        ]
        self._move("WRITE", transfers, deadline, lambda index: PutItem(self._requests, puts[index]))
        moved = {transfer.index: self._put_answer(transfer) for transfer in transfers}
        return [answer or moved[index] for index, answer in enumerate(refused)]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if self._refused("get"):
            return super().get(gets, deadline)
        refused = [self._refused_get(get) for get in gets]
        transfers = [_Transfer(index, get.name, get.into[0] if get.into else None) for index, get in enumerate(gets) if not refused[index]]
        self._move("READ", transfers, deadline, lambda index: GetItem(self._requests, gets[index]))
        moved = {transfer.index: self._get_answer(transfer) for transfer in transfers}
        return [answer or moved[index] for index, answer in enumerate(refused)]

    def close(self) -> None:
        super().close()
        self._agents.close()

    def _put_answer(self, transfer: _Transfer) -> PutResult:
        if transfer.fate is _Fate.DONE:
            return _STORED
        if transfer.fate is _Fate.UNSENT:
            return PutResult(PutStatus.CLOSED if self._closed else PutStatus.TIMED_OUT)
        if transfer.fate is _Fate.LEFT:
            return PutResult(PutStatus.UNKNOWN, transfer.error)
        answer: PutResult = transfer.answer
        ended = answer.status in (PutStatus.TIMED_OUT, PutStatus.CLOSED)
        failed = answer.status is PutStatus.FAILED and (answer.error is None or answer.error.advice is Advice.RETRY)
        # What NIXL sent may have been done, unless the store refuses what is asked for good.
        return PutResult(PutStatus.UNKNOWN, answer.error) if transfer.slot and (ended or failed) else answer

    def _get_answer(self, transfer: _Transfer) -> GetResult:
        if transfer.fate is _Fate.DONE:
            return _FOUND
        if transfer.fate is _Fate.AGAIN:
            answer: GetResult = transfer.answer
            return answer
        if transfer.error is not None:
            return GetResult.failed(transfer.error)
        return GetResult(GetStatus.CLOSED if self._closed else GetStatus.TIMED_OUT)

    def _move(
        self, verb: Literal["READ", "WRITE"], transfers: list[_Transfer], deadline: Deadline, item: Callable[[int], Item[Any]]
    ) -> None:
        """Bring each transfer to its fate by the deadline. `item` makes what the client is asked, from an index."""
        agents = self._current_agents(deadline)
        waiting = deque(transfers)
        running: list[_Transfer] = []

        def again(transfer: _Transfer) -> None:
            transfer.fate = _Fate.AGAIN
            transfer.call = self._begin([item(transfer.index)], deadline)

        started_s = time.monotonic()
        ask_s = started_s + min(PATIENCE_S, deadline.remaining_s() / 2)
        try:
            while waiting or running:
                now_s = time.monotonic()
                if self._closed or now_s >= deadline.at_s:
                    break
                while waiting:
                    if not 0 < waiting[0].size_bytes <= MAX_STAGED_BYTES:
                        again(waiting.popleft())
                    elif slot := agents.take():
                        transfer = waiting.popleft()
                        transfer.slot, transfer.begun_s = slot, now_s
                        running.append(transfer)
                        assert transfer.buffer is not None
                        slot.begin(verb, self._requests.key(transfer.name), transfer.buffer.address, transfer.size_bytes)
                    elif agents.is_held_up():
                        again(waiting.popleft())
                    else:
                        break
                for transfer in running[:]:
                    if (state := _state(transfer)) is not State.RUNNING:
                        running.remove(transfer)
                        self._end(agents, verb, transfer, state, again)
                if running and now_s >= ask_s:
                    ask_s = now_s + 2 * (now_s - started_s)
                    self._ask_store(agents, verb, running, deadline, again)
                if running or waiting:
                    self._pause(verb, running[0] if running else None, started_s)
        except BaseException:
            for transfer in transfers:
                if transfer.call:
                    transfer.call.end()
            raise
        finally:
            for transfer in running:
                _leave(agents, transfer)
            for transfer in transfers:
                if transfer.call:
                    [transfer.answer] = transfer.call.wait()

    def _pause(self, verb: str, oldest: _Transfer | None, started_s: float) -> None:
        """Before the next look. Not before half of what a transfer like the oldest one usually takes."""
        age_s = time.monotonic() - (oldest.begun_s if oldest else started_s)
        usual_s = self._usual_s.get((verb, oldest.size_bytes.bit_length()), 0.0) if oldest else 0.0
        time.sleep(min(max(usual_s / 2 - age_s, age_s / _PAUSES, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _end(
        self, agents: NixlAgents, verb: Literal["READ", "WRITE"], transfer: _Transfer, state: State, again: Callable[[_Transfer], None]
    ) -> None:
        """Of a transfer that is over."""
        assert transfer.slot is not None
        assert transfer.buffer is not None
        try:
            self._failed |= state is State.FAILED
            done = state is State.DONE and (verb == "WRITE" or transfer.slot.take_out(transfer.buffer.address, transfer.size_bytes))
        finally:
            agents.give_back(transfer.slot)
        if done:
            transfer.fate = _Fate.DONE
            took_s, size_class = time.monotonic() - transfer.begun_s, (verb, transfer.size_bytes.bit_length())
            usual_s = self._usual_s.get(size_class, took_s)
            self._usual_s[size_class] = usual_s + (took_s - usual_s) / 8
        else:
            again(transfer)

    def _ask_store(
        self,
        agents: NixlAgents,
        verb: Literal["READ", "WRITE"],
        running: list[_Transfer],
        deadline: Deadline,
        again: Callable[[_Transfer], None],
    ) -> None:
        """What is the matter with transfers that take long. NIXL repeats what fails, and says nothing meanwhile."""
        half = Deadline.after(deadline.remaining_s() / 2)
        sizes = self._sizes("get" if verb == "READ" else "put", [transfer.name for transfer in running], half)
        for transfer, size in zip(running[:], sizes, strict=True):
            if isinstance(size, Failure):
                if isinstance(size.error, TimedOutError | ClosedError):
                    continue
                self._failed = True
                transfer.error = size.error
            elif verb == "WRITE" or size == transfer.size_bytes:
                continue
            running.remove(transfer)
            _leave(agents, transfer)
            if transfer.error is None:
                again(transfer)

    def _current_agents(self, deadline: Deadline) -> NixlAgents:
        """Those with the keys of now."""
        every_s = CREDENTIALS_SOON_S if self._failed else CREDENTIALS_EVERY_S
        is_static = self._settings.access_key_id is not None
        if is_static or time.monotonic() < self._looked_s + every_s or not self._looking.acquire(blocking=False):
            return self._agents
        try:
            self._failed = False
            limit_s = min(CREDENTIALS_WAIT_S, deadline.remaining_s())
            credentials = self._loop.run(f"s3 credentials for {self._shown}", self._s3fs.credentials, limit_s)
            if credentials != self._credentials:
                old, self._agents = self._agents, self._make_agents(credentials)
                self._credentials = credentials
                old.close()
                if self._closed:
                    self._agents.close()
        except (AttemptError, BackendError, ConfigError):
            # The old ones may serve; and where they do not, the client tells why.
            pass
        finally:
            self._looked_s = time.monotonic()
            self._looking.release()
        return self._agents

    def _make_agents(self, credentials: Credentials | None) -> NixlAgents:
        settings = self._settings
        if credentials is None:
            raise ConfigError(WHERE, "engine", "nixl needs credentials, and none were found; write s3fs for a store that takes anybody")
        virtual = settings.addressing == "virtual" or (settings.addressing == "auto" and settings.endpoint is None)
        parameters = {
            "access_key": credentials.access_key_id,
            "secret_key": credentials.secret_access_key,
            "session_token": credentials.session_token,
            "bucket": self._bucket,
            "endpoint_override": self._s3fs.endpoint,
            "scheme": urlsplit(self._s3fs.endpoint).scheme,
            "region": self._s3fs.region,
            "use_virtual_addressing": "true" if virtual else "false",
            "req_checksum": "supported" if settings.checksums == "when_supported" else "required",
            "ca_bundle": settings.ca_bundle or "",
        }
        try:
            return NixlAgents({name: value for name, value in parameters.items() if value}, settings.concurrency)
        except UnsupportedError as error:
            raise ConfigError(WHERE, "engine", f"{error}; write s3fs") from None


def _state(transfer: _Transfer) -> State:
    assert transfer.slot is not None
    return transfer.slot.state()


def _leave(agents: NixlAgents, transfer: _Transfer) -> None:
    transfer.fate = _Fate.LEFT
    if transfer.slot is not None:
        agents.give_back(transfer.slot, running=True)
