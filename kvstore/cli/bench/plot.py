"""Line plots as SVG files, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from kvstore.errors import ResourceError

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 160, 40, 60
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
    top = max((y for points in lines.values() for _, y in points), default=1.0) * 1.05 or 1.0
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        return f"{_LEFT + wide * x / max(1, len(ticks) - 1):.1f},{_TOP + high * (1 - y / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 24, title, "middle", 15),
        _text(_LEFT + wide / 2, _HEIGHT - 16, x_label, "middle"),
        f'<g transform="translate(20 {_TOP + high / 2:.0f}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>',
    ]
    for step in range(6):
        value = top * step / 5
        left, level = place(0, value).split(",")
        parts.append(f'<line x1="{left}" y1="{level}" x2="{_LEFT + wide}" y2="{level}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, float(level) + 4, f"{value:.2f}" if top < 20 else f"{value:,.0f}", "end"))
    for number, tick in enumerate(ticks):
        parts.append(_text(float(place(number, 0).split(",")[0]), _TOP + high + 20, tick, "middle"))
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        row = _TOP + 20 * number
        parts.append(f'<rect x="{_LEFT + wide + 14}" y="{row}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(_LEFT + wide + 34, row + 7, name))
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


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 13) -> str:
    style = f'text-anchor="{anchor}" font-family="sans-serif" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
