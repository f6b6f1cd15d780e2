"""One process of a soak: an engine on a store. Says how it is once a second, as a line of JSON, and ends when its input does.

The first line of its input is what it needs; the second, or the end of the input, tells it to come to rest, check everything and close.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from soak_engine import SoakEngine
from soak_plan import Plan, hash_of
from soak_plants import plant
from soak_store import SoakStore

from kvstore_sdk.errors import KVStoreError

OPEN_S = 40.0
STEP_S = 0.002
RESET_EVERY_S = 15.0
PLANT_EVERY_S = 0.25


def descriptors() -> int:
    """Open ones, but the one that the question itself opens."""
    return len(os.listdir("/proc/self/fd")) - 1


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Worker:
    """From opening to closing."""

    def __init__(self, needs: dict[str, Any]) -> None:
        self._plan = Plan.parse(needs["plan"])
        self._life = needs["life"]
        self._is_planted = needs["planted"]
        self._until_s = needs["until_s"]
        self._before = (descriptors(), threading.active_count())
        self._stand = self._open(needs["places"])
        self._engine = SoakEngine(self._plan, self._stand, hash_of(self._plan.seed, "engine", self._life))
        self._kept: list[Any] = []

    def _open(self, places: dict[str, dict[str, Any]]) -> SoakStore:
        """Whoever restarts while the network fails is refused, and tries again."""
        until_s = time.monotonic() + OPEN_S
        while True:
            try:
                return SoakStore(self._plan, self._life, self._until_s, places)
            except KVStoreError as error:
                if time.monotonic() >= until_s:
                    raise
                logging.warning("the stores cannot be opened, and are tried again: %s", error)
                time.sleep(0.2)

    def run(self) -> None:
        say(ready=True, descriptors=descriptors(), threads=threading.active_count())
        next_s = plant_s = time.monotonic()
        reset_s = next_s + RESET_EVERY_S
        while not select.select([sys.stdin], [], [], 0)[0]:
            now_s = time.monotonic()
            self._engine.step(admit=True)
            if now_s >= next_s:
                self._say_how_it_is()
                next_s = now_s + self._plan.sample_s
            if self._is_planted and now_s >= plant_s:
                plant(self._plan.plant, self._stand, self._engine, self._kept)
                plant_s = now_s + PLANT_EVERY_S
            if now_s >= reset_s:
                self._engine.reset()
                reset_s = time.monotonic() + RESET_EVERY_S
            time.sleep(STEP_S)
        self._end()

    def _say_how_it_is(self) -> None:
        ages_s = [age_s for tier in self._stand.tiers.values() for age_s in tier.job_ages_s]
        # As an engine does, who hands them on.
        for metrics in (self._stand.store.metrics, *(tier.metrics for tier in self._stand.tiers.values())):
            metrics.take()
        isolated: Any = self._stand.backends.get("isolated")
        say(
            counts=self._engine.counts,
            told=self._engine.told,
            fired=self._stand.fired(),
            open_jobs=len(ages_s),
            oldest_job_s=round(max(ages_s, default=0.0), 3),
            stuck=[f"a job is open for {age_s:.1f} s" for age_s in ages_s if age_s > self._plan.stuck_s] + self._engine.stuck(),
            strange=sum(tier.strange for tier in self._stand.tiers.values()),
            requests=self._engine.open_requests,
            oldest_wait_s=round(self._engine.oldest_wait_s(), 3),
            held_slots=self._stand.store.metrics.gauge_value("held_slots"),
            faults=self._stand.store.metrics.total("faults"),
            breaches=sum(tier.metrics.total("breaches") for tier in self._stand.tiers.values()),
            corrupt=sum(tier.metrics.total("corrupt") for tier in self._stand.tiers.values()),
            repairs=sum(tier.metrics.total("repairs") for tier in self._stand.tiers.values()),
            abandoned=sum(tier.metrics.total("abandoned_calls") for tier in self._stand.tiers.values()),
            deaths=getattr(isolated, "deaths", 0),
            restarts=getattr(isolated, "restarts", 0),
        )

    def _end(self) -> None:
        """Come to rest without faults, look at everything, close; say what is left."""
        self._stand.heal()
        rested = self._rest()
        self._say_how_it_is()
        if rested:
            self._engine.check_all()
        checked = rested and not self._engine.open_requests and self._rest()
        self._say_how_it_is()
        at_rest = (descriptors(), threading.active_count())
        why = "" if checked else self._why_not()
        free = self._stand.store.close()
        if free:
            self._stand.region.close()
        self._wait_gone()
        say(
            ended=True,
            rested=checked,
            why=why,
            free=free,
            descriptors_at_rest=at_rest[0],
            threads_at_rest=at_rest[1],
            descriptors_left=descriptors() - self._before[0],
            threads_left=[thread.name for thread in threading.enumerate()][self._before[1] :],
        )

    def _rest(self) -> bool:
        until_s = time.monotonic() + self._plan.rest_s
        while time.monotonic() < until_s:
            self._engine.step(admit=False)
            if not self._engine.open_requests and not self._stand.store.busy and self._stand.is_at_rest():
                return True
            time.sleep(STEP_S)
        return False

    def _why_not(self) -> str:
        groups = self._stand.host.stats().groups.values()
        return (
            f"{self._engine.open_requests} requests, store busy: {self._stand.store.busy}, "
            f"pinned {sum(group.pinned for group in groups)}, filling {sum(group.filling for group in groups)}, "
            f"in quarantine {sum(group.quarantined for group in groups)}, "
            f"held {self._stand.store.metrics.gauge_value('held_slots'):g}; " + "; ".join(self._engine.stuck())
        )

    def _wait_gone(self) -> None:
        """Threads and descriptors that end by themselves are given time."""
        until_s = time.monotonic() + self._plan.rest_s
        while time.monotonic() < until_s and (descriptors(), threading.active_count()) > self._before:
            time.sleep(0.05)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    Worker(json.loads(sys.stdin.readline())).run()


if __name__ == "__main__":
    main()
