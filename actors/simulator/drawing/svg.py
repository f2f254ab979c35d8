"""Small charts as SVG text, made of a frame with two axes and whatever is drawn into it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

INK, FAINT, PAPER = "#24292f", "#d8dee4", "#ffffff"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#79706e", "#ff9da6")
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 58, 44
Point = tuple[float, float]


class Chart:
    """One chart. Values are clipped to the ranges ``x`` and ``y`` (low, high); ``log_x`` needs ranges above 0.

    ``y_names`` are written on the y axis instead of numbers, the first between 0 and 1.
    """

    def __init__(
        self,
        title: str,
        x_label: str,
        y_label: str,
        x: Point,
        y: Point,
        *,
        log_x: bool = False,
        y_names: Sequence[str] = (),
        width: int = 760,
        height: int = 300,
    ) -> None:
        self._title, self._x_label, self._y_label = title, x_label, y_label
        self._x = x if x[1] > x[0] else (x[0], x[0] + 1)
        self._y = y if y[1] > y[0] else (y[0], y[0] + 1)
        self._log_x = log_x
        self._y_names = y_names
        self._left = max((int(16 + 6.2 * len(name)) for name in y_names), default=LEFT)
        self._width, self._height = width, height
        self._shapes: list[str] = []
        self._legend: list[tuple[str, str]] = []

    # -- drawing ------------------------------------------------------------------------------------------------------
    def line(self, points: Iterable[Point], color: str, name: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        self._name(color, name)

    def area(self, points: Sequence[Point], color: str, name: str = "", base: Sequence[float] | None = None) -> None:
        """The area between points and their ``base`` (0 where there is none)."""
        if not points:
            return
        lows = base if base is not None else [self._y[0]] * len(points)
        there = [f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in points]
        back = [f"{self._at_x(x):.1f},{self._at_y(low):.1f}" for (x, _), low in zip(points, lows, strict=True)]
        self._shapes.append(f'<polygon points="{" ".join(there + back[::-1])}" fill="{color}" fill-opacity="0.75"/>')
        self._name(color, name)

    def box(self, x0: float, x1: float, y0: float, y1: float, color: str) -> None:
        """A filled rectangle between two corners."""
        left, top = self._at_x(x0), self._at_y(y1)
        width, height = max(self._at_x(x1) - left, 0.3), max(self._at_y(y0) - top, 0.3)
        self._shapes.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
        )

    def name(self, color: str, name: str) -> None:
        """An entry of the legend."""
        self._name(color, name)

    def _name(self, color: str, name: str) -> None:
        if name:
            self._legend.append((color, name))

    # -- text ---------------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        width, height = self._width, self._height
        right, bottom = width - RIGHT, height - BOTTOM
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
            _text(self._left, 22, self._title, 'font-size="14" font-weight="600"'),
            *self._grid(right, bottom),
            *self._shapes,
            f'<path d="M{self._left} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>',
            _text((self._left + right) / 2, height - 8, self._x_label, 'text-anchor="middle"'),
            _text(
                0, 0, self._y_label, f'text-anchor="middle" transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)"'
            ),
            *self._legend_parts(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _grid(self, right: float, bottom: float) -> Iterable[str]:
        for number, name in enumerate(self._y_names):
            yield f'<path d="M{self._left} {self._at_y(number):.1f}H{right}" stroke="{FAINT}"/>'
            yield _text(self._left - 6, self._at_y(number + 0.5) + 4, name, 'text-anchor="end"')
        for value in [] if self._y_names else _ticks(*self._y):
            at = self._at_y(value)
            yield f'<path d="M{self._left} {at:.1f}H{right}" stroke="{FAINT}"/>'
            yield _text(self._left - 6, at + 4, _short(value), 'text-anchor="end"')
        for value in _log_ticks(*self._x) if self._log_x else _ticks(*self._x):
            at = self._at_x(value)
            yield f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="{FAINT}"/>'
            yield _text(at, bottom + 16, _short(value), 'text-anchor="middle"')

    def _legend_parts(self) -> Iterable[str]:
        at = float(self._left)
        for color, name in self._legend:
            yield f'<rect x="{at:.0f}" y="34" width="11" height="11" rx="2" fill="{color}"/>'
            yield _text(at + 16, 44, name)
            at += 32 + 6.2 * len(name)

    def _at_x(self, value: float) -> float:
        low, high = self._x
        value = min(max(value, low), high)
        share = math.log(value / low) / math.log(high / low) if self._log_x else (value - low) / (high - low)
        return self._left + share * (self._width - RIGHT - self._left)

    def _at_y(self, value: float) -> float:
        low, high = self._y
        share = (min(max(value, low), high) - low) / (high - low)
        return self._height - BOTTOM - share * (self._height - BOTTOM - TOP)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between low and high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
