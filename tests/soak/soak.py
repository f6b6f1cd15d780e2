"""A TieredStore over peers, a folder, an object store and an isolated folder, under faults, for as long as is asked.

    python tests/soak/soak.py --seconds 900 --out build/soak

Engines in processes of their own share the stores, and load from each other's host memory. Faults come by a schedule that is drawn from the
seed: in the backends, in the network of the object store, and as `kill -9` of engines and of isolated children. Every byte of every hit is
compared with what its key must hold. Once a second the kernel is asked for memory, descriptors and threads. In the end all come to rest,
look at every chunk, and close.

Exit code 0: no wrong byte, nothing stuck, nothing left, and all flat. 1: not so; the findings say what. 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from soak_judge import Finding, Run, Sample, judge
from soak_network import Network
from soak_papers import write_papers
from soak_plan import Plan, hash_of, schedule_of
from soak_plants import PLANTS
from soak_plot import Band
from soak_process import WorkerProcess
from soak_watch import children_of, is_alive, look_at

TICK_S = 0.25
GONE_S = 20.0
"""Longest that a child may outlive a worker that was killed."""

KILL_EVERY_S = (4.0, 12.0)
CHILD_KILL_EVERY_S = (15.0, 45.0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def free_addresses(count: int) -> list[str]:
    """Of loopback. Workers listen there one after another, so they are chosen before there is one."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


