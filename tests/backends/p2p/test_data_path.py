"""Records over ZMQ come whole, and only where they are waited for, whatever the owner sends."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
import zmq
from p2p_bench import MIB, NODE, PATIENCE_S, Patient, bench, part, run, soon, until

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.p2p.admission import Admission
from kvstore_sdk_backends.p2p.data_path import HEADER, routing_id
from kvstore_sdk_backends.p2p.keys import CurveKey


@pytest.mark.parametrize(("size", "count"), [(1, 3), (4096, 64), (65_535, 8), (65_536, 8), (MIB + 4096, 24), (40 * MIB, 2)])
def test_records_arrive_whole_where_they_are_waited_for(size: int, count: int) -> None:
    """The last ones are longer than what may be queued."""

    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            source, target = b.memory(size * count, seed=size), b.memory(size * count)
            arrival = receiver.expect(7, {index: part(target, index * size, size) for index in range(count)})
            assert arrival.missing == frozenset(range(count))
            order = random.Random(1).sample(range(count), count)
            sends = [asyncio.create_task(sender.send(7, i, part(source, i * size, size), soon())) for i in order]
            assert await arrival.wait(soon())
            assert arrival.missing == frozenset()
            assert await asyncio.gather(*sends) == [True] * count
            assert source.view == target.view
            assert sender.queued_bytes == 0
            assert b.lost == []

    run(test)


def test_fetches_share_a_connection_and_each_gets_its_own() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            source, target = b.memory(8 * MIB, seed=3), b.memory(8 * MIB)
            parts = [(source.region.buffer(i * MIB, MIB), target.region.buffer(i * MIB, MIB)) for i in range(8)]
            arrivals = [receiver.expect(2**63 - 1 - i, {0: into}) for i, (_, into) in enumerate(parts)]
            sends = [sender.send(2**63 - 1 - i, 0, record, soon()) for i, (record, _) in reversed(list(enumerate(parts)))]
            assert await asyncio.gather(*sends) == [True] * 8
            assert [await arrival.wait(soon()) for arrival in arrivals] == [True] * 8
            assert source.view == target.view

    run(test)


def test_a_key_protects_the_data_too() -> None:
    """A member gets the record; one who holds another key gets a lost connection."""

    async def test() -> None:
        async with bench() as b:
            key, other = (CurveKey(*zmq.curve_keypair()) for _ in range(2))
            b.security = Patient("127.0.0.1", key=key)
            admission = Admission(b.context, key, "a test")
            admitting = asyncio.create_task(admission.run())
            try:
                sender = b.sender()
                b.security = Patient("127.0.0.1", key=other)
                stranger = b.receiver(sender.port)
                await until(lambda: stranger.closed)
                assert b.lost == ["the data connection is lost"]
                b.security = Patient("127.0.0.1", key=key)
                receiver = b.receiver(sender.port)
                source, target = b.memory(MIB, seed=5), b.memory(MIB)
                arrival = receiver.expect(1, {0: target})
                assert await sender.send(1, 0, source, soon())
                assert await arrival.wait(soon())
                assert source.view == target.view
            finally:
                admitting.cancel()
                await asyncio.wait({admitting})
                admission.close()

    run(test)


# --- The asker's buffers -------------------------------------------------------------------------------------------------------------


def test_after_cancel_no_byte_is_written() -> None:
    """RACE-08: the record comes, late, and finds its buffer in use for something else."""

    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            source, target, later = b.memory(4 * MIB, seed=1), b.memory(4 * MIB), b.memory(MIB)
            arrival = receiver.expect(1, {0: part(target, 0, 2 * MIB), 1: part(target, 2 * MIB, 2 * MIB)})
            assert await sender.send(1, 0, part(source, 0, 2 * MIB), soon())
            await until(lambda: arrival.missing == {1})
            arrival.cancel()
            assert arrival.over
            assert not await arrival.wait(soon())
            target.view[:] = b"\xa5" * (4 * MIB)
            assert await sender.send(1, 1, part(source, 2 * MIB, 2 * MIB), soon())
            assert await sender.send(1, 0, part(source, 0, 2 * MIB), soon())
            # What is sent after them arrives after them.
            after = receiver.expect(2, {0: later})
            assert await sender.send(2, 0, part(source, 0, MIB), soon())
            assert await after.wait(soon())
            assert target.view == b"\xa5" * (4 * MIB)
            assert later.view == part(source, 0, MIB).view
            assert not receiver.closed

    run(test)


def test_a_record_is_taken_once() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            first, second = b.memory(MIB, seed=1), b.memory(MIB, seed=2)
            target, other = b.memory(MIB), b.memory(MIB)
            arrival = receiver.expect(1, {0: target, 1: other})
            for record, index in ((first, 0), (second, 0), (second, 1)):
                assert await sender.send(1, index, record, soon())
            assert await arrival.wait(soon())
            assert (target.view, other.view) == (first.view, second.view)

    run(test)


def test_what_the_owner_does_not_send_is_not_waited_for() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            target, source = b.memory(3 * 4096), b.memory(4096, seed=1)
            arrival = receiver.expect(1, {i: part(target, i * 4096, 4096) for i in range(3)})
            arrival.skip([0, 2, 9])
            assert not arrival.over
            assert await sender.send(1, 1, source, soon())
            assert await arrival.wait(soon())
            nothing = receiver.expect(2, {0: part(target, 0, 4096)})
            nothing.skip([0])
            assert await nothing.wait(Deadline.after(0))
            assert await receiver.expect(3, {}).wait(Deadline.after(0))

    run(test)


def test_a_wait_ends_at_its_time_and_can_be_taken_up_again() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            source, target = b.memory(4096, seed=1), b.memory(4096)
            arrival = receiver.expect(1, {0: target})
            assert not await arrival.wait(Deadline.after(0.02))
            assert not arrival.over
            assert await sender.send(1, 0, source, soon())
            assert await arrival.wait(soon())

    run(test)


# --- The end of a connection, and an owner that breaks the protocol ------------------------------------------------------------------


def test_arrivals_end_with_their_connection() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            source, target = b.memory(2 * 4096, seed=1), b.memory(2 * 4096)
            arrival = receiver.expect(1, {0: part(target, 0, 4096), 1: part(target, 4096, 4096)})
            other = receiver.expect(2, {0: target})
            assert await sender.send(1, 0, part(source, 0, 4096), soon())
            await until(lambda: arrival.missing == {1})
            sender.close()
            assert not await arrival.wait(soon())
            assert not await other.wait(soon())
            assert receiver.closed
            assert b.lost == ["the data connection is lost"]
            assert not await receiver.expect(3, {0: target}).wait(soon()), "and none begins"

    run(test)


def test_a_connection_that_is_refused_is_lost() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            port = sender.port
            sender.close()
            await asyncio.sleep(0.05)
            receiver = b.receiver(port)
            arrival = receiver.expect(1, {0: b.memory(4096)})
            assert not await arrival.wait(soon())
            assert b.lost == ["the data connection is lost"]

    run(test)


def test_closing_ones_own_end_is_no_loss() -> None:
    async def test() -> None:
        async with bench() as b:
            receiver = b.receiver(b.sender().port)
            arrival = receiver.expect(1, {0: b.memory(4096)})
            receiver.close()
            receiver.close()
            assert not await arrival.wait(soon())
            await asyncio.sleep(0.05)
            assert b.lost == []

    run(test)


BREACHES = {
    "no record": [HEADER.pack(1, 0, 4096)],
    "a third frame": [HEADER.pack(1, 0, 4096), b"r" * 4096, b""],
    "a short header": [HEADER.pack(1, 0, 4096)[:-1], b"r" * 4096],
    "a long header": [HEADER.pack(1, 0, 4096) + b"\x00", b"r" * 4096],
    "a huge header": [b"h" * MIB, b"r" * 4096],
    "no bytes": [HEADER.pack(1, 0, 0), b""],
    "a size beyond all": [HEADER.pack(1, 0, 2**64 - 1), b"r" * 4096],
    "a longer record": [HEADER.pack(1, 0, 4096), b"r" * 8192],
    "a shorter record": [HEADER.pack(1, 0, 4096), b"r" * 4095],
    "another size": [HEADER.pack(1, 0, 8192), b"r" * 8192],
    "bytes for nobody that are not as many as they say": [HEADER.pack(99, 0, 4096), b"r" * 8192],
}


async def sent(owner: Any, frames: list[bytes]) -> bool:
    with suppress(zmq.ZMQError):
        await owner.send_multipart([routing_id(NODE), *frames])
        return True
    return False


@pytest.mark.parametrize("frames", BREACHES.values(), ids=BREACHES)
def test_an_owner_that_breaks_the_protocol_is_parted_from(frames: list[bytes]) -> None:
    """No byte is written beside the buffer of the record, whatever the owner says of its size."""

    async def test() -> None:
        async with bench() as b:
            owner = b.socket(zmq.ROUTER, router_mandatory=1)
            port = owner.bind_to_random_port("tcp://127.0.0.1")
            target = b.memory(3 * 4096)
            target.view[:] = b"\xa5" * (3 * 4096)
            receiver = b.receiver(port)
            arrival = receiver.expect(1, {0: part(target, 4096, 4096)})
            # Not reachable before it has connected.
            async with asyncio.timeout(PATIENCE_S):
                while not await sent(owner, frames):
                    await asyncio.sleep(0.005)
            assert not await arrival.wait(soon())
            assert receiver.closed
            assert len(b.lost) == 1
            assert target.view[:4096] == target.view[8192:] == b"\xa5" * 4096

    run(test)


def test_a_flood_of_what_nobody_asked_for_is_dropped() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            receiver = b.receiver(sender.port)
            flood, source, target = b.memory(4096, seed=1), b.memory(MIB, seed=2), b.memory(MIB)
            arrival = receiver.expect(1, {0: target})
            sends = [sender.send(random.Random(i).randrange(2, 2**63), i, flood, soon()) for i in range(2000)]
            assert all(await asyncio.gather(*sends))
            assert not arrival.over
            assert await sender.send(1, 0, source, soon())
            assert await arrival.wait(soon())
            assert source.view == target.view

    run(test)
