"""Draws lines over one axis as SVG, for pages and for people who look at a file.

Values in, text out. It is so little that a plotting library would be the larger part. Imports the
standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "svg", "ticks"]

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 48
LEGEND_LINE = 18
# Told apart by people who see colours otherwise, too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# A line has at most so many points: more would be finer than the screen.
POINTS_MAX = 800


@dataclass(frozen=True)
class Line:
    """Points in order of x; with ``steps`` each value holds until the next."""

    name: str
    points: tuple[tuple[float, float], ...]
    steps: bool = False
    dashed: bool = False


def ticks(least: float, most: float, about: int = 5) -> list[float]:
    """Return round numbers between the two, about so many."""
    if most <= least:
        return [least]
    rough = (most - least) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough)
    first = math.ceil(least / step - 1e-9)
    last = math.floor(most / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def svg(title: str, x: str, y: str, lines: Sequence[Line], y_from: float | None = None) -> str:
    """Return the plot.

    Args:
        title: Above it.
        x: What the horizontal axis is, with its unit.
        y: What the vertical axis is.
        lines: At least one point in all.
        y_from: Where the vertical axis begins; None: at the least value.

    Raises:
        ValueError: There is no point.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError(f"plot {title!r} has no points")
    x_range = _range([point[0] for point in points], None)
    y_range = _range([point[1] for point in points], y_from)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *_axes(x, y, x_range, y_range),
    ]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        body += _line(line, colour, x_range, y_range)
        body += _legend(line.name, colour, number)
    return "\n".join([*body, "</svg>"]) + "\n"


def _range(values: Sequence[float], begin: float | None) -> tuple[float, float]:
    least, most = min(values), max(values)
    if begin is not None:
        least = min(begin, least)
    return (least, most) if most > least else (least, least + 1)


def _place(value: float, span: tuple[float, float], begin: float, end: float) -> float:
    return begin + (value - span[0]) / (span[1] - span[0]) * (end - begin)


def _x(value: float, span: tuple[float, float]) -> float:
    return _place(value, span, LEFT, WIDTH - RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
    return _place(value, span, HEIGHT - BOTTOM, TOP)


def _axes(x: str, y: str, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    found = []
    for value in ticks(*x_range, about=8):
        at = _x(value, x_range)
        found.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in ticks(*y_range):
        at = _y(value, y_range)
        found.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    middle = (TOP + bottom) / 2
    return [
        *found,
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y)}</text>",
    ]


def _line(
    line: Line, colour: str, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[str]:
    if not line.points:
        return []
    every = math.ceil(len(line.points) / POINTS_MAX)
    # The last point is where a curve ends, which is what people read off.
    kept = [*line.points[:-1:every], line.points[-1]]
    words = []
    before = ""
    for number, (at_x, at_y) in enumerate(kept):
        px, py = f"{_x(at_x, x_range):.1f}", f"{_y(at_y, y_range):.1f}"
        if number == 0:
            words.append(f"M{px} {py}")
        elif line.steps:
            words.append(f"H{px}" + ("" if py == before else f"V{py}"))
        else:
            words.append(f"L{px} {py}")
        before = py
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    return [
        f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
    ]


def _legend(name: str, colour: str, number: int) -> list[str]:
    at_y = HEIGHT - BOTTOM - 14 - LEGEND_LINE * number
    right = WIDTH - RIGHT - 8
    return [
        f'<text x="{right - 22}" y="{at_y + 4}" text-anchor="end">{escape(name)}</text>',
        f'<path d="M{right - 16} {at_y}h16" stroke="{colour}" stroke-width="3"/>',
    ]
