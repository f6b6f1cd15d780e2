"""The papers of a soak: a table that adds up, and a picture that a browser can read."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from soak_judge import Finding, Run, Sample
from soak_papers import write_papers
from soak_plan import Plan
from soak_plot import Band, Panel, draw

SVG = "{http://www.w3.org/2000/svg}"


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in line.attrib["points"].split())]


def test_a_picture_has_a_line_for_each_value_and_the_higher_the_larger() -> None:
    root = ElementTree.fromstring(draw("t", [0, 10, 20], [Panel("p", {"a": [0, 1, 2], "b": [2, 2, 2]})], lanes={}))
    first, second = (points(line) for line in root.iter(f"{SVG}polyline"))
    assert first[0][0] < first[1][0] < first[2][0]
    assert first[0][1] > first[1][1] > first[2][1]
    assert {y for _, y in second} == {first[2][1]}


def test_a_picture_shows_what_held_when() -> None:
    lanes = {"fs": [Band(0, 5, "hangs")], "s3": [Band(5, 10, "a < b & c")]}
    root = ElementTree.fromstring(draw("t", [0, 10], [Panel("p", {"a": [0, 1]})], lanes=lanes, marks_s=[5.0], from_s=2.5))
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert tips == ["hangs 0.0 to 5.0 s", "a < b & c 5.0 to 10.0 s"]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"fs", "s3", "p", "a"} <= set(texts)


@pytest.mark.parametrize("values", [[], [0.0], [1e-9], [1e12]])
def test_a_picture_of_few_or_odd_values_can_be_drawn(values: list[float]) -> None:
    ElementTree.fromstring(draw("t", list(range(len(values))), [Panel("p", {"a": values})], lanes={}))


def test_papers_have_every_second_and_every_finding(tmp_path: Path) -> None:
    plan = Plan(seconds=3, seed=1, out=str(tmp_path), tiers=("fs",))
    run = Run(plan, reports=[{"counts": {"hits fs": 7}}])
    run.samples = [Sample(float(second), memory_bytes=second << 20, hits={"fs": 10 * second}) for second in range(1, 4)]
    findings = [Finding("wrong bytes", True, "0"), Finding("growth of memory", False, "much")]
    table, picture, said = write_papers(run, findings, {"fs": [Band(0, 1, "hangs")]}, [2.0])
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["t_s"], row["memory_bytes"], row["hits_fs"]) for row in rows] == [
        (f"{second}.0", str(second << 20), str(10 * second)) for second in range(1, 4)
    ]
    assert "bad: growth of memory" in picture.read_text()
    ElementTree.fromstring(picture.read_text())
    told = json.loads(said.read_text())
    assert (told["good"], told["counts"]) == (False, {"hits fs": 7})
    assert [finding["what"] for finding in told["findings"]] == ["wrong bytes", "growth of memory"]
