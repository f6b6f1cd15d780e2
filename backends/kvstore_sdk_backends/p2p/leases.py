"""Who holds which record of this node, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from kvstore_sdk.backend import Buffer, Loan, RecordSource
from kvstore_sdk_backends.p2p.limits import Limits

__all__ = ["Borrowed", "Leases"]


class Borrowed:
    """A loan, and whose it is. `Leases.give_back` ends it, once, however often it is called."""

    __slots__ = ("buffer", "loan", "over", "source", "until_s")

    def __init__(self, source: RecordSource, loan: Loan) -> None:
        self.source = source
        self.loan = loan
        self.buffer: Buffer = loan.buffer
        self.over = False
        # While it is a lease.
        self.until_s = 0.0

    @property
    def name(self) -> str:
        return self.loan.name

    @property
    def size_bytes(self) -> int:
        return self.buffer.length

    @property
    def replaced(self) -> bool:
        """Whether its source has another record of that name by now, as a shelf may."""
        return getattr(self.loan, "replaced", False)


class Leases:
    """Records that look-ups found, kept from eviction until they are fetched, released, or their time is up.

    A lease is a courtesy: a look-up answers the same without one, and a transfer that finds no room for its pin takes that of a lease.
    What is borrowed for a transfer is no lease any more: it has no time, and is given back by whoever knows that the transfer is over.
    One thread uses it.
    """

    def __init__(self, sources: Sequence[RecordSource], limits: Limits) -> None:
        """`sources` are asked in order; one that is appended later is asked from then on."""
        self._sources = sources
        self._limits = limits
        # By session and name, the first to end first: all leases last equally long from their last look-up.
        self._held: dict[Hashable, OrderedDict[str, Borrowed]] = {}
        self._bytes: dict[Hashable, int] = {}
        self.leased_bytes = 0
        self.leased = 0
        self._taken: set[Borrowed] = set()

    @property
    def taken(self) -> int:
        """Given out by `take` and not given back."""
        return len(self._taken)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of each record in the first source that has it, 0 for what none has."""
        sizes = [0] * len(names)
        missing: list[int] = list(range(len(names)))
        for source in self._sources:
            if not missing:
                break
            for at, size_bytes in zip(missing, source.sizes([names[at] for at in missing]), strict=True):
                sizes[at] = size_bytes
            missing = [at for at in missing if not sizes[at]]
        return sizes

    def lease(self, session: Hashable, names: Sequence[str], now_s: float) -> list[int]:
        """Answer a look-up like `sizes`, and keep what is there for the session, as far as there is room for leases."""
        known: dict[str, Borrowed] = self._held.get(session, OrderedDict())
        self.release(session, [name for name in names if (lease := known.get(name)) is not None and lease.replaced])
        held = self._held.setdefault(session, OrderedDict())
        until_s = now_s + self._limits.lease_s
        sizes: dict[str, int] = {}
        for name in names:
            if (lease := held.get(name)) is not None:
                lease.until_s = until_s
                held.move_to_end(name)
                sizes[name] = lease.size_bytes
        missing = [name for name in dict.fromkeys(names) if name not in sizes]
        for source in self._sources:
            if not missing:
                break
            found = {name: size_bytes for name, size_bytes in zip(missing, source.sizes(missing), strict=True) if size_bytes}
            sizes |= found
            wanted: list[str] = []
            wanted_bytes = 0
            for name, size_bytes in found.items():
                if self._make_room(session, wanted_bytes + size_bytes, len(wanted) + 1):
                    wanted.append(name)
                    wanted_bytes += size_bytes
            for loan in source.lend(wanted) if wanted else ():
                if loan is not None:
                    self._keep(session, Borrowed(source, loan), until_s)
            missing = [name for name in missing if name not in found]
        if not held:
            self._held.pop(session, None)
        return [sizes.get(name, 0) for name in names]

    def take(self, session: Hashable, names: Sequence[str]) -> list[Borrowed | None]:
        """Borrow records for a transfer, those that the session leased from its leases, which end. What has been replaced since is borrowed
        as it is now.

        None: it is not there, or all that may be lent is on its way to somebody.
        """
        taken: list[Borrowed | None] = [self._drop(session, name) for name in names]
        self._return(stale := [lease for lease in taken if lease is not None and lease.replaced])
        taken = [None if lease in stale else lease for lease in taken]
        for source in self._sources:
            missing = [at for at, borrowed in enumerate(taken) if borrowed is None]
            if not missing:
                break
            for at, loan in zip(missing, source.lend([names[at] for at in missing]), strict=True):
                taken[at] = Borrowed(source, loan) if loan is not None else None
        for at, borrowed in enumerate(taken):
            if borrowed is None and self.sizes([names[at]])[0]:
                taken[at] = instead = self._borrow_instead(names[at])
                if instead is None:
                    # Nor would there be one for the next.
                    break
        self._taken.update(borrowed for borrowed in taken if borrowed is not None)
        return taken

    def give_back(self, borrowed: Iterable[Borrowed]) -> None:
        """The transfers of these are over: nothing reads them any more."""
        over = list(borrowed)
        self._taken.difference_update(over)
        self._return(over)

    def close(self) -> None:
        """End all leases, and give back what was taken, whatever became of it."""
        for session in list(self._held):
            self.end(session)
        self.give_back(set(self._taken))

    def release(self, session: Hashable, names: Sequence[str]) -> None:
        """The session does not want these any more."""
        self._return([lease for name in names if (lease := self._drop(session, name)) is not None])

    def expire(self, now_s: float) -> None:
        """End the leases whose time is up."""
        over = []
        for session, held in list(self._held.items()):
            while held and (name := next(iter(held))) and held[name].until_s <= now_s:
                if (lease := self._drop(session, name)) is not None:
                    over.append(lease)
        self._return(over)

    def end(self, session: Hashable) -> None:
        """End all leases of a session."""
        self.release(session, list(self._held.get(session, ())))

    def leases_of(self, session: Hashable) -> int:
        """How many a session has."""
        return len(self._held.get(session, ()))

    def _borrow_instead(self, name: str) -> Borrowed | None:
        """Borrow a record of a source that lends no more, in place of leases of that source."""
        for source in self._sources:
            while source.sizes([name])[0] and self._give_up_one(source):
                if (loan := source.lend([name])[0]) is not None:
                    return Borrowed(source, loan)
        return None

    def _keep(self, session: Hashable, lease: Borrowed, until_s: float) -> None:
        lease.until_s = until_s
        self._held.setdefault(session, OrderedDict())[lease.name] = lease
        self._bytes[session] = self._bytes.get(session, 0) + lease.size_bytes
        self.leased_bytes += lease.size_bytes
        self.leased += 1

    def _drop(self, session: Hashable, name: str) -> Borrowed | None:
        held = self._held.get(session)
        lease = held.pop(name, None) if held is not None else None
        if lease is None:
            return None
        if not held:
            del self._held[session]
        self.leased_bytes -= lease.size_bytes
        self.leased -= 1
        self._bytes[session] -= lease.size_bytes
        if session not in self._held:
            del self._bytes[session]
        return lease

    def _make_room(self, session: Hashable, more_bytes: int, more: int) -> bool:
        """Whether the session may have so much more. Others give up leases for it, while they hold more than it would."""
        limits = self._limits
        while self.leased_bytes + more_bytes > limits.max_leased_bytes or self.leased + more > limits.max_leases:
            most = max(self._bytes, key=self._bytes.__getitem__, default=session)
            if most == session or self._bytes[most] < self._bytes.get(session, 0) + more_bytes:
                return False
            self._give_up(most)
        return True

    def _give_up_one(self, source: RecordSource) -> bool:
        """End a lease of that source, the oldest of the session that holds most; False: there is none."""
        for session in sorted(self._bytes, key=self._bytes.__getitem__, reverse=True):
            for name, lease in self._held[session].items():
                if lease.source is source:
                    self.release(session, [name])
                    return True
        return False

    def _give_up(self, session: Hashable) -> None:
        lease = self._drop(session, next(iter(self._held[session])))
        if lease is not None:
            self._return([lease])

    @staticmethod
    def _return(borrowed: Sequence[Borrowed]) -> None:
        by_source: dict[int, tuple[RecordSource, list[Loan]]] = {}
        for one in borrowed:
            if not one.over:
                one.over = True
                by_source.setdefault(id(one.source), (one.source, []))[1].append(one.loan)
        for source, loans in by_source.values():
            source.give_back(loans)
