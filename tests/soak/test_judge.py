"""The judge of a soak: it finds what is wrong, and takes noise for noise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from soak_judge import FLAT, Run, Sample, judge, slope_of
from soak_plan import Plan, schedule_of

SECONDS = 120


def good_run() -> Run:
    """A soak in which all went as it should."""
    plan = Plan(seconds=SECONDS, seed=1, out="nowhere")
    draw = random.Random(5)
    run = Run(plan, kills=3, ready={"descriptors": 20, "threads": 10})
    for second in range(1, SECONDS + 1):
        run.samples.append(
            Sample(
                float(second),
                memory_bytes=(60 << 20) + draw.randrange(1 << 20),
                children=1,
                child_memory_bytes=(30 << 20) + draw.randrange(1 << 20),
                descriptors=draw.randint(20, 40),
                threads=draw.randint(10, 30),
            )
        )
    run.scheduled = Counter(dict.fromkeys(("errors", "hangs"), 3))
    counts = {"hits host": 5, "hits fs": 4, "hits s3": 3, "hits isolated": 2, "hits p2p": 1, "verified_bytes": 10**6}
    run.reports = [{"counts": counts, "fired": {"errors": 9, "hangs": 1}}]
    end = {"rested": True, "why": "", "free": True, "descriptors_left": 0, "threads_left": []}
    end |= {"descriptors_at_rest": 25, "threads_at_rest": 10}
    run.ends = [dict(end), dict(end)]
    return run


def bad(run: Run) -> list[str]:
    return [finding.what for finding in judge(run) if not finding.good]


def grow(name: str, by: float) -> Callable[[Run], None]:
    """Let a value grow evenly, by so much over the time that is judged."""

    def change(run: Run) -> None:
        for sample in run.samples:
            more = by * sample.t_s / (SECONDS * (1 - run.plan.warm_up))
            setattr(sample, name, getattr(sample, name) + round(more))

    return change


def report(**facts: Any) -> Callable[[Run], None]:
    return lambda run: run.reports.append(facts)


def end(**facts: Any) -> Callable[[Run], None]:
    return lambda run: run.ends[0].update(facts)


def test_a_good_run_is_good() -> None:
    assert bad(good_run()) == []


MISTAKES: list[tuple[str, Callable[[Run], None]]] = [
    ("wrong bytes", report(counts={"wrong": 1}, told=["request-1: at byte 7"])),
    ("stuck jobs and requests", report(stuck=["a job is open for 30 s"])),
    ("stuck jobs and requests", lambda run: setattr(run.samples[3], "stuck", 1)),
    ("jobs reported twice, or never submitted", report(strange=1)),
    ("errors of the SDK itself", report(faults=1)),
    ("workers that ended by themselves", lambda run: run.crashes.append("worker 1")),
    ("growth of memory", grow("memory_bytes", 2 * FLAT["memory_bytes"])),
    ("growth of child memory", grow("child_memory_bytes", 2 * FLAT["child_memory_bytes"])),
    ("growth of descriptors", grow("descriptors", 30)),
    ("growth of threads", grow("threads", 20)),
    ("workers that came to rest and closed", end(rested=False, why="1 requests")),
    ("workers that came to rest and closed", lambda run: run.ends.pop()),
    ("memory that stays touched", end(free=False)),
    ("descriptors and threads left after close", end(descriptors_left=1)),
    ("descriptors and threads left after close", end(threads_left=["fs-io-1"])),
    ("processes left behind", lambda run: run.left_behind.append("child 7")),
    ("more than before, once it is at rest", end(threads_at_rest=30)),
    ("more than before, once it is at rest", end(descriptors_at_rest=99)),
    ("hits, looked at byte by byte", lambda run: run.reports[0]["counts"].pop("hits s3")),
    ("bytes looked at", lambda run: run.reports[0]["counts"].pop("verified_bytes")),
    ("kinds of faults that hit", lambda run: run.reports[0]["fired"].pop("hangs")),
    ("workers that were killed", lambda run: setattr(run, "kills", 0)),
    ("seconds that were watched", lambda run: run.samples.__delitem__(slice(60, None))),
]


@pytest.mark.parametrize(("what", "mistake"), MISTAKES, ids=[f"{number} {what}" for number, (what, _) in enumerate(MISTAKES)])
def test_each_mistake_is_found_and_nothing_else(what: str, mistake: Callable[[Run], None]) -> None:
    run = good_run()
    mistake(run)
    assert bad(run) == [what]


def test_everything_that_is_judged_is_found_wrong_by_one_of_these_tests() -> None:
    assert {finding.what for finding in judge(good_run())} == {what for what, _ in MISTAKES}


@pytest.mark.parametrize("name", FLAT)
def test_growth_below_what_is_noise_is_flat(name: str) -> None:
    run = good_run()
    grow(name, FLAT[name] * 0.5)(run)
    assert bad(run) == []


def test_what_grows_while_it_warms_up_is_not_judged() -> None:
    run = good_run()
    for sample in run.samples:
        if sample.t_s < SECONDS * run.plan.warm_up:
            sample.memory_bytes = round(sample.memory_bytes * sample.t_s / SECONDS)
    assert bad(run) == []


def test_the_slope_of_a_line_is_its_growth() -> None:
    slope = slope_of(range(100), [3.0 * second for second in range(100)])
    assert slope.growth == pytest.approx(297.0)
    assert slope.low == pytest.approx(297.0)
    assert slope.high == pytest.approx(297.0)


def test_the_interval_of_noise_has_nothing_in_it_and_that_of_a_leak_has_not() -> None:
    draw = random.Random(3)
    noise = [draw.gauss(100.0, 5.0) for _ in range(100)]
    flat = slope_of(range(100), noise)
    assert flat.low < 0.0 < flat.high
    leak = slope_of(range(100), [value + 0.3 * second for second, value in enumerate(noise)])
    assert 0.0 < leak.low < 30.0 < leak.high


def test_a_peak_moves_no_slope() -> None:
    values = [10.0] * 100
    values[90:95] = [1000.0] * 5
    assert slope_of(range(100), values).low == 0.0


def test_few_samples_have_no_slope() -> None:
    assert slope_of([1.0, 2.0], [1.0, 100.0]).growth == 0.0


def test_equal_plans_are_equal_soaks() -> None:
    plan = Plan(seconds=60, seed=4, out="nowhere")
    assert Plan.parse(plan.text()) == plan
    assert schedule_of(plan, "fs", 0, 60).episodes == schedule_of(plan, "fs", 0, 60).episodes
    assert schedule_of(plan, "fs", 0, 60).episodes != schedule_of(plan, "fs", 1, 60).episodes


@pytest.mark.parametrize("wrong", [{"tiers": ("fs", "tape")}, {"seconds": 0}, {"workers": 0}])
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="soak"):
        Plan(**{"seconds": 1, "seed": 1, "out": "nowhere"} | wrong)
