"""The arithmetic of the comparisons: wrong statistics would make any figure look right."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "harness.py"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_harness", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(harness: ModuleType, ours: list[float], theirs: list[float], name: str = "cell", judged: bool = True) -> object:
    return harness.CellResult(name, judged, ours, theirs, ours)


def test_each_round_runs_ours_twice_and_theirs_once_and_the_first_does_not_count(harness: ModuleType) -> None:
    calls: list[str] = []
    cell = harness.Cell("cell", lambda: calls.append("ours") or 2.0, lambda: calls.append("theirs") or 1.0)
    found = harness.run_cell(cell, 4, random.Random(1))
    assert (calls.count("ours"), calls.count("theirs")) == (10, 5)
    assert len({tuple(calls[at : at + 3]) for at in range(0, 15, 3)}) > 1
    assert (found.ours, found.theirs, found.again) == ([2.0] * 4, [1.0] * 4, [2.0] * 4)
    assert (found.ratio, found.interval, found.noise) == (pytest.approx(2.0), pytest.approx((2.0, 2.0)), pytest.approx((1.0, 1.0)))


def test_ratios_are_averaged_geometrically(harness: ModuleType) -> None:
    assert harness.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert result(harness, [1.0, 4.0], [2.0, 2.0]).ratio == pytest.approx(1.0)


def test_an_interval_holds_the_mean_and_narrows_with_rounds(harness: ModuleType) -> None:
    rng = random.Random(7)
    few = [rng.lognormvariate(0.0, 0.2) for _ in range(8)]
    many = few * 8
    low, high = harness.bootstrap(few)
    assert low < harness.geometric_mean(few) < high
    narrow_low, narrow_high = harness.bootstrap(many)
    assert (narrow_high - narrow_low) < 0.5 * (high - low)


def test_a_verdict_names_the_mean_and_each_cell_that_missed(harness: ModuleType) -> None:
    good = result(harness, [1.0] * 5, [1.0] * 5, "good")
    bad = result(harness, [0.5] * 5, [1.0] * 5, "bad")
    shown = result(harness, [0.1] * 5, [1.0] * 5, "shown", judged=False)
    assert harness.verdict([good, shown], 0.9, 0.85) == []
    misses = harness.verdict([good, bad, shown], 0.9, 0.85)
    assert [miss.split(":")[0] for miss in misses] == ["geometric mean 0.71, wanted 0.90", "bad"]


def test_a_cell_whose_interval_reaches_the_mark_has_not_missed_it(harness: ModuleType) -> None:
    unsure = result(harness, [0.6, 1.2, 0.7, 1.1, 0.8], [1.0] * 5)
    assert unsure.interval[0] < 0.85 < unsure.interval[1]
    assert harness.verdict([unsure], 0.8, 0.85) == []


def test_a_report_is_printed_and_written_in_every_form_that_was_asked_for(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    harness.add_outputs(parser)
    files = {name: tmp_path / f"it.{name}" for name in ("json", "markdown", "svg")}
    args = parser.parse_args([part for name, file in files.items() for part in (f"--{name}", str(file))])
    cells = [result(harness, [2.0] * 3, [1.0] * 3, "a <cell>")]
    harness.publish(args, "Title", "MB/s", cells, {"cpu": "x"}, ["Nothing missed."], [{"name": "it", "met": True}])
    assert capsys.readouterr().out.rstrip() == files["markdown"].read_text().rstrip()
    assert files["markdown"].read_text().endswith("Nothing missed.\n")
    saved = json.loads(files["json"].read_text())
    assert (saved["cells"][0]["ours"], saved["targets"][0]["name"]) == ([2.0] * 3, "it")
    assert "a <cell>" in [text.text for text in ET.fromstring(files["svg"].read_text()).iter("{http://www.w3.org/2000/svg}text")]
    harness.publish(parser.parse_args([]), "Title", "MB/s", cells, {})
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_a_report_has_a_row_a_cell_and_the_mean_of_the_judged_ones(harness: ModuleType) -> None:
    cells = [result(harness, [2.0] * 3, [1.0] * 3, "first"), result(harness, [1.0] * 3, [4.0] * 3, "second", judged=False)]
    text = harness.report("Title", "MB/s", cells, {"cpu": "x"})
    assert "| first | 2 | 1 | 2.00 | 2.00 to 2.00 | 1.00 to 1.00 | yes |" in text
    assert "| second |" in text
    assert "judged cells: **2.00**" in text
