"""What other processes do in these tests: `python child.py COMMAND FOLDER ...`. Each says `ready`, and waits for a line of input."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time

from kvstore_sdk.backend import Deadline, Get, GetStatus, Mode, Put, PutStatus, Region
from kvstore_sdk_backends.fs import open_fs

RECORD_BYTES = 65536


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def record_of(name: str, size: int = RECORD_BYTES) -> bytes:
    """What a record of this name holds: a reader needs nothing but the name to know it."""
    return (hashlib.sha256(name.encode()).digest() * (size // 32 + 1))[:size]


def put(backend: object, region: Region, name: str, mode: Mode = Mode.CREATE) -> PutStatus:
    part = region.buffer(0, RECORD_BYTES)
    part.view[:] = record_of(name)
    [result] = backend.put([Put(name, (part,), mode)], Deadline.after(60))  # type: ignore[attr-defined]
    return result.status


def chunk_name(number: int) -> str:
    digest = hashlib.sha256(b"%d" % number).hexdigest()
    return f"v1/{'0' * 32}/{digest[:2]}/{digest}-g0"


def storm(folder: str, count: str) -> None:
    """Store the same records as everybody else, at once."""
    region = Region(RECORD_BYTES)
    with_backend = open_fs(folder)
    say("ready")
    sys.stdin.readline()
    statuses = [put(with_backend, region, chunk_name(number)).value for number in range(int(count))]
    with_backend.close()
    say(json.dumps({status: statuses.count(status) for status in statuses}))


def nursery(folder: str, seed: str) -> None:
    """Once a line of input: let a child store records, kill it at a random moment of its life, and print what it reported as stored."""
    chance = random.Random(int(seed))
    say("ready")
    for turn, _ in enumerate(sys.stdin):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            region, backend = Region(RECORD_BYTES), open_fs(folder)
            for number in range(100_000):
                name = chunk_name(turn * 100_000 + number)
                if put(backend, region, name, chance.choice(list(Mode))) is PutStatus.STORED:
                    os.write(write, name.encode() + b"\n")
            os._exit(3)
        os.close(write)
        # Its life is told in records, not in seconds: a busy machine must not make all of them die before they begin.
        with os.fdopen(read, encoding="ascii") as stored:
            names = [stored.readline() for _ in range(chance.randrange(6))]
            time.sleep(chance.uniform(0, 0.003 if names else 0.02))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            names += stored.readlines()
        say(json.dumps([name.strip() for name in names]))


def flip(folder: str, count: str) -> None:
    """Replace one record by another of its length, again and again."""
    backend, region = open_fs(folder), Region(2 * RECORD_BYTES)
    items = []
    for value in (1, 2):
        part = region.buffer((value - 1) * RECORD_BYTES, RECORD_BYTES)
        part.view[:] = bytes([value]) * RECORD_BYTES
        items.append(Put("k", (part,), Mode.REPLACE))
    backend.put(items[:1], Deadline.after(60))
    say("ready")
    sys.stdin.readline()
    statuses = {backend.put([items[turn % 2]], Deadline.after(60))[0].status.value for turn in range(int(count))}
    backend.close()
    say(json.dumps(sorted(statuses)))


def half(folder: str) -> None:
    """Write half of a record to its temporary file, say so, and go on when told to."""
    backend, region = open_fs(folder), Region(RECORD_BYTES)
    write = os.pwritev

    def stop_half_way(fd: int, views: list[memoryview], at: int) -> int:
        if at:
            return write(fd, views, at)
        done = write(fd, [memoryview(bytes(views[0]))[: RECORD_BYTES // 2]], at)
        say("ready")
        sys.stdin.readline()
        return done

    os.pwritev = stop_half_way  # type: ignore[assignment]
    # The page cache, because the copy above is not aligned.
    backend._direct.enabled = False
    say(json.dumps(put(backend, region, "slow").value))
    backend.close()


def fork(folder: str) -> None:
    """What a forked child gets from a backend of its parent, and what the parent has afterwards."""
    backend, region = open_fs(folder), Region(RECORD_BYTES)
    put(backend, region, "a")
    writer = backend._records._writer.name
    # Another thread holds the backend's lock at the fork: for ever, as far as the child can see.
    held = threading.Event()
    over = threading.Event()

    def hold() -> None:
        with backend._idle:
            held.set()
            over.wait(30)

    holder = threading.Thread(target=hold, name="holder")
    holder.start()
    held.wait(30)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        answers = [
            put(backend, region, "b").value,
            backend.get([Get("a", (region.buffer(0, RECORD_BYTES),))], Deadline.after(5))[0].status.value,
        ]
        answers += [
            type(answer.error).__name__ for answer in (*backend.exists(["a"], Deadline.after(5)), *backend.delete(["a"], Deadline.after(5)))
        ]
        for call in (backend.sweep, lambda: backend.list("", Deadline.after(5)), lambda: backend.usage(Deadline.after(5))):
            try:
                call()
            except Exception as error:  # noqa: BLE001  # its name is the answer
                answers.append(type(error).__name__)
        backend.close()
        # A child that wants to store opens the folder itself.
        own = open_fs(folder)
        answers.append(put(own, region, "c").value)
        own.close()
        os.write(write, json.dumps(answers).encode())
        os._exit(0)
    os.close(write)
    over.set()
    holder.join(30)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as answers_of_child:
        child = json.loads(answers_of_child.read())
    say("ready")
    say(json.dumps([child, put(backend, region, "b").value, backend._records._writer.name == writer]))
    sys.stdin.readline()
    backend.close()


def hoarded(writer: int, number: int) -> tuple[str, bytes]:
    """The records of a capacity storm: of 4 to 64 KiB, told by their names."""
    digest = hashlib.sha256(b"%d %d" % (writer, number)).digest()
    name = f"v1/{'0' * 32}/{digest.hex()[:2]}/{digest.hex()}-g{writer}"
    return name, record_of(name, 4096 * (1 + digest[1] % 16))


def hoard(folder: str, max_bytes: str, writer: str, count: str, progress: str) -> None:
    """Store the records of one writer, on from where the last one was killed. What went wrong goes to stderr."""
    region, backend = Region(RECORD_BYTES), open_fs(folder, max_bytes=int(max_bytes))
    say("ready")
    with open(progress, "r+b", buffering=0) as done:
        for number in range(int(done.read(16) or b"0"), int(count)):
            name, record = hoarded(int(writer), number)
            part = region.buffer(0, len(record))
            part.view[:] = record
            [result] = backend.put([Put(name, (part,))], Deadline.after(60))
            if result.status not in (PutStatus.STORED, PutStatus.EXISTS):
                sys.stderr.write(f"{name}: {result}\n")
            os.pwrite(done.fileno(), b"%16d" % (number + 1), 0)
    backend.close()


def consult(folder: str, max_bytes: str, count: str, seed: str, found: str) -> None:
    """Read records of all writers at random until a file `<found>.stop` is there; `found` says how many there were."""
    region, backend, chance = Region(RECORD_BYTES), open_fs(folder, max_bytes=int(max_bytes)), random.Random(int(seed))
    hits = 0
    with open(found, "r+b", buffering=0) as noted:
        while not os.path.exists(found + ".stop"):
            name, record = hoarded(chance.randrange(6), chance.randrange(int(count)))
            part = region.buffer(0, len(record))
            [result] = backend.get([Get(name, (part,))], Deadline.after(60))
            if result.status is GetStatus.FOUND:
                hits += 1
                os.pwrite(noted.fileno(), b"%16d" % hits, 0)
                if part.view != record:
                    sys.stderr.write(f"{name}: other bytes\n")
            elif result.status is not GetStatus.MISSING:
                sys.stderr.write(f"{name}: {result}\n")
    backend.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
