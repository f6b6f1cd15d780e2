"""A record is sent from where it lies, and when `send` is over nobody reads that memory any more."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import pytest
import zmq
from p2p_bench import MIB, NODE, PATIENCE_S, Bench, Patient, bench, part, run, soon, until

from kvstore_sdk.backend import Buffer, Deadline, UnavailableError
from kvstore_sdk_backends.p2p.data_path import HEADER, MAX_QUEUED_BYTES, Sender, routing_id


async def stuck(b: Bench, sender: Sender, first: Buffer) -> Any:
    """An asker that is connected, and takes nothing any more once it has read one record, `first`."""
    asker = b.socket(zmq.DEALER, routing_id=routing_id(NODE), rcvhwm=1, rcvbuf=65536)
    asker.connect(f"tcp://127.0.0.1:{sender.port}")
    await asker.send(b"")
    sending = asyncio.create_task(sender.send(1, 0, first, soon()))
    await asyncio.wait_for(asker.recv_multipart(), PATIENCE_S)
    assert await sending
    return asker


def test_nothing_is_sent_until_the_asker_connects() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            source, target = b.memory(4096, seed=1), b.memory(4096)
            assert not await sender.send(1, 0, source, Deadline.after(0.05)), "nobody came"
            assert not sender.closed
            sending = asyncio.create_task(sender.send(2, 0, source, soon()))
            await asyncio.sleep(0.05)
            assert not sending.done()
            arrival = b.receiver(sender.port).expect(2, {0: target})
            assert await sending
            assert await arrival.wait(soon())

    run(test)


def test_others_on_the_port_get_nothing_and_are_in_nobodys_way() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            thieves = [b.socket(kind) for kind in (zmq.DEALER, zmq.PULL, zmq.PAIR, zmq.DEALER)]
            thieves[-1].routing_id = routing_id(b"another node....")
            for thief in thieves:
                thief.connect(f"tcp://127.0.0.1:{sender.port}")
            for thief, frame in zip((thieves[0], thieves[2], thieves[3]), (b"", b"x" * 64, b"x" * 5000), strict=True):
                await thief.send(frame, zmq.NOBLOCK)
            source, target = b.memory(MIB, seed=1), b.memory(MIB)
            receiver = b.receiver(sender.port)
            for number in range(3):
                arrival = receiver.expect(number, {0: target})
                assert await sender.send(number, 0, source, soon())
                assert await arrival.wait(soon())
            for thief in thieves:
                assert not await thief.poll(20)
            assert b.lost == []

    run(test)


def test_others_on_the_port_do_not_stay() -> None:
    """Neither those who say nothing, nor those who speak another protocol; the asker comes through among them."""

    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            others = [await asyncio.open_connection("127.0.0.1", sender.port) for _ in range(12)]
            for _, writer in others[::2]:
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
            source, target = b.memory(4096, seed=1), b.memory(4096)
            arrival = b.receiver(sender.port).expect(1, {0: target})
            assert await sender.send(1, 0, source, soon())
            assert await arrival.wait(soon())
            for reader, writer in others:
                with suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), PATIENCE_S)
                writer.close()
            assert not sender.closed
            assert await sender.send(2, 0, source, soon())

    run(test)


def test_what_waits_for_an_asker_is_bounded() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender(max_queued_bytes=4 * MIB)
            source = b.memory(64 * MIB, seed=1)
            asker = await stuck(b, sender, part(source, 0, 4096))
            sends = [asyncio.create_task(sender.send(2, i, part(source, i * MIB, MIB), Deadline.after(2 * PATIENCE_S))) for i in range(64)]
            await until(lambda: sender.queued_bytes > 3 * MIB)
            for _ in range(20):
                await asyncio.sleep(0.005)
                assert sender.queued_bytes <= 4 * MIB
            assert not all(send.done() for send in sends)
            assert not await sender.send(3, 0, part(source, 0, MIB), Deadline.after(0.05)), "there is no room for it by its deadline"
            # The asker takes them after all.
            for index in range(64):
                header, record = await asyncio.wait_for(asker.recv_multipart(), PATIENCE_S)
                assert HEADER.unpack(header) == (2, index, MIB)
                assert record == part(source, index * MIB, MIB).view
            assert await asyncio.gather(*sends) == [True] * 64
            assert not sender.closed

    run(test)


def test_an_asker_that_takes_nothing_is_parted_from_and_the_memory_is_free() -> None:
    """LEAK-07: the record was lent for this, and nobody else could give it back."""

    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            source = b.memory(MAX_QUEUED_BYTES, seed=1)
            await stuck(b, sender, part(source, 0, 4096))
            sends = [sender.send(2, i, part(source, i * 4 * MIB, 4 * MIB), Deadline.after(0.2)) for i in range(8)]
            assert not all(await asyncio.wait_for(asyncio.gather(*sends), PATIENCE_S))
            assert sender.closed
            assert sender.queued_bytes == 0
            assert not await sender.send(3, 0, part(source, 0, 4096), soon())

    run(test)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_memory_under_way_is_free_when_the_send_is_over(how: str) -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            source = b.memory(MAX_QUEUED_BYTES, seed=1)
            asker = await stuck(b, sender, part(source, 0, 4096))
            sends = [asyncio.create_task(sender.send(2, i, part(source, i * 4 * MIB, 4 * MIB), soon())) for i in range(8)]
            await until(lambda: sender.queued_bytes > 16 * MIB)
            if how == "close":
                sender.close()
            else:
                sends[-1].cancel()
            done, pending = await asyncio.wait(sends, timeout=PATIENCE_S)
            assert not pending
            assert sender.closed
            assert sender.queued_bytes == 0
            assert sends[-1].cancelled() == (how == "cancel")
            assert not all(not send.cancelled() and send.result() for send in done)
            # Whatever of it was sent is what it was then: the memory is used for something else now.
            source.view[:] = b"\xa5" * MAX_QUEUED_BYTES
            for _ in range(8):
                if not await asker.poll(50):
                    break
                assert b"\xa5" * 4096 not in (await asker.recv_multipart())[1]

    run(test)


def test_an_asker_that_goes_frees_what_it_did_not_take() -> None:
    async def test() -> None:
        async with bench() as b:
            sender = b.sender()
            source = b.memory(MAX_QUEUED_BYTES, seed=1)
            asker = await stuck(b, sender, part(source, 0, 4096))
            sends = [asyncio.create_task(sender.send(2, i, part(source, i * 4 * MIB, 4 * MIB), soon())) for i in range(8)]
            await until(lambda: sender.queued_bytes > 16 * MIB)
            asker.close()
            await asyncio.wait_for(asyncio.gather(*sends), PATIENCE_S)
            assert sender.queued_bytes == 0
            # A session has one data connection.
            await until(lambda: sender.closed)
            assert not await sender.send(3, 0, part(source, 0, 4096), soon())

    run(test)


def test_no_free_port_is_an_error_that_leaves_nothing_open() -> None:
    async def test() -> None:
        async with bench() as b:
            taken = b.sender()
            b.security = Patient("127.0.0.1", data_ports=range(taken.port, taken.port + 1))
            for _ in range(3):
                with pytest.raises(UnavailableError, match="data_ports"):
                    b.sender()

    run(test)


def test_connections_leave_no_descriptors_behind() -> None:
    async def test() -> None:
        async with bench() as b:

            async def one(seed: int) -> None:
                sender = b.sender()
                receiver = b.receiver(sender.port)
                source, target = b.memory(4096, seed=seed), b.memory(4096)
                arrival = receiver.expect(1, {0: target})
                assert await sender.send(1, 0, source, soon())
                assert await arrival.wait(soon())
                sender.close()
                receiver.close()
                for buffer in (source, target):
                    buffer.region.close()

            for seed in range(3):
                await one(seed)
            before = len(os.listdir("/proc/self/fd"))
            for seed in range(20):
                await one(seed)
            # libzmq closes in a thread of its own.
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)

    run(test)
