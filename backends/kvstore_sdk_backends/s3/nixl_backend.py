"""The object-store backend with NIXL for the bytes: what NIXL cannot do, or cannot tell, the client is asked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvstore_sdk.backend import (
    BackendError,
    Buffer,
    ConfigError,
    Deadline,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Mode,
    Put,
    PutResult,
    PutStatus,
    UnsupportedError,
)
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.calls import Call, Item
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.items import GetItem, PutItem, SizeItem
from kvstore_sdk_backends.s3.nixl_agent import Slot, State, Verb
from kvstore_sdk_backends.s3.nixl_agents import MAX_STAGED_BYTES, NixlAgents
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient
from kvstore_sdk_backends.s3.sessions import Credentials
from kvstore_sdk_backends.s3.settings import TLS_OFF, WHERE, S3Settings

__all__ = ["NixlS3Backend"]

PATIENCE_S = 2.0
"""For a transfer, before the store is asked what is the matter; not more than half of the call's time. NIXL says nothing for 25 s."""
CREDENTIALS_WAIT_S = 5.0
"""For credentials, when the backend is made; a call waits for a quarter of its time at most."""
CREDENTIALS_EVERY_S = 60.0
CREDENTIALS_SOON_S = 5.0
"""How often they are looked at, since NIXL has a copy of them, and those of a chain expire; and how often while transfers fail."""

_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_PAUSES = 8
"""A pause between two looks is this part of the age of the oldest transfer: it adds 6 % to what a transfer takes. Half of that, and the
looks of eight threads cost a third more CPU time a record of 256 KiB. The longest one is how late `close` and the deadline are seen."""
_LOOK_EVERY_S = 0.005
"""While transfers are begun, which takes a copy each."""

_FOUND = GetResult(GetStatus.FOUND)
_STORED = PutResult(PutStatus.STORED)


class _Question(SizeItem):
    """What the store says of a record, whose call nobody waits for.

    Attributes:
        said: The answer as its one element, once it is there.
    """

    def __init__(self, *asked: Any) -> None:
        super().__init__(*asked)
        self.said: tuple[int | Failure | None, ...] = ()

    async def answer(self, call: Call[int | Failure | None]) -> int | Failure | None:
        said = await super().answer(call)
        self.said = (said,)
        return said


@dataclass(slots=True)
class _Transfer:
    """One record on its way.

    Attributes:
        index: In its batch.
        name: Of the record.
        buffer: None: NIXL is not to move it.
        slot: That it has, or had.
        sent: Whether NIXL sent anything.
        begun_s: When, by the monotonic clock.
        ask_s: When the store is asked what is the matter.
        question: What the store is being asked, and `asking` its call.
        call: Of the client, which moves it instead of NIXL.
        answer: None: nobody knows what became of it.
    """

    index: int
    name: str
    buffer: Buffer | None
    slot: Slot | None = None
    sent: bool = False
    begun_s: float = 0.0
    ask_s: float = 0.0
    question: _Question | None = None
    asking: Call[Any] | None = None
    call: Call[Any] | None = None
    answer: Any = None

    @property
    def size_bytes(self) -> int:
        return self.buffer.length if self.buffer else 0