class Soak:
    """One run: `run` does everything."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self._plan = plan
        self._stack = stack
        self._random = random.Random(hash_of(plan.seed, "kills"))
        self._run = Run(plan)
        self._workers: list[WorkerProcess] = []
        self._network: Network | None = None
        self._lives = 0
        self._children: set[int] = set()
        self._kills_s: list[float] = []
        self._until_s = 0.0
        self._addresses: list[str] = []

    def run(self) -> list[Finding]:
        plan, run = self._plan, self._run
        for tier in plan.tiers:
            os.makedirs(os.path.dirname(plan.folder(tier)), exist_ok=True)
        if "s3" in plan.tiers:
            self._network = Network(plan)
            self._stack.callback(self._network.stop)
            run.network_episodes = len(self._network.episodes)
        # Faults go on while workers open, and somewhat shorter than the traffic.
        self._until_s = time.monotonic() + plan.seconds + 2.0
        self._addresses = free_addresses(plan.workers) if "p2p" in plan.tiers else []
        self._workers = [self._start(place) for place in range(plan.workers)]
        for worker in self._workers:
            if not worker.wait_ready():
                raise SystemExit(f"soak: a worker did not start; see {plan.out}/worker-{worker.life}.log")
        run.ready = self._workers[0].ready or {}
        say(f"{plan.workers} workers began, for {plan.seconds:g} s, with seed {plan.seed}")
        began_s = time.monotonic()
        self._until_s = began_s + plan.seconds
        self._traffic(began_s)
        self._end()
        findings = judge(run)
        self._say(findings, write_papers(run, findings, self._lanes(), self._kills_s))
        return findings

    def _start(self, place: int) -> WorkerProcess:
        """A worker that takes this place among the others, and its address."""
        life, self._lives = self._lives, self._lives + 1
        places: dict[str, dict[str, Any]] = {}
        if self._network is not None:
            places["s3"] = self._network.s3
        if self._addresses:
            others = [address for number, address in enumerate(self._addresses) if number != place]
            places["p2p"] = {"location": self._addresses[place], "peers": ",".join(others)}
        worker = WorkerProcess(self._plan, life, self._until_s, places, planted=life == 0)
        self._stack.callback(worker.kill)
        return worker

    def _traffic(self, began_s: float) -> None:
        plan = self._plan
        next_sample_s, next_progress_s = plan.sample_s, 30.0
        kill_s = self._random.uniform(*self._scaled(KILL_EVERY_S))
        child_kill_s = self._random.uniform(*self._scaled(CHILD_KILL_EVERY_S))
        if self._network is not None:
            self._network.begin()
        while (at_s := time.monotonic() - began_s) < plan.seconds:
            if self._network is not None:
                self._network.go_on()
            if at_s >= next_sample_s:
                self._sample(at_s)
                next_sample_s = max(next_sample_s + plan.sample_s, at_s + plan.sample_s / 2)
            if at_s >= kill_s and plan.workers > 1:
                self._kill_worker(at_s)
                kill_s = at_s + self._random.uniform(*self._scaled(KILL_EVERY_S))
            if at_s >= child_kill_s and "isolated" in plan.tiers:
                self._kill_child()
                child_kill_s = at_s + self._random.uniform(*self._scaled(CHILD_KILL_EVERY_S))
            if not self._first_runs(at_s):
                return
            if at_s >= next_progress_s:
                self._tell_progress(at_s)
                next_progress_s += 30.0
            time.sleep(min(TICK_S, plan.sample_s / 2))

    def _scaled(self, every_s: tuple[float, float]) -> tuple[float, float]:
        """Often enough that a run of seconds has some too."""
        part = min(1.0, self._plan.seconds / 60.0)
        return every_s[0] * part, every_s[1] * part

    def _sample(self, at_s: float) -> None:
        worker, run = self._workers[0], self._run
        look = look_at(worker.pid)
        if look is None:
            return
        sample = Sample(
            round(at_s, 2),
            look.memory_bytes,
            look.anonymous_bytes,
            look.shared_bytes,
            look.descriptors,
            look.threads,
            kills=run.kills,
            wrong=sum(report.get("counts", {}).get("wrong", 0) for report in self._reports()),
            stuck=sum(len(report.get("stuck", ())) for report in self._reports()),
        )
        for child in children_of(worker.pid):
            self._children.add(child)
            if (seen := look_at(child)) is not None:
                sample.children += 1
                sample.child_memory_bytes += seen.anonymous_bytes
                sample.child_descriptors += seen.descriptors
        report = worker.report
        counts = report.get("counts", {})
        sample.hits = {source: counts.get(f"hits {source}", 0) for source in ("host", *self._plan.tiers)}
        sample.verified_bytes = counts.get("verified_bytes", 0)
        for name in ("open_jobs", "oldest_job_s", "oldest_wait_s", "held_slots", "corrupt", "abandoned"):
            setattr(sample, name, report.get(name, 0))
        run.samples.append(sample)

    def _reports(self) -> list[dict[str, Any]]:
        return [*self._run.reports, *(worker.report for worker in self._workers)]

    def _kill_worker(self, at_s: float) -> None:
        """Any but the first. Another one takes its place."""
        place = self._random.randrange(1, self._plan.workers)
        worker = self._workers[place]
        if worker.ready is None or not worker.is_running:
            return
        self._children.update(worker.kill())
        self._run.reports.append(worker.report)
        self._run.kills += 1
        self._kills_s.append(at_s)
        self._workers[place] = self._start(place)

    def _kill_child(self) -> None:
        children = [child for worker in self._workers if worker.is_running for child in children_of(worker.pid)]
        self._children.update(children)
        if children:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(children), signal.SIGKILL)
                self._run.child_kills += 1

    def _first_runs(self, at_s: float) -> bool:
        """Find workers that ended though nobody killed them; others take their places, but for the first. Returns whether that one runs."""
        for place, worker in enumerate(self._workers):
            if not worker.is_running:
                self._run.crashes.append(f"worker {worker.life} with {worker.code} after {at_s:.0f} s; see worker-{worker.life}.log")
                if place == 0:
                    return False
                self._run.reports.append(worker.report)
                self._workers[place] = self._start(place)
        return True

    def _end(self) -> None:
        run = self._run
        if self._network is not None:
            self._network.calm()
        for worker in self._workers:
            # One that just began is to come to rest, too.
            worker.wait_ready()
            self._children.update(children_of(worker.pid) if worker.is_running else ())
            worker.finish()
        for worker in self._workers:
            if worker.wait_ended():
                assert worker.end is not None
                run.ends.append(worker.end)
            else:
                run.crashes.append(f"worker {worker.life} did not close, {worker.code}; see worker-{worker.life}.log")
            run.reports.append(worker.report)
        until_s = time.monotonic() + GONE_S
        while time.monotonic() < until_s and any(map(is_alive, self._children)):
            time.sleep(0.1)
        run.left_behind = [f"child {child}" for child in self._children if is_alive(child)]
        for tier in ("p2p", "fs", "s3"):
            if tier in self._plan.tiers:
                run.scheduled.update(episode.kind for episode in schedule_of(self._plan, tier, 0, self._plan.seconds).episodes)

    def _lanes(self) -> dict[str, list[Band]]:
        lanes = {
            tier: [Band(one.begins_s, one.ends_s, one.kind) for one in schedule_of(self._plan, tier, 0, self._plan.seconds).episodes]
            for tier in self._plan.tiers
        }
        if self._network is not None:
            lanes["network"] = [Band(one.begins_s, one.ends_s, one.kind) for one in self._network.episodes]
        return lanes

    def _tell_progress(self, at_s: float) -> None:
        counts: Counter[str] = Counter()
        for report in self._reports():
            counts.update(report.get("counts", {}))
        last = self._run.samples[-1] if self._run.samples else Sample(0.0)
        say(
            f"{at_s:5.0f} s: {counts['verified_bytes'] / 1e6:.0f} MB looked at, {counts['wrong']} wrong, {last.stuck} stuck, "
            f"{last.memory_bytes / 2**20:.0f} MiB, {last.descriptors} descriptors, {last.threads} threads, {self._run.kills} kills"
        )

    def _say(self, findings: list[Finding], papers: list[Path]) -> None:
        for finding in findings:
            say(f"{'ok ' if finding.good else 'BAD'} {finding.what}: {finding.text}")
        say("see " + ", ".join(map(str, papers)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=900.0, help="of traffic under faults (default: 900)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: 1)")
    parser.add_argument("--out", default="build/soak", help="folder for what it says; emptied first (default: build/soak)")
    parser.add_argument("--tiers", default="p2p,isolated,fs,s3", help="which, separated by commas (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the stores (default: 2)")
    parser.add_argument("--stuck-s", type=float, default=20.0, help="what takes longer is stuck (default: 20)")
    parser.add_argument("--rest-s", type=float, default=30.0, help="how long coming to rest may take (default: 30)")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="put a mistake in, which has to be found")
    given = parser.parse_args(arguments)
    out = Path(given.out).absolute()
    if out.exists() and not (out / ".soak").exists() and any(out.iterdir()):
        parser.error(f"--out: {out} holds other things; choose a folder that is new or of a soak before")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / ".soak").touch()
    try:
        plan = Plan(
            seconds=given.seconds,
            seed=given.seed,
            out=str(out),
            tiers=tuple(given.tiers.split(",")),
            workers=given.workers,
            stuck_s=given.stuck_s,
            rest_s=given.rest_s,
            plant=given.plant,
        )
    except ValueError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        findings = Soak(plan, stack).run()
    return 0 if all(finding.good for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
