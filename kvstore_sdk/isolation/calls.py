"""What becomes of calls to a child: answered, late, lost. Data and rules alone; whoever uses it holds one lock."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvstore_sdk.backend import (
    BackendError,
    BreachError,
    ClosedError,
    Failure,
    GetResult,
    GetStatus,
    PutResult,
    PutStatus,
    TimedOutError,
)
from kvstore_sdk.isolation.crossing import unpack_error, unpack_results
from kvstore_sdk.isolation.wire import WireError

__all__ = ["Call", "Calls", "failed"]

LATE_S = 0.25
"""After its deadline a call has this long to answer: half of what the contract allows a backend, for the way to the child and back."""
_SETTLED = "child settle"
_NO_TICKET = 0


class Call:
    """One call, from `begin` until its answer was taken.

    Attributes:
        number: Never used twice.
        generation: Of the child that was asked; 0 when none was.
        lost: Its answer is none of a child's: there was none, or it died.
        answer: What the method returns, or the exception that it raises, once `ended`.
        tickets: Of its items, when it was given up while the child may still touch their buffers.
        wake: Set when it has ended, or when its thread is to receive messages; None for a polled call.
    """

    __slots__ = ("answer", "asked", "asking", "count", "deadline_s", "ended", "generation", "lost", "number", "op", "tickets", "wake")

    def __init__(self, number: int, op: str, count: int, deadline_s: float, wake: threading.Event | None) -> None:
        self.number = number
        self.op = op
        self.count = count
        self.deadline_s = deadline_s
        self.wake = wake
        self.generation = 0
        self.ended = False
        self.lost = False
        self.answer: Any = None
        self.tickets: Sequence[int] = ()
        # Of a settle: what the child was asked, and how many of these questions are open.
        self.asked: set[int] = set()
        self.asking = 0

    @property
    def expires_s(self) -> float:
        return self.deadline_s + LATE_S


class _Doubt:
    """An operation that may go on: of a late call, or under a ticket of the child's own."""

    __slots__ = ("generation", "ticket")

    def __init__(self, generation: int, ticket: int | None = None) -> None:
        self.generation = generation
        # None: its call has not returned, or what it answered cannot be read.
        self.ticket = ticket


