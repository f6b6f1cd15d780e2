"""`kvstore bench`: how fast a store is, beside the limits of its machine or another store."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore_sdk.backend import backend_options
from kvstore_sdk.bench.cells import (
    AGAIN,
    AGAINST,
    PLAIN,
    TARGET,
    UNSEALED,
    Budget,
    Cell,
    Latency,
    Side,
    check_room,
    measure,
    measure_latency,
)
from kvstore_sdk.bench.drive import Driver, shape_of
from kvstore_sdk.bench.limits import PlainFiles
from kvstore_sdk.bench.machine import filesystem_of, free_memory_bytes, machine_facts
from kvstore_sdk.bench.opened import Opened
from kvstore_sdk.cli.bench_report import Results, markdown, picture, text
from kvstore_sdk.cli.progress import Progress
from kvstore_sdk.cli.report import Report
from kvstore_sdk.cli.target import MAX_THREADS, Target, add_output, add_target, target_of
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import record_bytes

__all__ = ["add_command"]

COMMAND = "bench"
_DIRECT_IO = "direct_io"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LATENCY_SHARE = 0.4
"""Of what a cell gets."""


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    about = (
        "Stores sealed records under a namespace of its own, reads and verifies them, asks for them and removes them, as an engine's tier "
        "does, in interleaved rounds with plain files and memcpy on the same machine. Reads nothing else, and leaves nothing behind. "
        "Exit code 0: measured; 1: the store failed, or a byte was not what was stored; 2: the command line or a setting is wrong."
    )
    parser: argparse.ArgumentParser = commands.add_parser(COMMAND, help="measure how fast a store is", description=about)
    add_target(parser)
    add_target(parser, AGAINST, "against-", "what to compare with (default with --against-option: TARGET)", optional=True)
    add = parser.add_argument
    add("--sizes", metavar="LIST", type=_sizes, default="128KiB,4MiB", help="payloads of records (default: 128KiB,4MiB)")
    add("--threads", metavar="LIST", type=_threads, default="1,8", help="threads that make calls (default: 1,8)")
    add("--rounds", metavar="N", type=_whole(1, 1000), default=5, help="counted rounds, if the time allows (default: 5)")
    add("--seconds", metavar="N", type=_whole(1, 86400), default=60, help="for all of it, about (default: 60)")
    add("--bytes", metavar="SIZE", type=_size, default="256MiB", help="in the store at one time, about (default: 256MiB)")
    add("--integrity", choices=("both", "on", "off"), default="both", help="seal and verify within the time (default: both)")
    add("--fio", action="store_true", help="let fio take part, if it is installed and the store is a folder with direct I/O")
    add("--leave-records", action="store_true", help="remove nothing, for a store that cannot")
    add("--markdown", metavar="FILE", type=Path, help="write the tables here, too")
    add("--svg", metavar="FILE", type=Path, help="write a plot of the rates here, too")
    add_output(parser, tries=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print tables; what could not be removed is said on standard error."""
    target = target_of(arguments, COMMAND)
    against = _against(arguments, target)
    for file in (arguments.markdown, arguments.svg):
        if file is not None and not os.access(file.absolute().parent, os.W_OK):
            raise ConfigError(COMMAND, str(file), "cannot be written; name a file in a folder that is there")
    if arguments.fio and shutil.which("fio") is None:
        raise ConfigError(COMMAND, "--fio", "is not installed; apt-get install fio")
    bench = _Bench(arguments, target, against)
    try:
        with _tidy_ends(), Progress(arguments) as progress, Report(COMMAND, as_json=arguments.json) as report:
            results = bench.measure(progress)
            progress.clear()
            for cell in results.cells if arguments.json else ():
                report.item("", **dataclasses.asdict(cell))
            report.end(
                text(results), target=str(target), against=against and str(against), namespace=bench.namespace, facts=results.facts,
                notes=results.notes, latencies=[dataclasses.asdict(latency) for latency in results.latencies],
            )  # fmt: skip
    finally:
        for problem in bench.problems:
            print(f"kvstore: bench: {problem}", file=sys.stderr)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(results))
    if arguments.svg is not None:
        arguments.svg.write_text(picture(results))
    return 1 if bench.problems and not arguments.leave_records else 0


