"""Hit rates of the policies against what is published about them, and against the table of docs/eviction.md."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from policy_models import benchmark, traces

from kvstore_sdk.host.policies import open_policy

PAGE = Path(__file__).parents[2] / "docs" / "eviction.md"
TABLE = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [^|]+ \| [\d,]+ \| [\d.]+ \|", line)]


def rates(capacity: int, trace: traces.Trace) -> tuple[float, float, float]:
    """Of LRU, of ARC, and the best there can be."""
    lru, arc = (traces.hit_rate(open_policy(name, capacity), capacity, trace) for name in ("lru", "arc"))
    best = traces.best_hit_rate(capacity, trace)
    assert max(lru, arc) <= best
    return lru, arc, best


def che(capacity: int, weights: list[float]) -> float:
    """Hit rate of LRU for independent requests: a key is there if it was asked for within a time in which `capacity` keys were.

    Che, Tung and Wang, "Hierarchical Web caching systems", IEEE JSAC 20 (2002); within a per cent for Zipf laws.
    """
    low, high = 0.0, 1e9
    while high - low > 1e-6 * high:
        time = (low + high) / 2
        there = sum(-math.expm1(-weight * time) for weight in weights)
        low, high = (time, high) if there < capacity else (low, time)
    return sum(weight * -math.expm1(-weight * high) for weight in weights)


@pytest.mark.parametrize(("exponent", "capacity"), [(1.0, 50), (1.0, 300), (0.7, 200)])
def test_lru_hits_on_zipf_as_often_as_theory_says(exponent: float, capacity: int) -> None:
    warm, trace = 3000, traces.zipf(33_000, 2000, exponent, seed=11)
    found = [hits for hits, _ in traces.replay(open_policy("lru", capacity), capacity, trace)][warm:]
    assert sum(found) / len(found) == pytest.approx(che(capacity, traces.zipf_weights(2000, exponent)), abs=0.012)


@pytest.mark.parametrize(("exponent", "capacity"), [(1.0, 20), (1.0, 200), (0.7, 200), (0.7, 600)])
def test_arc_hits_on_zipf_more_often_than_lru(exponent: float, capacity: int) -> None:
    lru, arc, _ = rates(capacity, traces.zipf(20_000, 2000, exponent, seed=12))
    assert arc > lru + 0.01


@pytest.mark.parametrize("capacity", [50, 99])
def test_a_loop_that_does_not_fit_defeats_both(capacity: int) -> None:
    """The best keeps as many keys of the loop as there is room for, and lets no other in."""
    lru, arc, best = rates(capacity, traces.loop(10_000, 100))
    assert (lru, arc) == (0, 0)
    assert best == pytest.approx(capacity / 100, abs=0.01)


def test_a_loop_that_fits_misses_each_key_once() -> None:
    assert rates(100, traces.loop(10_000, 100)) == (0.99, 0.99, 0.99)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_scan_drives_out_what_lru_keeps_and_not_what_arc_keeps(name: str) -> None:
    """Of the hot set, right after a scan of ten times the room."""
    room = 100
    hot = [(traces.key("hot", number),) for number in range(80)]
    scan = [(traces.key("scan", number),) for number in range(10 * room)]
    trace = 3 * hot + scan + hot
    after = [hits for hits, _ in traces.replay(open_policy(name, room), room, trace)][-len(hot) :]
    assert sum(after) == {"lru": 0, "arc": len(hot)}[name]


def test_arc_is_near_the_best_where_scans_and_a_hot_set_are_mixed() -> None:
    lru, arc, best = rates(200, traces.hot_and_scans(20_000, 150, 500, seed=13))
    assert arc > best - 0.01
    assert lru < best - 0.1


def test_arc_pays_where_only_the_last_use_counts() -> None:
    """The price of what it knows about frequency, bounded: it adapts, and loses a few per cent."""
    lru, arc, _ = rates(300, traces.drifting(20_000, 1000, 0.1, seed=14))
    assert lru - 0.08 < arc < lru


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_one_shot_prompts_cost_chats_less_under_arc(share: float) -> None:
    lru, arc, _ = rates(500, traces.sessions(800, 20, share, seed=15))
    assert arc > lru + 0.02


def test_the_best_is_what_a_search_finds() -> None:
    """On traces short enough to try every choice."""

    def search(room: int, keys: list[bytes], there: frozenset[bytes]) -> int:
        if not keys:
            return 0
        key, *rest = keys
        if key in there:
            return 1 + search(room, rest, there)
        choices = [there, there | {key}] if len(there) < room else [there, *((there - {old}) | {key} for old in there)]
        return max(search(room, rest, choice) for choice in choices)

    for seed in range(8):
        trace = traces.zipf(11, 5, 0.5, seed)
        keys = [key for (key,) in trace]
        assert traces.best_hit_rate(2, trace) == search(2, keys, frozenset()) / len(keys)


# --- docs/eviction.md ------------------------------------------------------------------------------------------------------------------


def test_the_page_has_every_workload_and_size_of_the_benchmark() -> None:
    wanted = [(name, f"{size:,}") for name, (_, sizes) in benchmark.WORKLOADS.items() for size in sizes]
    assert [tuple(line.strip("| ").split(" | ")[:2]) for line in TABLE] == wanted


@pytest.mark.parametrize("workload", ["loop over 1,000 keys", "500 hot keys and scans of 2,000", "the same, 50 % one-shot prompts"])
def test_the_table_of_the_page_is_what_the_benchmark_finds(workload: str) -> None:
    assert benchmark.row(workload, 1000 if "loop" not in workload else 999) in TABLE


def test_the_policy_of_the_page_is_opened_and_does_what_the_page_says(tmp_path: Path) -> None:
    """In a process of its own, as the page has it: the module in the current folder, named to the benchmark."""
    [source] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_policy.py").write_text(source)
    root = PAGE.parents[1]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}, {str(root / 'benchmarks')!r}]\n"
        "import eviction_traces as traces\n"
        "from kvstore_sdk.host.policies import open_policy\n"
        "trace = traces.hot_and_scans(6000, 50, 200, seed=1)\n"
        "for name in ('lru', 'my_policy:open_proven'):\n"
        "    print(traces.hit_rate(open_policy(name, 60), 60, trace))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    lru, proven = map(float, done.stdout.split())
    assert lru < 0.4
    assert proven > 0.45
