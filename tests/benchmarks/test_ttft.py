"""What is said of times to the first token: ratios, lines, and from where on a tier pays. Nothing is timed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "ttft_report.py"
NAMES = {"compute": "computing", "theirs": "their tier", "ours": "our tier"}
TOKEN_BYTES = 32768


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ttft_report", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ttft_report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def times(report: ModuleType, fixed_s: float, token_s: float, lengths: tuple[int, ...] = (100, 400, 900)) -> Any:
    """A side that takes what a line says, in three rounds, with noise of 2 %."""
    made = report.Times()
    for tokens in lengths:
        for noise in (0.98, 1.0, 1.02):
            for column in ("first", "again"):
                made.add(tokens, column, (fixed_s + token_s * tokens) * noise)
    return made


def test_a_ratio_is_above_one_where_the_side_is_faster(report: ModuleType) -> None:
    slow, fast = times(report, 0.0, 1e-3), times(report, 0.0, 0.25e-3)
    assert report.ratio(fast, slow, 900).mean == pytest.approx(4.0)
    assert report.ratio(slow, fast, 900).high < 1


def test_the_line_of_a_side_is_found(report: ModuleType) -> None:
    line = report.fit(times(report, 0.05, 1e-3))
    assert (line.fixed_s, line.token_s) == (pytest.approx(0.05), pytest.approx(1e-3))


def test_one_length_makes_no_line(report: ModuleType) -> None:
    with pytest.raises(ValueError, match="two lengths"):
        report.fit(times(report, 0.05, 1e-3, (900,)))


@pytest.mark.parametrize(
    ("tier", "from_tokens"),
    [((0.15, 0.2e-3), 125.0), ((0.01, 0.2e-3), 0.0), ((0.15, 2e-3), None), ((0.15, 1e-3), None)],
    ids=["from a length on", "always", "never", "as slow for each token"],
)
def test_a_tier_pays_from_where_its_line_is_below_computing(
    report: ModuleType, tier: tuple[float, float], from_tokens: float | None
) -> None:
    found = report.crossing(report.Line(0.05, 1e-3), report.Line(*tier))
    assert found == (from_tokens if from_tokens is None else pytest.approx(from_tokens))


def test_a_tier_pays_at_no_length_below_one_where_it_did_not(report: ModuleType) -> None:
    compute = times(report, 0.0, 1e-3)
    assert report.pays_from(times(report, 0.2, 0.1e-3), compute) == 400
    assert report.pays_from(times(report, 2.0, 0.0), compute) is None
    # Faster at 100 tokens, slower at 400, faster at 900.
    odd = report.Times(first={100: [0.05] * 3, 400: [0.5] * 3, 900: [0.5] * 3}, again={tokens: [1.0] * 3 for tokens in (100, 400, 900)})
    assert report.pays_from(odd, compute) == 900


def test_the_tables_say_each_side_and_each_length(report: ModuleType) -> None:
    found = {"compute": times(report, 0.0, 1e-3), "theirs": times(report, 0.1, 0.1e-3), "ours": times(report, 0.1, 0.05e-3)}
    rows = report.side_section(NAMES, found, 900, "compute", "theirs")
    assert rows[2:] == [
        "| computing | 900 |  |  | 1.00 to 1.00 |",
        "| their tier | 190 | 4.74 (4.74 to 4.74) |  | 1.00 to 1.00 |",
        "| our tier | 145 | 6.21 (6.21 to 6.21) | 1.31 (1.31 to 1.31) | 1.00 to 1.00 |",
    ]
    rows = report.break_even_section(NAMES, found, "compute", "cached", TOKEN_BYTES)
    assert "| our tier | 105 | 120 | 145 |" in rows
    assert rows[-1] == "| our tier | 100.0 | 50 | 655 | 105 | 400 |"


def test_what_the_engines_own_cache_takes_for_a_token_is_not_the_tiers(report: ModuleType) -> None:
    found = {"compute": times(report, 0.0, 1e-3), "cached": times(report, 0.09, 0.01e-3), "ours": times(report, 0.1, 0.05e-3)}
    rows = report.break_even_section(NAMES | {"cached": "no tier"}, found, "compute", "cached", TOKEN_BYTES)
    assert rows[-1] == "| our tier | 100.0 | 50 | 819 | 105 | 400 |"
    assert rows[-2] == "| no tier | 90.0 | 10 |  | 91 | 100 |"


def test_the_plot_shows_each_side_with_and_without_lengths(report: ModuleType) -> None:
    for lengths in ((900,), (100, 900)):
        found = {"compute": times(report, 0.0, 1e-3, lengths), "ours": times(report, 0.1, 0.05e-3, lengths)}
        page = report.plot(NAMES, found, 900, "compute")
        assert ElementTree.fromstring(page).tag.endswith("svg")
        assert "our tier" in page
