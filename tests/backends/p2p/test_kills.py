"""`kill -9` of either side at any moment, and back at the same address: a survivor loads what is there, and nothing of it grows."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from p2p_nodes import LATE_S, NodeProcess, loads_all, names, wait_for

SIZE = 256 << 10
GROWTH_BYTES = 48 << 20
MOST = (600 << 20, 100, 40)
"""Memory, descriptors and threads of a node with its child: about twice what they are."""

Start = Callable[..., NodeProcess]


class Pair:
    """Two nodes that serve and ask each other, at addresses that stay."""

    def __init__(self, start_node: Start, path: str) -> None:
        self._start = start_node
        self._path = path
        # Bound and never listening: nobody else is given the ports while their nodes are down, and who connects is refused.
        self._kept = [socket.socket() for _ in self.nodes_of_both()]
        for kept in self._kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
        self._stored = {"a": names("a", 24), "b": names("b", 24)}
        ports = [kept.getsockname()[1] for kept in self._kept]
        self._addresses = {side: f"127.0.0.1:{port}" for side, port in zip(self.nodes_of_both(), ports, strict=True)}
        self.nodes: dict[str, NodeProcess] = {}
        self._uses: dict[str, tuple[int, int, int]] = {}
        for side in self.nodes_of_both():
            self.open(side)

    def close(self) -> None:
        for kept in self._kept:
            kept.close()

    @staticmethod
    def nodes_of_both() -> tuple[str, str]:
        return "a", "b"

    @staticmethod
    def other(side: str) -> str:
        return "b" if side == "a" else "a"

    def open(self, side: str) -> None:
        """A new life, at the address of the one before."""
        node = self._start()
        options = {"data": self._path, "serve_bytes": 32 << 20, "lease_s": 2.0, "slots": 64, "slot_bytes": SIZE}
        if self._path == "nixl":
            options["ucx_tls"] = "tcp"
        options["peers"] = self._addresses[self.other(side)]
        node.open(f"p2p://{self._addresses[side]}", **options)
        assert node.ask("put", names=self._stored[side], size=SIZE) == ["STORED"] * 24
        self.nodes[side] = node
        self._uses.pop(side, None)

    def reopen(self, side: str) -> None:
        self.nodes[side].kill()
        self.nodes[side].end()
        self.open(side)

    def begin_traffic(self) -> dict[str, object]:
        wanted = {side: self._stored[self.other(side)] for side in self.nodes}
        return {side: node.begin("traffic", names=wanted[side], size=SIZE, batch=6, timeout_s=2.0) for side, node in self.nodes.items()}

    def check_loads(self, side: str) -> None:
        """It loads all that the other has."""
        wait_for(lambda: loads_all(self.nodes[side], self._stored[self.other(side)], SIZE), 40.0)

    def check_use(self, side: str) -> None:
        """It uses no more than when it first loaded from the other."""
        node = self.nodes[side]
        assert node.ask("settle", timeout_s=20.0) == 0
        wait_for(lambda: node.lent() == 0)
        first = self._uses.setdefault(side, node.use(node.pid))
        wait_for(lambda: node.use(node.pid)[1] <= first[1] + 4 and node.use(node.pid)[2] <= first[2] + 4)
        assert node.use(node.pid)[0] <= first[0] + GROWTH_BYTES
        # Its child may just be starting, at any time, so what it used first says nothing.
        wait_for(lambda: all(used <= most for used, most in zip(node.use(), MOST, strict=True)))


def check_kills(start_node: Start, path: str, kills: int) -> None:
    draw = random.Random(f"{path} {kills}")
    third = kills // 3
    # Also long rows of one, in which the other has to live on.
    victims = [draw.choice("ab") for _ in range(kills - 2 * third)] + ["a"] * third + ["b"] * third
    with closing(Pair(start_node, path)) as pair:
        for side in "ab":
            pair.check_loads(side)
        for victim in victims:
            going = pair.begin_traffic()
            time.sleep(draw.uniform(0.02, 0.3))
            survivor = pair.other(victim)
            pair.nodes[victim].kill()
            time.sleep(draw.uniform(0.0, 0.2))
            pair.reopen(victim)
            pair.nodes[survivor].ask("stop")
            done = going[survivor].result(60.0)
            assert done["counts"]["wrong"] == 0
            assert done["longest_s"] < 2.0 + LATE_S
            for side in (survivor, victim):
                pair.check_loads(side)
            pair.check_use(survivor)


@pytest.mark.parametrize(("path", "kills"), [("zmq", 30), ("nixl", 3), pytest.param("nixl", 30, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_kills_at_any_moment_cost_the_loads_of_that_moment(start_node: Start, path: str, kills: int) -> None:
    """LIV-17"""
    check_kills(start_node, path, kills)
