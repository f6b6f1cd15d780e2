"""An object store behind a network that fails by the plan."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "backends" / "s3"))

from fault_proxy import FaultProxy
from proxy_faults import (
    Bandwidth,
    Delay,
    Fault,
    Kind,
    LongBody,
    NeverAnswers,
    ResetAfterBody,
    ResetBefore,
    ResetInsideBody,
    ResetInsideRequest,
    ShortBody,
    Status,
    WrongBytes,
    clock_skew,
    slow_down,
)
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from soak_plan import Plan, hash_of

from kvstore_sdk.testing import Episode, draw_episodes

__all__ = ["Network"]

KINDS: dict[str, Callable[[random.Random], Kind]] = {
    "refusals": lambda draw: draw.choice((Status(500), Status(503), slow_down(0.05), clock_skew())),
    "delays": lambda draw: Delay(draw.uniform(0.05, 1.5)),
    "narrow": lambda draw: Bandwidth(draw.uniform(1e5, 1e6)),
    "resets": lambda draw: draw.choice((ResetBefore(), ResetInsideRequest(), ResetInsideBody(100))),
    "lost": lambda draw: ResetAfterBody(),
    "short bodies": lambda draw: ShortBody(draw.choice((1, 4096)), told=draw.random() < 0.5),
    "long bodies": lambda draw: LongBody(draw.choice((1, 4096))),
    "spoilt bodies": lambda draw: WrongBytes(draw.choice((1, 16))),
    "silence": lambda draw: NeverAnswers(done=draw.random() < 0.5),
}


class Network:
    """Starts the server and the proxy; `stop` ends both.

    Attributes:
        episodes: What goes wrong when, after `begin`.
        s3: Options of `open_s3`, for a bucket of its own.
    """

    def __init__(self, plan: Plan) -> None:
        self.episodes: tuple[Episode, ...] = draw_episodes(
            plan.seconds, KINDS, seed=hash_of(plan.seed, "network"), episode_s=(0.5, 2.5), calm=0.6
        )
        self._random = random.Random(hash_of(plan.seed, "packets"))
        self._coming = list(self.episodes)
        self._now: Episode | None = None
        self._began_s = 0.0
        self._server = S3Server()
        self._proxy = FaultProxy(self._server.endpoint, seed=plan.seed)
        self.s3: dict[str, Any] = {
            "location": f"{self._server.make_bucket('soak')}/kv",
            "endpoint": self._proxy.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    def begin(self) -> None:
        """The time of the episodes counts from now."""
        self._began_s = time.monotonic()

    def go_on(self) -> None:
        """To be called several times a second: begins and ends episodes. In one, about one request in three is hit."""
        at_s = time.monotonic() - self._began_s
        if self._now is not None and at_s >= self._now.ends_s:
            # Forgets the requests too.
            self._proxy.reset()
            self._now = None
        if self._now is None and self._coming and at_s >= self._coming[0].begins_s:
            self._now = self._coming.pop(0)
        if self._now is not None:
            self._proxy.script(Fault(KINDS[self._now.kind](self._random), times=self._random.randint(1, 6)))

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self._coming, self._now = [], None
        self._proxy.reset()

    def stop(self) -> None:
        try:
            self._proxy.stop()
        finally:
            self._server.stop()