@contextlib.contextmanager
def _tidy_ends() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end a run as ^C does. Who ignores them (`nohup`) or has other plans keeps those."""
    taken: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        # They come more than once, and removing records shall not be cut short; ^C still does that.
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        signal.default_int_handler(number, frame)

    # Others have no say in signals.
    if threading.current_thread() is threading.main_thread():
        taken += [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


class _Bench:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, target: Target, against: Target | None) -> None:
        self.namespace = os.urandom(16).hex()
        self.problems: list[str] = []
        self._arguments = arguments
        self._target = target
        self._against = against
        self._notes: set[str] = set()
        self._cells: list[Cell] = []
        self._latencies: list[Latency] = []
        self._facts = machine_facts()

    def measure(self, progress: Progress) -> Results:
        arguments = self._arguments
        modes = _modes(self._target)
        each = list(itertools.product(arguments.sizes, arguments.threads))
        self._shares: float = len(modes) * (len(each) + _LATENCY_SHARE * len(arguments.sizes))
        self._end_s: float = time.monotonic() + arguments.seconds
        skipped = 0
        for place, target in modes:
            try:
                with self._sides(place, target) as (sides, set_bytes, fio):
                    for number, (size, threads) in enumerate(each):
                        # Of each mode at least something.
                        if number and time.monotonic() > self._end_s:
                            skipped += 1
                            continue
                        progress.show(f"bench: {place} {size >> 10} KiB, {threads} threads, {self._left_s:.0f} s left".replace("  ", " "))
                        self._cells += measure(sides, place, size, threads, self._budget(1.0, set_bytes), self._notes, fio)
                    for number, size in enumerate(arguments.sizes):
                        if number and time.monotonic() > self._end_s:
                            continue
                        progress.show(f"bench: {place} {size >> 10} KiB, one at a time, {self._left_s:.0f} s left".replace("  ", " "))
                        timed = [side for side in sides if side.name in (TARGET, AGAINST, PLAIN)]
                        budget = self._budget(_LATENCY_SHARE, set_bytes, len(timed))
                        self._latencies += [found for side in timed for found in measure_latency(side, place, size, budget)]
            except ConfigError as error:
                if place != "direct" or len(modes) == 1:
                    raise
                # Some filesystems have no direct I/O; whatever else is wrong, the next mode says as well.
                self._notes.add(f"nothing was measured direct: {error}")
        if skipped:
            self._notes.add(f"left out, for --seconds was too short: {skipped} of {len(modes) * len(each)} combinations")
        facts = self._facts | {"target": str(self._target)} | ({AGAINST: str(self._against)} if self._against else {})
        return Results(self._cells, self._latencies, facts, sorted(self._notes))

    @contextlib.contextmanager
    def _sides(self, place: str, target: Target) -> Iterator[tuple[list[Side], int, str | None]]:
        """Everything that takes part, open; how long a set may be; and where fio may write, if it takes part."""
        arguments = self._arguments
        sealed, deletes = arguments.integrity != "off", not arguments.leave_records
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(self._opened(TARGET, target))
            sides = [Side(name, opened.driver, sealed, deletes, opened.path if opened.folder else None) for name in (TARGET, AGAIN)]
            if arguments.integrity == "both":
                sides.append(dataclasses.replace(sides[0], name=UNSEALED, sealed=False))
            stores = [opened]
            if self._against is not None:
                modes = dict(_modes(self._against))
                other = stack.enter_context(self._opened(AGAINST, modes.get(place) or next(iter(modes.values()))))
                sides.append(Side(AGAINST, other.driver, sealed, deletes, other.path if other.folder else None))
                stores.append(other)
            self._fit(sides)
            set_bytes = min([arguments.bytes, *(self._room(store, len(sides)) for store in stores)])
            fio = None
            if opened.folder is not None:
                self._facts["filesystem"] = filesystem_of(opened.folder)
                files = stack.enter_context(contextlib.closing(PlainFiles(opened.folder, direct=place == "direct")))
                driver = Driver(files, self.namespace, arguments.timeout)
                stack.callback(driver.close)
                sides.append(Side(PLAIN, driver, sealed=False, path=files.path))
                fio = files.folder if arguments.fio and place == "direct" else None
            yield sides, set_bytes, fio

    def _opened(self, label: str, target: Target) -> Opened:
        return Opened(
            str(target) if label == TARGET else f"{label} {target}",
            lambda: target.open(writes=True),
            folder=_folder(target),
            namespace=self.namespace,
            timeout_s=self._arguments.timeout,
            leave_records=self._arguments.leave_records,
            problems=self.problems,
        )

    def _fit(self, sides: Sequence[Side]) -> None:
        arguments = self._arguments
        for side, size in itertools.product(sides, arguments.sizes):
            most = side.driver.backend.capabilities.max_record_bytes
            if record_bytes(size) > most:
                raise ConfigError(
                    COMMAND, "--sizes", f"{size} bytes make a record of {record_bytes(size)}; {side.name} takes {most} at most"
                )
        # Each store and plain files keep buffers and a payload, and memcpy has two for each thread. Where memory runs out, the kernel
        # kills, and records stay.
        size, threads = max(arguments.sizes), max(arguments.threads)
        stores = {id(side.driver): side.driver.backend for side in sides}.values()
        buffers = [
            max(shape_of(store, *each).least_bytes for each in itertools.product(arguments.sizes, arguments.threads)) for store in stores
        ]
        needed, free = sum(buffers) + max(buffers) + (len(buffers) + 1) * size + 2 * size * threads, free_memory_bytes()
        if free and needed > free // 2:
            raise ConfigError(
                COMMAND, "--sizes", f"take {needed} bytes of memory with so many --threads, and half of what is free is {free // 2}"
            )

    def _room(self, store: Opened, sides: int) -> int:
        """How long a set may be there. Of half of what is free: others may use the store as well."""
        arguments = self._arguments
        shapes = [shape_of(store.driver.backend, *each) for each in itertools.product(arguments.sizes, arguments.threads)]
        sets = 1 if store.deletes else int(self._shares + 1) * (arguments.rounds + 1) * sides
        room = store.room_bytes()
        check_room(room, 2 * sets * max(shape.least_bytes for shape in shapes), str(self._target))
        wanted: int = arguments.bytes // sets
        return wanted if room is None else min(wanted, room // (2 * sets))

    @property
    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def _budget(self, shares: float, set_bytes: int, among: int = 1) -> Budget:
        """What a cell may take: its part of the time that is left, shared by what is left to do."""
        seconds = max(self._left_s * shares / max(self._shares, shares), 0.05)
        self._shares -= shares
        return Budget(seconds / among, self._arguments.rounds, set_bytes)


def _against(arguments: argparse.Namespace, target: Target) -> Target | None:
    if arguments.against is not None:
        return target_of(arguments, COMMAND, AGAINST)
    if arguments.against_location is None and not arguments.against_options:
        return None
    # The same store with other options, or somewhere else.
    arguments.against = target.backend
    other = target_of(arguments, COMMAND, AGAINST)
    return dataclasses.replace(other, location=other.location or target.location, options={**target.options, **other.options})


def _modes(target: Target) -> list[tuple[str, Target]]:
    """How the store is opened, in turn: direct and buffered where it can be told to (`direct_io`) and was not."""
    if _DIRECT_IO not in backend_options(target.backend):
        return [("", target)]
    query = dict(pair.partition("=")[::2] for pair in urlsplit(target.backend).query.split("&")) if target.location is None else {}
    match target.options.get(_DIRECT_IO, query.get(_DIRECT_IO)):
        case None:
            values = {"direct": "always", "buffered": "never"}
            return [(place, dataclasses.replace(target, options={**target.options, _DIRECT_IO: value})) for place, value in values.items()]
        case "always":
            return [("direct", target)]
        case "never":
            return [("buffered", target)]
        case _:
            return [("", target)]


def _folder(target: Target) -> Path | None:
    """Where its files are, if it is a folder of this machine: what it stores them in it has an option for (`direct_io`)."""
    if _DIRECT_IO not in backend_options(target.backend):
        return None
    if target.location is not None:
        path = target.location
    else:
        parts = urlsplit(target.backend)
        path = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
    return Path(path) if path.startswith("/") else None


def _size(text: str) -> int:
    number, unit = (text[:-3], _UNITS[text[-3:]]) if text[-3:] in _UNITS else (text, 1)
    if not number.isascii() or not number.isdigit() or not 4096 <= int(number) * unit <= 1 << 40 or int(number) * unit % 4096:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 128KiB or 4MiB: whole pages of 4,096 bytes")
    return int(number) * unit


def _sizes(text: str) -> list[int]:
    return list(dict.fromkeys(_size(part) for part in text.split(",")))


def _threads(text: str) -> list[int]:
    return list(dict.fromkeys(_whole(1, MAX_THREADS)(part) for part in text.split(",")))


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
        return int(text)

    return parse