class Calls:
    """The calls of one backend to its children.

    Attributes:
        pending: By number, those without an answer.
        late: By number, those that were given up and have not returned.
        ended: Polled calls whose answers nobody has taken.
        may_doubt: Whether the backend itself declares `in_doubt`.
        unreadable: A generation whose answers left in doubt what nobody but its end can settle; 0 for none.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self.may_doubt = True
        self._numbers = itertools.count(1)
        self.pending: dict[int, Call] = {}
        self.late: dict[int, Call] = {}
        self.ended: deque[Call] = deque()
        self.unreadable = 0
        self._settles: list[Call] = []
        self._doubts: dict[int, _Doubt] = {}
        self._tickets = itertools.count(1)

    def new(self, op: str, count: int, deadline_s: float, wake: threading.Event | None) -> Call:
        return Call(next(self._numbers), op, count, deadline_s, wake)

    def end(self, call: Call, answer: Any) -> None:
        """The call is over for whoever made it."""
        call.answer = answer
        call.ended = True
        if call.op == _SETTLED:
            return
        if call.wake is not None:
            call.wake.set()
        else:
            self.ended.append(call)

    def asked_of(self, call: Call, generation: int) -> None:
        """The call goes to the child of this generation."""
        call.generation = generation
        self.pending[call.number] = call

    def answer(self, number: object, is_answer: bool, body: Any) -> None:
        """The child answered.

        Raises:
            WireError: nothing was asked under that number.
        """
        call = self.pending.pop(number, None) if isinstance(number, int) else None
        returned_late = call is None
        if call is None:
            call = self.late.pop(number, None) if isinstance(number, int) else None
        if call is None:
            raise WireError("it answered a call that nobody made")
        doing = f"{self._label} {call.op}"
        answer: Any
        try:
            op = "settle" if call.op == _SETTLED else call.op
            answer = unpack_results(op, call.count, body) if is_answer else unpack_error(body)
            breach = isinstance(answer, BreachError)
        except WireError as cause:
            answer, breach = BreachError(f"{doing}: {cause}"), True
        if call.op == _SETTLED:
            self._settled(call, answer)
        elif returned_late:
            self._returned(call, answer, breach)
        else:
            self.end(call, self._without_breach(call, answer) if breach else self._with_own_tickets(call, answer))

    def expire(self, now_s: float) -> None:
        """Give up what is too late. Items that may still touch memory get a ticket."""
        for call in [call for call in self.pending.values() if call.expires_s <= now_s]:
            del self.pending[call.number]
            self.late[call.number] = call
            if call.op == _SETTLED:
                self._settled(call, None)
                continue
            error = TimedOutError(f"{self._label} {call.op}: the child has not answered {LATE_S:g} s after the deadline")
            if call.op in ("put", "get"):
                call.tickets = [self._new_ticket(_Doubt(call.generation)) for _ in range(call.count)]
                self.end(call, [_in_doubt(call.op, ticket, error) for ticket in call.tickets])
            else:
                self.end(call, failed(call.op, call.count, error, sent=True))

    def gone(self, generation: int, error: BackendError) -> None:
        """The child of this generation is dead: nothing of it touches memory any more."""
        for number in [number for number, call in self.late.items() if call.generation == generation]:
            del self.late[number]
        for ticket in [ticket for ticket, doubt in self._doubts.items() if doubt.generation == generation]:
            del self._doubts[ticket]
        for call in [call for call in self.pending.values() if call.generation == generation]:
            del self.pending[call.number]
            call.lost = True
            if call.op == _SETTLED:
                self._settled(call, None)
            else:
                self.end(call, failed(call.op, call.count, error, sent=True))

    @property
    def idle(self) -> bool:
        """Whether nothing is going on."""
        return not (self.pending or self.late or self._settles)

    def settle(self, call: Call, tickets: Sequence[Any]) -> None:
        """Begin to wait until all tickets are over. What is none of ours is."""
        call.tickets = [ticket if isinstance(ticket, int) else _NO_TICKET for ticket in tickets]
        self._settles.append(call)

    def advance(self, now_s: float) -> list[tuple[Call, list[int]]]:
        """End the settles that can end. Returns the questions that the child is to be asked for the others: calls, and its own tickets."""
        questions = []
        for call in list(self._settles):
            left = {ticket: doubt for ticket in call.tickets if (doubt := self._doubts.get(ticket)) is not None}
            unasked = {ticket: doubt for ticket, doubt in left.items() if ticket not in call.asked}
            out_of_time = now_s >= (call.expires_s if call.asking else call.deadline_s)
            refused = bool(left) and not unasked and not call.asking
            if not left or out_of_time or refused:
                self._settles.remove(call)
                self.end(call, [ticket not in left for ticket in call.tickets])
                continue
            asked = {ticket: doubt.ticket for ticket, doubt in unasked.items() if doubt.ticket is not None}
            if asked:
                question = self.new(_SETTLED, len(asked), call.deadline_s, None)
                question.tickets = list(asked)
                question.asked = {call.number}
                question.generation = next(iter(unasked[ticket].generation for ticket in asked))
                call.asked.update(asked)
                call.asking += 1
                questions.append((question, [number for number in asked.values() if number is not None]))
        return questions

    def next_expiry_s(self, *, polled: bool) -> float | None:
        """When the first of the calls, or of the polled ones, has to be given up; None when there is none."""
        waiting = [call.expires_s for call in self.pending.values() if not polled or (call.wake is None and call.op != _SETTLED)]
        settles = [call for call in self._settles if not polled or call.wake is None]
        waiting += [call.expires_s if call.asking else call.deadline_s for call in settles]
        return min(waiting, default=None)

    def is_open(self, ticket: Any) -> bool:
        return ticket in self._doubts

    def waiter(self) -> Call | None:
        """A call whose thread waits, and could receive messages for all."""
        blocking = itertools.chain(self.pending.values(), self._settles)
        return next((call for call in blocking if call.wake is not None and not call.ended), None)

    def _returned(self, call: Call, answer: Any, breach: bool) -> None:
        """A late call returned: what it was given is free, but for what its own answer leaves in doubt."""
        if breach and self.may_doubt:
            if call.tickets:
                self.unreadable = call.generation
            return
        in_doubt = answer if isinstance(answer, list) and not breach else [None] * len(call.tickets)
        for ticket, result in zip(call.tickets, in_doubt, strict=False):
            if isinstance(result, (PutResult, GetResult)) and isinstance(result.ticket, int):
                if ticket in self._doubts:
                    self._doubts[ticket].ticket = result.ticket
            else:
                self._doubts.pop(ticket, None)

    def _settled(self, question: Call, answer: Any) -> None:
        call = next((call for call in self._settles if call.number in question.asked), None)
        if isinstance(answer, list):
            for ticket, over in zip(question.tickets, answer, strict=True):
                if over:
                    self._doubts.pop(ticket, None)
        if call is not None:
            call.asking -= 1

    def _with_own_tickets(self, call: Call, answer: Any) -> Any:
        """Tickets of the child turned into ours, which outlive it."""
        if call.op not in ("put", "get") or not isinstance(answer, list):
            return answer
        for place, result in enumerate(answer):
            if result.ticket is not None:
                if not self.may_doubt:
                    return self._without_breach(call, BreachError(f"{self._label} {call.op}: in doubt, which it does not declare"))
                ticket = self._new_ticket(_Doubt(call.generation, result.ticket))
                answer[place] = _in_doubt(call.op, ticket, result.error)
        return answer

    def _without_breach(self, call: Call, error: BreachError) -> Any:
        """An answer that cannot be read, as one that can: a backend that is never in doubt has let go of the buffers with it."""
        if call.op in ("put", "get") and self.may_doubt:
            self.unreadable = call.generation
            return [_in_doubt(call.op, self._new_ticket(_Doubt(call.generation)), error) for _ in range(call.count)]
        return failed(call.op, call.count, error, sent=True)

    def _new_ticket(self, doubt: _Doubt) -> int:
        ticket = next(self._tickets)
        self._doubts[ticket] = doubt
        return ticket


def failed(op: str, count: int, error: BackendError, *, sent: bool) -> Any:
    """What a call answers that no child answered. `sent`: a child may have done some of it."""
    closed = isinstance(error, ClosedError)
    if op in ("exists", "delete"):
        return [Failure(error) for _ in range(count)]
    if op == "get":
        return [GetResult(GetStatus.CLOSED if closed else GetStatus.FAILED, error) for _ in range(count)]
    if op == "put":
        status = PutStatus.UNKNOWN if sent else PutStatus.CLOSED if closed else PutStatus.FAILED
        return [PutResult(status, error) for _ in range(count)]
    return error


def _in_doubt(op: str, ticket: int, error: BackendError | None) -> PutResult | GetResult:
    if op == "put":
        return PutResult(PutStatus.IN_DOUBT, error, ticket)
    return GetResult(GetStatus.IN_DOUBT, error, ticket)
