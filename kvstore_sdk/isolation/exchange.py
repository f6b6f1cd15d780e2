"""Calls of many threads, or of one that polls, over one line to whatever child is up. No thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import BackendError, Deadline, KVStoreError, UnavailableError
from kvstore_sdk.isolation.calls import Call, Calls, failed
from kvstore_sdk.isolation.link import Link
from kvstore_sdk.isolation.logs import ChildLog
from kvstore_sdk.isolation.regions import Descriptor, KnownRegion, KnownRegions
from kvstore_sdk.isolation.wire import WireError, encode

__all__ = ["Exchange"]

_LONGEST_CALL_S = 86_400.0


class Exchange:
    """Sends calls, and has whoever waits for one receive for all: the first that waits reads, and hands that on when it has its own answer.

    Locks are taken in this order, and some may be left out: `Link.reader`, `lock`, the link's own for sending, the keeper's for waking.
    Who holds `reader` may wait for the child's messages until its own deadline, or until the line is shut; nothing else is waited for.

    Attributes:
        label: Of the backend, in errors.
        lock: Guards all that follows. Never held while something waits.
        calls: What becomes of calls.
        regions: What a child has to map.
    """

    def __init__(self, label: str, alarm: Callable[[], None]) -> None:
        """`alarm`: called from any thread when somebody should look at the child."""
        self.label = label
        self.lock = threading.Lock()
        self.calls = Calls(label)
        self.regions = KnownRegions()
        self.log = ChildLog(label)
        self._alarm = alarm
        self._link: Link | None = None
        self._generation = 0
        self._refusal: Callable[[], BackendError] | None = self._not_up
        self._polled_wake = threading.Event()
        self._polling = False

    # The child, as its keeper tells of it.

    def up(self, link: Link, announced: dict[int, KnownRegion]) -> bool:
        """Calls go to this child from now on, unless it has to be told of regions first: then nothing changes."""
        with self.lock:
            if self.regions.all() != announced:
                return False
            self._generation += 1
            self._link = link
            self._refusal = None
            return True

    def refuse(self, refusal: Callable[[], BackendError]) -> None:
        """New calls answer this error at once. Those that run go on."""
        with self.lock:
            self._refusal = refusal

    def down(self, error: BackendError, refusal: Callable[[], BackendError]) -> None:
        """The child is gone. All that it was asked ends with `error`, and new calls with what `refusal` makes."""
        with self.lock:
            self._link = None
            self._refusal = refusal
            self.calls.gone(self._generation, error)
            self._go_on()

    @property
    def busy(self) -> bool:
        """Whether a call runs in the child."""
        with self.lock:
            return bool(self.calls.pending or self.calls.late)

    # Calls.

    def submit(
        self,
        op: str,
        items: Sequence[Any],
        payload: Callable[[], Any],
        deadline: Deadline,
        wake: threading.Event | None,
        descriptor: Descriptor | None = None,
    ) -> Call:
        """Begin a call. Never waits, never raises: what is wrong is its answer.

        Args:
            op: The method.
            items: What there will be one result for each of; of `settle` the tickets.
            payload: Makes of the items what is sent, or raises a `BackendError`.
            deadline: Of the call.
            wake: Set when it has ended; None for a polled call.
            descriptor: What goes with it.
        """
        deadline_s = min(deadline.at_s, time.monotonic() + _LONGEST_CALL_S)
        call = self.calls.new(op, len(items), deadline_s, wake)
        if op == "settle":
            with self.lock:
                self.calls.settle(call, items)
                self._go_on()
            return call
        with self.lock:
            if self._refused(call):
                return call
        try:
            frame = encode([call.number, op, deadline_s, payload()])
        except (KVStoreError, WireError) as cause:
            error = cause if isinstance(cause, KVStoreError) else UnavailableError(f"{self.label} {op}: the call {cause}")
            with self.lock:
                self._end(call, error)
            return call
        with self.lock:
            link = self._link
            if self._refused(call) or link is None:
                return call
            self.calls.asked_of(call, self._generation)
            link.expect(None if op == "list" else len(items))
        self._send(link, call, frame, descriptor)
        return call

    def refused(self, op: str, error: KVStoreError) -> int:
        """A polled call that ends with an error before it was sent. Returns its number."""
        call = self.calls.new(op, 0, 0.0, None)
        with self.lock:
            self._end(call, error)
        return call.number

    def wait(self, call: Call) -> Any:
        """What a call that was submitted with a `wake` returns; raises what it raises."""
        wake = call.wake
        assert wake is not None
        while not call.ended:
            link = self._link
            until_s = call.expires_s if call.op != "settle" or call.asking else call.deadline_s
            if link is not None and link.readable and link.reader.acquire(blocking=False):
                self._receive(link, call, until_s)
            else:
                wake.wait(max(0.0, until_s - time.monotonic()))
                wake.clear()
            if not call.ended and time.monotonic() >= until_s:
                # What has come meanwhile counts, however late this thread is.
                self.tend()
                self._hand_on()
        if isinstance(call.answer, BaseException):
            raise call.answer
        return call.answer

    def take(self) -> list[tuple[int, object]]:
        """The polled calls that have ended, each once. Never waits."""
        if not self.calls.idle:
            self.tend()
        if not self.calls.ended:
            return []
        with self.lock:
            taken = [(call.number, call.answer) for call in self.calls.ended]
            self.calls.ended.clear()
        return taken

    def wait_polled(self, until_s: float) -> None:
        """Wait until a polled call has ended, or until then; not at all while there is none."""
        self._polling = True
        try:
            while True:
                self.tend()
                with self.lock:
                    first_s = self.calls.next_expiry_s(polled=True)
                    if self.calls.ended or first_s is None or time.monotonic() >= until_s:
                        return
                    self._polled_wake.clear()
                link = self._link
                wake_s = min(until_s, first_s)
                if link is not None and link.readable and link.reader.acquire(blocking=False):
                    self._receive(link, None, wake_s)
                else:
                    self._polled_wake.wait(max(0.0, wake_s - time.monotonic()))
        finally:
            self._polling = False

    def tend(self) -> None:
        """Take in what has come, and give up what is late. Never waits."""
        link = self._link
        if link is not None and link.readable and link.reader.acquire(blocking=False):
            self._receive(link, None, None)
        elif link is not None:
            # Who receives may have been waiting since before there was more to send than the line took.
            link.flush()
        with self.lock:
            self.calls.expire(time.monotonic())
            self._go_on()

    def _receive(self, link: Link, call: Call | None, until_s: float | None) -> None:
        """Receive once, as the one that holds `link.reader`, and then let go of it."""
        try:
            if call is not None and call.ended:
                return
            messages = link.receive(until_s)
            if messages:
                self._take_in(link, messages)
            if not link.readable:
                self._alarm()
        finally:
            link.reader.release()
            if call is None or call.ended:
                self._hand_on()

    def _hand_on(self) -> None:
        """Somebody else who waits is to receive now."""
        with self.lock:
            waiter = self.calls.waiter()
        if waiter is not None and waiter.wake is not None:
            waiter.wake.set()
        elif self._polling:
            self._polled_wake.set()

    def _take_in(self, link: Link, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, list) and self.log.tell(message):
                continue
            if not isinstance(message, list) or len(message) != 3 or not isinstance(message[1], bool):
                link.broken = "a message has another form"
                return
            with self.lock:
                try:
                    self.calls.answer(*message)
                except WireError as cause:
                    link.broken = str(cause)
                    return
        with self.lock:
            self._go_on()

    def _go_on(self) -> None:
        """After anything has ended: end the settles that can, ask the child for the others. With the lock held."""
        for question, tickets in self.calls.advance(time.monotonic()):
            link = self._link
            self.calls.asked_of(question, question.generation)
            if link is not None:
                # Small, and never waits.
                link.expect(len(tickets))
                link.send(encode([question.number, "settle", question.deadline_s, tickets]))
        if self.calls.unreadable:
            self._alarm()
        if self.calls.ended:
            self._polled_wake.set()

    def _refused(self, call: Call) -> bool:
        """End a call that no child is to be asked, also because there is none. With the lock held."""
        refusal = self._not_up if self._refusal is None and self._link is None else self._refusal
        if refusal is None:
            return False
        call.lost = True
        self._end(call, failed(call.op, call.count, refusal(), sent=False))
        return True

    def _send(self, link: Link, call: Call, frame: bytes, descriptor: Descriptor | None) -> None:
        if link.send(frame, descriptor):
            if link.ended:
                self._alarm()
            return
        with self.lock:
            if self.calls.pending.pop(call.number, None) is not None:
                error = UnavailableError(f"{self.label} {call.op}: the child takes no more calls; those that wait have to end first")
                self._end(call, failed(call.op, call.count, error, sent=False))

    def _end(self, call: Call, answer: Any) -> None:
        self.calls.end(call, answer)
        if call.wake is None:
            self._polled_wake.set()

    def _not_up(self) -> BackendError:
        return UnavailableError(f"{self.label}: the child is not up")
