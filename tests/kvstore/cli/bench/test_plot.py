"""Plots: no two labels lie over each other, and none leaves the picture."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest

from kvstore.cli.bench.plot import line_plot
from kvstore.units import format_size

Corners = list[tuple[float, float]]
SVG = "{http://www.w3.org/2000/svg}"
CHARACTER = 0.58
"""Of a label's size: as wide as a character is on average in the fonts that browsers take for sans-serif."""


def boxes(plot: str) -> dict[str, Corners]:
    """The corners of each label."""
    found: dict[str, Corners] = {}
    for number, text in enumerate(ElementTree.fromstring(plot).iter(f"{SVG}text")):
        x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
        wide = CHARACTER * size * len(text.text or "")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
        corners = [(left, y - 0.8 * size), (left + wide, y - 0.8 * size), (left + wide, y + 0.2 * size)]
        corners.append((left, y + 0.2 * size))
        if turned := text.attrib.get("transform"):
            angle, *centre = (float(part) for part in turned.removeprefix("rotate(").removesuffix(")").split())
            assert centre == [x, y]
            cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            corners = [(x + (a - x) * cos - (b - y) * sin, y + (a - x) * sin + (b - y) * cos) for a, b in corners]
        found[f"{number}: {text.text}"] = corners
    return found


def overlap(one: Corners, other: Corners) -> bool:
    """Whether two rectangles meet: no line along a side of theirs parts them."""
    for (ax, ay), (bx, by) in itertools.chain(itertools.pairwise(one[:3]), itertools.pairwise(other[:3])):
        across = (by - ay, ax - bx)
        ours, theirs = ([x * across[0] + y * across[1] for x, y in corners] for corners in (one, other))
        if max(ours) < min(theirs) or max(theirs) < min(ours):
            return False
    return True


PATHS = [f"{pages} x {size}" for size in ("64 KiB", "512 KiB", "2 MiB") for pages in (1, 8, 64)]
CAPACITIES = [format_size(1 << exponent) for exponent in range(30, 43)]
MANY = [format_size(5_000_001 * number) for number in range(1, 61)]
WORKS = ["none here, warm", "none here, cold", "half here, warm"]


@pytest.mark.parametrize("ticks", [PATHS, CAPACITIES, MANY, ["1", "2", "4", "8"], ["one"], []])
@pytest.mark.parametrize("names", [["LRU"], WORKS, ["a rather long name of what is measured", *WORKS]])
@pytest.mark.parametrize("highest", [0.004, 0.33, 1.0, 2.9, 443.0, 1_234_567.0])
def test_labels_are_apart_and_in_the_picture(ticks: list[str], names: list[str], highest: float) -> None:
    lines = {name: [(float(place), highest) for place in range(len(ticks))] for name in names}
    plot = line_plot("Paths beside their limits", "pages a call", "limit's time / ours", ticks, lines)
    found = boxes(plot)
    for (name, one), (another, other) in itertools.combinations(found.items(), 2):
        assert not overlap(one, other), f"{name} lies over {another}"
    picture = ElementTree.fromstring(plot).attrib
    for name, corners in found.items():
        for x, y in corners:
            assert 0 <= x <= float(picture["width"]) and 0 <= y <= float(picture["height"]), name


@pytest.mark.parametrize(
    ("highest", "levels"),
    [
        (0.33, ["0.0", "0.1", "0.2", "0.3", "0.4"]),
        (0.004, ["0.000", "0.001", "0.002", "0.003", "0.004"]),
        (443.0, ["0", "100", "200", "300", "400", "500"]),
        (60_000.0, ["0", "10,000", "20,000", "30,000", "40,000", "50,000", "60,000"]),
    ],
)
def test_levels_are_round(highest: float, levels: list[str]) -> None:
    plot = line_plot("", "", "", ["a"], {"": [(0.0, highest)]})
    said = [text.text for text in ElementTree.fromstring(plot).iter(f"{SVG}text")]
    assert [each for each in said if each and each[0].isdigit()] == levels