class NixlS3Backend(S3Backend):
    """`S3Backend` whose puts and gets go through NIXL, and through its client where NIXL failed or cannot.

    NIXL knows no conditional write: CREATE replaces, unless `conditional_writes` is `always`, which has the client create. It knows no
    storage class and no tags either: with those, puts are the client's. A failure of NIXL's has no reason, and may have been a success
    whose answer was lost: what then fails through the client too is UNKNOWN, with the client's error.
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
            raise ConfigError(WHERE, "engine", TLS_OFF)
        super().__init__(client, loop, shown=shown, prefix=prefix, settings=settings)
        self._s3fs = client
        self._bucket = bucket
        self._settings = settings
        self._writes = not settings.storage_class and not settings.tags
        self._creates = settings.conditional_writes != "always"
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
            _Transfer(index, put.name, put.parts[0] if put.parts and (self._creates or put.mode is not Mode.CREATE) else None)
            for index, put in enumerate(puts)
            if not refused[index]
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
        ended = GetResult(GetStatus.CLOSED if self._closed else GetStatus.TIMED_OUT)
        moved: dict[int, GetResult] = {transfer.index: transfer.answer or ended for transfer in transfers}
        return [answer or moved[index] for index, answer in enumerate(refused)]

    def close(self) -> None:
        super().close()
        self._agents.close()

    def _put_answer(self, transfer: _Transfer) -> PutResult:
        answer: PutResult | None = transfer.answer
        if transfer.sent and (answer is None or answer.status not in (PutStatus.STORED, PutStatus.EXISTS)):
            # NIXL's own request may have been done, or may be yet.
            return PutResult(PutStatus.UNKNOWN, answer.error if answer else None)
        return answer or PutResult(PutStatus.CLOSED if self._closed else PutStatus.TIMED_OUT)

    def _move(self, verb: Verb, transfers: list[_Transfer], deadline: Deadline, item: Callable[[int], Item[Any]]) -> None:
        """Move each record by the deadline. `item` makes what the client is asked, from an index."""
        self._look_at_credentials(deadline)
        started_s = time.monotonic()
        patience_s = min(PATIENCE_S, deadline.remaining_s() / 2)
        waiting, running = deque(transfers), list[_Transfer]()

        def again(transfer: _Transfer) -> None:
            transfer.call = self._begin([item(transfer.index)], deadline)

        try:
            while (waiting or running) and not self._is_late(deadline):
                for transfer in running[:]:
                    if not self._is_late(deadline) and self._is_over(verb, transfer, deadline):
                        running.remove(transfer)
                        if transfer.answer is None:
                            again(transfer)
                look_s = time.monotonic() + _LOOK_EVERY_S
                while waiting and not self._is_late(deadline) and time.monotonic() < look_s:
                    transfer = waiting[0]
                    if not 0 < transfer.size_bytes <= MAX_STAGED_BYTES:
                        again(waiting.popleft())
                    elif slot := self._agents.take(verb, transfer.size_bytes):
                        transfer.slot = slot
                        running.append(waiting.popleft())
                        if not self._is_begun(verb, transfer, patience_s, deadline):
                            running.pop()
                            again(transfer)
                    elif self._agents.is_held_up(verb):
                        again(waiting.popleft())
                    else:
                        break
                else:
                    if waiting:
                        # Others may be over by now.
                        continue
                if waiting or running:
                    age_s = time.monotonic() - (running[0].begun_s if running else started_s)
                    time.sleep(min(max(age_s / _PAUSES, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        except BaseException:
            for transfer in transfers:
                if transfer.call:
                    transfer.call.end()
            raise
        finally:
            for transfer in running:
                if transfer.slot:
                    transfer.slot.give_back(running=True)
            for transfer in transfers:
                if transfer.asking:
                    transfer.asking.end()
                    transfer.asking.wait()
            for transfer in transfers:
                if transfer.call:
                    [transfer.answer] = transfer.call.wait()

    def _is_late(self, deadline: Deadline) -> bool:
        return self._closed or deadline.expired

    def _is_begun(self, verb: Verb, transfer: _Transfer, patience_s: float, deadline: Deadline) -> bool:
        """Begin, in the slot. If not, nothing was sent, and the slot was given back."""
        assert transfer.slot is not None
        assert transfer.buffer is not None
        transfer.begun_s = time.monotonic()
        transfer.ask_s = transfer.begun_s + patience_s
        key = self._requests.key(transfer.name)
        transfer.sent = transfer.slot.begin(verb, key, transfer.buffer.address, transfer.size_bytes, deadline)
        if not transfer.sent:
            transfer.slot.give_back()
        return transfer.sent

    def _is_over(self, verb: Verb, transfer: _Transfer, deadline: Deadline) -> bool:
        """Whether NIXL ended, or is not to be waited for; the slot was given back. There is an answer then if the record was moved."""
        assert transfer.slot is not None
        assert transfer.buffer is not None
        state = transfer.slot.state()
        if state is State.RUNNING and not self._is_stuck(verb, transfer, deadline):
            return False
        self._failed |= state is not State.DONE
        if state is State.DONE:
            if verb == "WRITE":
                transfer.answer = _STORED
            elif transfer.slot.take_out(transfer.buffer.address, transfer.size_bytes, deadline):
                transfer.answer = _FOUND
        transfer.slot.give_back(running=state is State.RUNNING)
        return True

    def _is_stuck(self, verb: Verb, transfer: _Transfer, deadline: Deadline) -> bool:
        """Whether a transfer that takes long had better be the client's. NIXL repeats what fails, and says nothing meanwhile: so the
        store is asked what is the matter, ever more rarely, without waiting for what it says.
        """
        question, asking = transfer.question, transfer.asking
        if question is None or asking is None:
            now_s = time.monotonic()
            if now_s >= transfer.ask_s:
                transfer.ask_s = now_s + 2 * (now_s - transfer.begun_s)
                transfer.question = _Question(self._requests, transfer.name, "get" if verb == "READ" else "put")
                transfer.asking = self._begin([transfer.question], deadline)
            return False
        if not question.said:
            return False
        asking.wait()
        transfer.question = transfer.asking = None
        [size] = question.said
        return isinstance(size, Failure) or (verb == "READ" and size != transfer.size_bytes)

    def _look_at_credentials(self, deadline: Deadline) -> None:
        """Once in a while, and make agents with those of now."""
        every_s = CREDENTIALS_SOON_S if self._failed else CREDENTIALS_EVERY_S
        is_static = self._settings.access_key_id is not None
        if is_static or time.monotonic() < self._looked_s + every_s or not self._looking.acquire(blocking=False):
            return
        try:
            self._failed = False
            limit_s = min(CREDENTIALS_WAIT_S, deadline.remaining_s() / 4)
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

    def _make_agents(self, credentials: Credentials | None) -> NixlAgents:
        if credentials is None:
            raise ConfigError(WHERE, "engine", "nixl needs credentials, and none were found; write s3fs for a store that takes anybody")
        try:
            return NixlAgents(lambda: self._parameters(credentials), self._settings.concurrency)
        except UnsupportedError as error:
            raise ConfigError(WHERE, "engine", f"{error}; write s3fs") from None

    def _parameters(self, credentials: Credentials) -> Mapping[str, str]:
        """Of NIXL's plugin. Where requests go is what the client found out."""
        client, settings = self._s3fs, self._settings
        parameters = {
            "access_key": credentials.access_key_id,
            "secret_key": credentials.secret_access_key,
            "session_token": credentials.session_token,
            "bucket": self._bucket,
            "endpoint_override": client.endpoint,
            "scheme": urlsplit(client.endpoint).scheme,
            "region": client.region,
            "use_virtual_addressing": "true" if client.virtual else "false",
            "req_checksum": "supported" if settings.checksums == "when_supported" else "required",
            "ca_bundle": settings.ca_bundle or "",
        }
        return {name: value for name, value in parameters.items() if value}
