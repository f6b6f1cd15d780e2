"""A process with a main loop in pure Python and a Tier over `fs`: `python gil_child.py direct|staged FOLDER`.

The benchmark has two of them: one loops, the other moves records for it when they are to be moved by another process. A question is {"do":
"loop"|"move"|"both", "op": "put"|"get", "bytes", "rate": bytes/s that are offered, 0 for as many as go, "lead_s", "seconds"}. Moving
begins `lead_s` before the loop, and is driven in both processes in steps of the same length. The answer is {"loop": turns of the loop in a
second, with what the tier's calls took of this thread's time, "own": without, "rate": bytes/s that were moved}.

All records of one size are stored or loaded over and over: those that were stored are removed after each time, past the tier.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from child import serve
from isolation_child import PlainRows, RecordRows, work

from kvstore_sdk.backend import Deadline
from kvstore_sdk.format import record_bytes, seal
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier import Tier, TierSettings
from kvstore_sdk_backends.fs import open_fs

ROOM_BYTES = 384 << 20
"""Of all records: more than a put moves in the time of one answer is not offered."""
JOB_BYTES, JOB_CHUNKS = 8 << 20, 16
FLIGHT_BYTES, FLIGHT_CHUNKS = 64 << 20, 256
STEP_S = 0.005
WAIT_S = 60.0
LAYOUT = "bench"


class Mover:
    """A Tier for chunks of one size, and the jobs that it is given."""

    def __init__(self, way: str, folder: Path, size: int) -> None:
        self.size = size
        count = ROOM_BYTES // record_bytes(size)
        group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=size, heads=1, head_size=1)
        identity = KVIdentity(
            model="m",
            weights="w",
            model_config="c",
            kv_dtype="bfloat16",
            layout=LAYOUT,
            layout_version=1,
            block_tokens=16,
            hash_tokens=16,
            blocks_per_chunk=1,
            groups=(group,),
            hash_algorithm="sha256",
        )
        location = str(folder / f"{way}-{size}")
        self._store = open_fs(location, direct_io="always")
        # Nothing is known to be there, so that what was removed is stored again.
        settings = TierSettings(store_timeout_s=WAIT_S, load_timeout_s=WAIT_S, hit_ttl_s=0.0)
        rows: PlainRows | RecordRows = RecordRows(size, count) if way == "direct" else PlainRows(size, count)
        self.tier = Tier(open_fs(location, direct_io="always"), rows, identity=identity, settings=settings)
        self._job_chunks = max(1, min(JOB_CHUNKS, JOB_BYTES // size))
        self._most = max(self._job_chunks, min(FLIGHT_CHUNKS, FLIGHT_BYTES // size))
        keys = [hashlib.sha256(str(number).encode()).digest() + bytes(4) for number in range(count // self._job_chunks * self._job_chunks)]
        self._names = [ChunkKey.from_engine(identity.namespace, key) for key in keys]
        if isinstance(rows, RecordRows):
            for row, name in enumerate(self._names):
                seal(rows.record(row).view, name, LAYOUT, size)
        starts = range(0, len(keys), self._job_chunks)
        self._jobs = [(keys[at : at + self._job_chunks], range(at, at + self._job_chunks)) for at in starts]
        self._number = self._next = 0
        self._stored = False
        self.in_flight = 0
        self.moved = 0

    @property
    def room_bytes(self) -> int:
        return len(self._names) * self.size

    def ready(self, op: str) -> None:
        """What is to be loaded is there, what is to be stored is not."""
        if (op == "get") != self._stored:
            if op == "get":
                self.begin()
                while self._next < len(self._jobs):
                    self.step("put", self.room_bytes)
                    time.sleep(0.001)
                self.end()
                self._stored = True
            else:
                self.clean()

    def begin(self) -> None:
        """From the first job on."""
        self._next = self.moved = 0

    def step(self, op: str, allowed_bytes: float) -> None:
        """What an engine's thread does in a step: take what is done, submit what there is to do."""
        for result in self.tier.poll():
            if not result.success:
                raise RuntimeError(f"a {op} failed: {len(result.failed)} chunks")
            self.in_flight -= self._job_chunks
            self.moved += self._job_chunks * self.size
        submit = self.tier.submit_store if op == "put" else self.tier.submit_load
        while self.in_flight < self._most and self._next * self._job_chunks * self.size < allowed_bytes:
            if op == "put" and self._next >= len(self._jobs):
                break
            self._number += 1
            submit(self._number, *self._jobs[self._next % len(self._jobs)])
            self._next += 1
            self.in_flight += self._job_chunks
        self.tier.flush()

    def end(self) -> None:
        """Wait for what is under way."""
        until_s = time.monotonic() + WAIT_S
        while self.in_flight:
            self.step("put", 0.0)
            time.sleep(0.001)
            if time.monotonic() > until_s:
                raise RuntimeError("a job did not end")

    def clean(self) -> None:
        names = [name.name for name in self._names]
        for at in range(0, len(names), 64):
            self._store.delete(names[at : at + 64], Deadline.after(WAIT_S))
        self._stored = False

    def close(self) -> None:
        self.clean()
        self.tier.close()
        self._store.close()


def turns_a_step() -> int:
    """Turns of `work` in `STEP_S`, with nobody else on the processor: the best of some tries."""
    found = []
    for _ in range(50):
        began_s = time.perf_counter()
        work(20_000)
        found.append(20_000 / (time.perf_counter() - began_s))
    return int(max(found) * STEP_S)


def run(do: str, mover: Mover, question: dict[str, Any], turns: int) -> dict[str, Any]:
    """Loop, move, or do both in one process."""
    op, seconds, lead_s, rate = question["op"], question["seconds"], question["lead_s"], question["rate"]
    most = mover.room_bytes / (seconds + lead_s) if op == "put" else float("inf")
    rate = min(rate or most, most)
    mover.begin()
    steps, calls_s = 0, 0.0
    began_s = now_s = time.perf_counter()
    loop_s = began_s + lead_s
    while now_s < loop_s + seconds:
        looping = do != "move" and now_s >= loop_s
        if looping:
            if not steps:
                first_s = now_s
            work(turns)
            steps += 1
        else:
            time.sleep(STEP_S)
        if do != "loop":
            begun_s = time.perf_counter()
            mover.step(op, float("inf") if rate == float("inf") else rate * (begun_s - began_s))
            calls_s += (time.perf_counter() - begun_s) * looping
        now_s = time.perf_counter()
    moved = mover.moved / (now_s - began_s)
    if not steps:
        return {"rate": moved}
    spent_s = now_s - first_s
    return {"loop": steps * turns / spent_s, "own": steps * turns / (spent_s - calls_s), "rate": moved}


def main() -> None:
    way, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    turns = turns_a_step()
    movers: dict[int, Mover] = {}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        do, size = question["do"], question["bytes"]
        if size not in movers:
            for old in movers.values():
                old.close()
            movers.clear()
            movers[size] = Mover(way, folder, size)
        mover = movers[size]
        if do == "ready":
            mover.ready(question["op"])
            return {}
        found = run(do, mover, question, turns)
        if do != "loop":
            mover.end()
            if question["op"] == "put":
                mover.clean()
        return found

    serve(answer)
    for mover in movers.values():
        mover.close()


if __name__ == "__main__":
    main()
