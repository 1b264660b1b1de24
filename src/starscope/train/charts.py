"""Line charts as SVG text, for a page that loads nothing: axes with round numbers, one line a series, a legend.

chart("Loss", [Series("training", [(10, 5.1), (20, 4.2)])], unit="nats a token")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 30  # margins
TICKS = 5
MOST_POINTS = 500  # of one line
CLASSES = 8  # colours, c0 to c7, which the page defines


@dataclass(frozen=True)
class Series:
    """A line: its name, and (step, value) in order; values that are no finite numbers leave a gap."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, series: Sequence[Series], *, unit: str, marks: Iterable[float] = (), zero: bool = False) -> str:
    """One figure, or nothing when there is no point. `marks` are steps with a vertical line; `zero`: begin at 0."""
    lines = [Series(one.name, thinned(one.points)) for one in series]
    points = [(x, y) for one in lines for x, y in one.points if math.isfinite(y)]
    if not points:
        return ""
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _span([*(y for _, y in points), *([0.0] if zero else [])])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(TOP + down, 1)

    parts = []
    for value in ticks(y_low, y_high):
        _, y = at(x_low, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number(value)}</text>')
    for value in ticks(x_low, x_high):
        x, _ = at(value, y_low)
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(value)}</text>')
    for step in marks:
        if x_low < step < x_high:
            x, _ = at(step, y_low)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for i, one in enumerate(lines):
        parts.append(f'<path class="c{i % CLASSES}" d="{_path(one.points, at)}"/>')
        if len(one.points) <= 40:
            for x, y in one.points:
                if math.isfinite(y):
                    px, py = at(x, y)
                    tip = f"{one.name}: {number(y)} at step {number(x)}"
                    circle = f'<circle class="c{i % CLASSES}" cx="{px}" cy="{py}" r="2.5">'
                    parts.append(f"{circle}<title>{escape(tip)}</title></circle>")
    named = lines if len(lines) > 1 else ()
    legend = "".join(f'<span><i class="c{i % CLASSES}"></i>{escape(one.name)}</span>' for i, one in enumerate(named))
    label = f"{title}, {unit}" if unit else title
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    caption = f"<b>{escape(title)}</b> {escape(unit)}"
    return f"<figure><figcaption>{caption}</figcaption>{svg}<div class=legend>{legend}</div></figure>"


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many of them, evenly spread, the last one always."""
    if len(points) <= most:
        return list(points)
    step = len(points) / (most - 1)
    return [points[int(i * step)] for i in range(most - 1)] + [points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, about TICKS of them."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number as an axis shows it: 0.002, 12, 4.1k, 2M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, a little apart when they are one."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    room = abs(low) * 0.05 or 0.5
    return low - room, high + room


def _path(points: Sequence[tuple[float, float]], at: Callable[[float, float], tuple[float, float]]) -> str:
    commands, draws = [], False
    for x, y in points:
        if not math.isfinite(y):
            draws = False
            continue
        px, py = at(x, y)
        commands.append(f"{'L' if draws else 'M'}{px} {py}")
        draws = True
    return "".join(commands)
