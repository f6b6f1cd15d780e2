"""Plots are whole documents with finite coordinates, whatever they are given."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.bench.plot import Bar, bars, lines

SVG = "{http://www.w3.org/2000/svg}"
# Characters that XML cannot hold are no part of a name of anything that is measured.
NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FFF, exclude_categories=("Cc", "Cs", "Cn")), min_size=1, max_size=30)
NUMBERS = st.one_of(st.floats(0, 1e12), st.sampled_from([0.0, math.inf, math.nan, 5e-324]))
BARS = st.one_of(st.builds(Bar, NUMBERS), st.builds(Bar, NUMBERS, NUMBERS, NUMBERS))


def drawn(svg: str) -> ET.Element:
    """The document, which is well-formed, with every coordinate a finite number within the picture."""
    root = ET.fromstring(svg)
    assert root.tag == SVG + "svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in ("x", "x1", "x2", "cx", "y", "y1", "y2", "cy", "r"):
                assert -1.0 <= float(value) <= (height if "y" in name else width) + 1.0, (element.tag, name, value)
            elif name == "points":
                assert all(math.isfinite(float(part)) for part in re.split("[ ,]", value) if part)
            elif name in ("width", "height") and value != "100%":
                assert 0.0 <= float(value) < math.inf
    return root


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "text")]


@settings(max_examples=60)
@given(NAMES, st.dictionaries(NAMES, st.dictionaries(NAMES, BARS, max_size=3), max_size=4), st.sampled_from([None, 1.0]))
def test_bars_of_anything_are_a_whole_picture(title: str, groups: dict[str, dict[str, Bar]], mark: float | None) -> None:
    named = texts(drawn(bars(title, "MB/s", groups, mark=mark)))
    assert {title, *groups} <= set(named)


@settings(max_examples=60)
@given(NAMES, st.dictionaries(NAMES, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), max_size=4), st.booleans())
def test_lines_through_anything_are_a_whole_picture(title: str, series: dict[str, list[tuple[float, float]]], log: bool) -> None:
    root = drawn(lines(title, "keys", "µs", series, log=log))
    assert {title, *series} <= set(texts(root))
    assert len(list(root.iter(SVG + "polyline"))) == len(series)


def test_text_is_escaped() -> None:
    root = drawn(bars('a <b> & "c"', "<MB/s>", {"<script>": {"&amp;": Bar(1.0)}}))
    assert {'a <b> & "c"', "<MB/s>", "<script>", "&amp;"} <= set(texts(root))
    assert root.find(f".//{SVG}script") is None


def test_a_bar_is_as_long_as_its_value_and_its_whisker_as_its_interval() -> None:
    root = drawn(bars("t", "u", {"g": {"one": Bar(1.0), "two": Bar(2.0, 1.0, 3.0)}}))
    one, two = (float(bar.attrib["width"]) for bar in root.iter(SVG + "rect") if bar.find(SVG + "title") is not None)
    assert abs(two - 2 * one) < 0.2
    across = next(line for line in root.iter(SVG + "line") if line.attrib["class"] == "whisker")
    assert abs(float(across.attrib["x2"]) - float(across.attrib["x1"]) - 2 * one) < 0.3


def test_on_log_axes_equal_factors_are_equal_lengths() -> None:
    root = drawn(lines("t", "x", "y", {"line": [(10, 1), (100, 1), (1000, 1), (0, 1)]}))
    places = [float(point.attrib["cx"]) for point in root.iter(SVG + "circle")]
    assert len(places) == 3
    assert abs((places[1] - places[0]) - (places[2] - places[1])) < 0.2


def test_both_themes_are_in_the_picture() -> None:
    assert "prefers-color-scheme:dark" in lines("t", "x", "y", {})
