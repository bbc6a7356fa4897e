"""Charts as inline SVG: lines over numbers or over categories, and bars. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 42
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """A line. A point whose y is None interrupts it. `labels` stand beside the points."""

    name: str
    points: Sequence[tuple[float, float | None]]
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A bar from `low` to `high` on the x axis."""

    low: float
    high: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the axes are called. With `categories`, x counts them from 0; `from_zero` begins the x axis at 0."""

    title: str
    x_label: str
    y_label: str
    categories: Sequence[str] = ()
    from_zero: bool = False


def line_chart(axes: Axes, series: Sequence[Series]) -> str:
    """Lines with a dot at each point where there are few; empty when there is nothing to draw."""
    known = [(x, y) for line in series for x, y in line.points if y is not None]
    if not known:
        return ""
    scale = _Scale(
        x_low=0.0 if axes.categories or axes.from_zero else min(x for x, _ in known),
        x_high=float(max(len(axes.categories) - 1, 1)) if axes.categories else max(x for x, _ in known),
        y_high=max(y for _, y in known),
    )
    parts = [*_frame(axes, scale), *_legend(series)]
    for number, line in enumerate(series):
        parts.append(f'<path class="line s{number}" d="{_path(line, scale)}"/>')
        if len(line.points) <= 40:
            parts += [
                f'<circle class="dot s{number}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3">'
                f"<title>{escape(line.name)}: {short(y)}</title></circle>"
                for x, y in line.points
                if y is not None
            ]
        parts += [
            f'<text class="tick" x="{scale.x(x) - 6:.1f}" y="{scale.y(y) - 6:.1f}">{escape(label)}</text>'
            for (x, y), label in zip(line.points, line.labels, strict=False)
            if y is not None
        ]
    return _svg(axes, parts)


def bar_chart(axes: Axes, blocks: Sequence[Block]) -> str:
    """Bars side by side; empty when there are none."""
    if not blocks:
        return ""
    scale = _Scale(x_low=blocks[0].low, x_high=blocks[-1].high, y_high=max(block.value for block in blocks))
    parts = _frame(axes, scale)
    for block in blocks:
        left, right, top = scale.x(block.low), scale.x(block.high), scale.y(block.value)
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 1):.1f}" '
            f'height="{_TOP + _PLOT_HEIGHT - top:.1f}"><title>{short(block.low)} to {short(block.high)}: '
            f"{short(block.value)}</title></rect>"
        )
    return _svg(axes, parts)


def short(value: float) -> str:
    """A number with three digits that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From values to pixels; the y axis begins at 0."""

    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return _LEFT + (value - self.x_low) / span * _PLOT_WIDTH

    def y(self, value: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - value / (self.y_high * 1.05 or 1.0))


def _path(line: Series, scale: _Scale) -> str:
    parts: list[str] = []
    is_drawing = False
    for x, y in line.points:
        if y is not None:
            parts.append(f"{'L' if is_drawing else 'M'}{scale.x(x):.1f} {scale.y(y):.1f}")
        is_drawing = y is not None
    return "".join(parts)


def _frame(axes: Axes, scale: _Scale) -> list[str]:
    """Title, grid, numbers and names of the axes."""
    bottom = _TOP + _PLOT_HEIGHT
    parts = [f'<text class="title" x="{_LEFT}" y="16">{escape(axes.title)}</text>']
    for value in ticks(0.0, scale.y_high * 1.05):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>')
    if axes.categories:
        marks = [(float(index), name) for index, name in enumerate(axes.categories)]
    else:
        marks = [(value, short(value)) for value in ticks(scale.x_low, scale.x_high)]
    for position, name in marks:
        x = scale.x(position)
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 16}">{escape(name)}</text>')
    middle = _LEFT + _PLOT_WIDTH / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text class="tick" text-anchor="middle" x="{middle}" y="{HEIGHT - 6}">{escape(axes.x_label)}</text>')
    parts.append(
        f'<text class="tick" text-anchor="middle" transform="translate(13 {_TOP + _PLOT_HEIGHT / 2}) rotate(-90)">'
        f"{escape(axes.y_label)}</text>"
    )
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    """The lines' names at the top right; none for a single line."""
    if len(series) < 2:
        return []
    parts: list[str] = []
    x = float(WIDTH - _RIGHT)
    for number, line in reversed(list(enumerate(series))):
        parts.append(f'<text class="legend s{number}" text-anchor="end" x="{x:.0f}" y="16">{escape(line.name)}</text>')
        x -= 8.0 * len(line.name) + 14
    return parts


def _svg(axes: Axes, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
