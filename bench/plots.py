"""Curves as SVG files, without a plotting library: a frame, ticks, lines with points, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.results import Curve

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_MOST_POINTS_WITH_DOTS = 40


class Axis:
    """Maps values to pixels. A linear axis begins at 0 unless a value is below it."""

    def __init__(self, values: Sequence[float], *, start: float, end: float, logarithmic: bool = False) -> None:
        self._logarithmic = logarithmic and min(values) > 0
        self._low, self._high = (min(values) if self._logarithmic else min(0.0, *values)), max(values)
        if self._high <= self._low:
            self._high = self._low + 1.0
        self._start, self._end = start, end
        self._values = values

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self._scaled(self._low), self._scaled(self._high)
        return self._start + (self._scaled(value) - low) / (high - low) * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers; on a logarithmic axis the values themselves, as there are few."""
        if self._logarithmic:
            return sorted(set(self._values))
        step = _round_step((self._high - self._low) / 6)
        first = math.ceil(self._low / step)
        return [index * step for index in range(first, math.floor(self._high / step + 1e-9) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._logarithmic else value


def _round_step(raw: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is not below `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def draw(curve: Curve) -> str:
    """The SVG of a curve. Raises ValueError when it has no point."""
    points = [point for series in curve.series for point in series.points]
    if not points:
        raise ValueError(f"the curve {curve.name} has no points")
    x_axis = Axis([x for x, _ in points], start=_LEFT, end=_WIDTH - _RIGHT, logarithmic=curve.logarithmic)
    y_axis = Axis([y for _, y in points], start=_HEIGHT - _BOTTOM, end=_TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 22, curve.title, size=15),
        *_grid(x_axis, y_axis),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, curve.x_label),
        _text(18, (_TOP + _HEIGHT - _BOTTOM) / 2, curve.y_label, turned=True),
        *(line for index, _ in enumerate(curve.series) for line in _line(curve, index, x_axis, y_axis)),
        *_legend(curve),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def write_plots(curves: Sequence[Curve], directory: Path) -> list[Path]:
    """Write `directory/<name>.svg` for each curve that has points."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for curve in curves:
        if any(series.points for series in curve.series):
            paths.append(directory / f"{curve.name}.svg")
            paths[-1].write_text(draw(curve), encoding="utf-8")
    return paths


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:,g}", anchor="end"))
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="black"/>')
        parts.append(_text(x, bottom + 18, f"{value:,g}"))
    return [*parts, f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>']


def _line(curve: Curve, index: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in curve.series[index].points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>']
    if len(places) <= _MOST_POINTS_WITH_DOTS:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return parts


def _legend(curve: Curve) -> list[str]:
    parts = []
    for index, series in enumerate(curve.series):
        y = _TOP + 12 + index * 16
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<path d="M{_LEFT + 12} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(_LEFT + 36, y, series.name, anchor="start"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turn}>{escape(text)}</text>'
