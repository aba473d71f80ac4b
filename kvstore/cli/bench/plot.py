"""Line plots as SVG files, with nothing but the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from kvstore.errors import ResourceError

_WIDE, _HIGH = 490, 340
"""Of the field with the lines; margins are as wide as their labels need."""
_TOP, _BOTTOM = 40, 60
_Y_LABEL = 30
"""How much of the left margin the y axis' name takes."""
_LEGEND = 34
"""From the field's right edge to the names of lines."""
_FONT_SIZE = 13
_CHARACTER = 0.62 * _FONT_SIZE
"""How wide a character of a label is, rather too much: what draws it chooses the font."""
_LINE = 1.5 * _FONT_SIZE
_STEPS = (1, 2, 5)
_MOST_STEPS = 6
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which the colour-blind can tell apart."""

Point = tuple[float, float]


def line_plot(
    title: str, x_label: str, y_label: str, ticks: Sequence[str], lines: Mapping[str, Sequence[Point]]
) -> str:
    """An SVG document.

    Args:
        title: above the plot.
        x_label: under it.
        y_label: beside it.
        ticks: labels at x = 0, 1, 2, …
        lines: by name: points from left to right, x in units of ticks.
    """
    highest = max((y for points in lines.values() for _, y in points), default=0.0) or 1.0
    step, digits = _round_step(highest)
    top = step * math.ceil(highest / step)
    apart = _WIDE / max(1, len(ticks) - 1)
    longest = _CHARACTER * max(map(len, ticks), default=0)
    slanted = longest + _CHARACTER > apart
    every = math.ceil(_LINE * math.sqrt(2) / apart) if slanted else 1
    below = longest / math.sqrt(2) if slanted else 0.0
    levels = [f"{number * step:,.{digits}f}" for number in range(round(top / step) + 1)]
    left = max(_Y_LABEL + _CHARACTER * (1 + max(map(len, levels))), below, longest / 2)
    wide = left + _WIDE + max(longest / 2 + _CHARACTER, _LEGEND + _CHARACTER * (1 + max(map(len, lines), default=0)))
    high = _TOP + _HIGH + below + _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return left + apart * x, _TOP + _HIGH * (1 - y / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}">',
        f'<rect width="{wide:.0f}" height="{high:.0f}" fill="white"/>',
        _text(left + _WIDE / 2, 24, title, "middle", 15),
        _text(left + _WIDE / 2, high - 16, x_label, "middle"),
        _text(20, _TOP + _HIGH / 2, y_label, "middle", angle=-90),
    ]
    for number, label in enumerate(levels):
        _, y = place(0, number * step)
        parts.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + _WIDE:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 8, y + 4, label, "end"))
    for number in range(0, len(ticks), every):
        x, y = place(number, 0)
        if slanted:
            parts.append(_text(x + 4, y + 16, ticks[number], "end", angle=-45))
        else:
            parts.append(_text(x, y + 20, ticks[number], "middle"))
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        row = _TOP + 20 * number
        parts.append(f'<rect x="{left + _WIDE + 14:.1f}" y="{row}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(left + _WIDE + _LEGEND, row + 7, name))
    return "\n".join([*parts, "</svg>", ""])


def write_plot(path: Path, plot: str) -> None:
    """Write a plot to a file.

    Raises:
        ResourceError: the file can't be written.
    """
    try:
        path.write_text(plot, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"the plot can't be written: {path}: {error.strerror or error}") from error


def _round_step(highest: float) -> tuple[float, int]:
    """From one level to the next, with one figure that counts, and how many digits it has behind the point."""
    power = math.floor(math.log10(highest / _MOST_STEPS))
    step = next(
        each * 10.0**exponent
        for exponent in (power, power + 1)
        for each in _STEPS
        if highest <= _MOST_STEPS * each * 10.0**exponent
    )
    return step, max(0, -math.floor(math.log10(step)))


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = _FONT_SIZE, angle: int = 0) -> str:
    style = f'text-anchor="{anchor}" font-family="sans-serif" font-size="{size}"'
    turned = f' transform="rotate({angle} {x:.1f} {y:.1f})"' if angle else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{turned}>{escape(words)}</text>'
