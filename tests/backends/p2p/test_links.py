"""Two nodes on hosts of their own: whatever the network between them does, every load ends by its deadline, as data or as a miss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from p2p_network import Link, Relay, need
from p2p_nodes import LATE_S, NodeProcess, loads_all, names, wait_for

pytestmark = pytest.mark.timeout(400)

SIZE = 1 << 20
WANTED = names("a", 32)
HITS_RESUME_S = 40.0

Start = Callable[..., NodeProcess]


@pytest.fixture(params=["zmq", "nixl"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_pair(start_node: Start, link: Link, path: str, at: str, device: str) -> tuple[NodeProcess, NodeProcess]:
    """An owner on the right, with records, and an asker on the left."""
    owner, asker = start_node(link.right), start_node(link.left)
    # TCP alone: UCX copies from process to process of one machine, also across namespaces.
    common = {"data": path, "insecure": True, "data_path_trusted": True, "ucx_tls": "tcp", "ucx_devices": device, "lease_s": 2.0}
    owner.open(f"p2p://{at}:0", serve_bytes=96 << 20, slots=64, **common)
    assert owner.ask("put", names=WANTED, size=SIZE) == ["STORED"] * len(WANTED)
    asker.open(f"p2p://{link.left.address}:0", peers=owner.address, slots=96, **common)
    wait_for(lambda: loads_all(asker, WANTED, SIZE))
    return owner, asker


@pytest.fixture
def pair(start_node: Start, link: Link, path: str) -> tuple[NodeProcess, NodeProcess]:
    return open_pair(start_node, link, path, link.right.address, "veth0")


@pytest.fixture
def relayed(start_node: Start, link: Link, path: str) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """A pair whose packets take 10 ms each way; one of a hundred never arrives."""
    need("relay")
    with closing(Relay(link, delay_s=0.01, loss=0.01)) as relay:
        yield open_pair(start_node, link, path, relay.right, relay.device)


def check_at_rest(owner: NodeProcess, asker: NodeProcess) -> None:
    """All loads come again; then nothing is in doubt and nothing lent."""
    wait_for(lambda: loads_all(asker, WANTED, SIZE), HITS_RESUME_S)
    assert asker.ask("settle", timeout_s=20.0) == 0
    wait_for(lambda: owner.lent() == 0)


def test_a_link_that_is_cut_in_the_middle_of_a_load_costs_that_load(pair: tuple[NodeProcess, NodeProcess], link: Link) -> None:
    """At either end, or where nobody notices. When it is back so are the hits, and nothing has grown."""
    need("bandwidth")
    owner, asker = pair
    cuts: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "left": (lambda: link.cut(link.left), lambda: link.mend(link.left)),
        "right": (lambda: link.cut(link.right), lambda: link.mend(link.right)),
        "swallowed": (link.swallow, link.spit_out),
    }
    before = {node: node.use() for node in pair}
    for cut, mend in cuts.values():
        # A load would take 9 s, and the cut comes after one.
        link.narrow(30)
        seen = link.left.received_bytes()
        going = asker.begin("get", names=WANTED, size=SIZE, timeout_s=15.0)
        wait_for(lambda seen=seen: link.left.received_bytes() > seen + 4 * SIZE)
        cut()
        done = going.result(60.0)
        assert done["wrong"] == 0
        assert done["took_s"] < 15.0 + LATE_S
        assert set(done["statuses"]) != {"FOUND"}
        asked = asker.ask("exists", names=WANTED, timeout_s=2.0)
        assert asked["took_s"] < 2.0 + LATE_S
        assert True not in asked["answers"]
        mend()
        link.narrow(100)
        check_at_rest(owner, asker)
    wait_for(lambda: all(node.use()[1] <= before[node][1] + 3 and node.use()[2] <= before[node][2] + 3 for node in pair))
    assert all(node.use()[0] < before[node][0] + (64 << 20) for node in pair)


def check_traffic(asker: NodeProcess, seconds: float, batch: int = 4) -> None:
    loaded = asker.ask("stats")["asked_loaded"]
    going = asker.begin("traffic", names=WANTED, size=SIZE, batch=batch, timeout_s=4.0)
    time.sleep(seconds)
    wait_for(lambda: asker.ask("stats")["asked_loaded"] > loaded)
    asker.ask("stop")
    done = going.result(60.0)
    assert done["counts"].get("FOUND", 0) > 0, done
    assert done["counts"]["wrong"] == 0
    assert done["longest_s"] < 4.0 + LATE_S


def test_a_lossy_link_gives_what_it_gives_and_no_wrong_byte(pair: tuple[NodeProcess, NodeProcess], link: Link) -> None:
    need("loss")
    link.lose(5)
    check_traffic(pair[1], 4.0)
    link.lose(0)
    check_at_rest(*pair)


def test_a_narrow_link_gives_by_the_deadline_what_goes_through(pair: tuple[NodeProcess, NodeProcess], link: Link) -> None:
    need("bandwidth")
    link.narrow(100)
    # 32 MiB take 2.7 s.
    done = pair[1].ask("get", names=WANTED, size=SIZE, timeout_s=1.0)
    assert (done["wrong"], done["took_s"] < 1.0 + LATE_S) == (0, True)
    assert set(done["statuses"]) != {"FOUND"}
    check_at_rest(*pair)


def test_a_slow_link_that_loses_some_gives_what_it_gives(relayed: tuple[NodeProcess, NodeProcess]) -> None:
    check_traffic(relayed[1], 4.0)
    check_at_rest(*relayed)
