"""The small pictures of report.html, as SVG."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from markupsafe import Markup, escape

from conformance.judge.measurements import Measurement
from conformance.report.cell_facts import Collective

_WIDTH, _HEIGHT, _ROW = 120, 10, 13
_PHASE_COLOURS = {"forward": "#0969da", "backward": "#8250df", "clip": "#bf8700", "optimizer": "#1a7f37"}
_KIND_COLOURS = {"all_gather": "#0969da", "reduce_scatter": "#8250df", "all_reduce": "#bf8700"}
_NAMES, _EVENT = 90, 9
"""Width of the names of groups, and of one collective."""


def bounds_bar(figure: Measurement) -> Markup:
    """Where a value lies: the box is what the law allows, the line is the value; red outside. Empty without bounds."""
    lower, upper, value = figure.lower, figure.upper, figure.value
    if lower is None or upper is None or value is None:
        return Markup()
    inside = lower <= value <= upper
    margin = _WIDTH / 5
    place = min(max(margin + _share(value, lower, upper) * (_WIDTH - 2 * margin), 1.0), _WIDTH - 1.0)
    colour = "var(--good)" if inside else "var(--bad)"
    return Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{"inside" if inside else "outside"}">'
        f'<rect x="{margin:.0f}" y="2" width="{_WIDTH - 2 * margin:.0f}" height="{_HEIGHT - 4}" fill="none" '
        f'stroke="var(--none)"/><rect x="{place - 1:.1f}" width="3" height="{_HEIGHT}" fill="{colour}"/></svg>'
    )


def _share(value: float, lower: float, upper: float) -> float:
    """0 at the lower bound, 1 at the upper one; where the two are one, the middle, or far off."""
    if upper > lower:
        return (value - lower) / (upper - lower)
    return 0.5 if value == lower else math.copysign(2.0, value - lower)


def memory_bar(peaks: Mapping[str, Measurement], *, largest: float) -> Markup:
    """A line for each phase, as long as its peak; a mark where the model puts it."""
    parts = []
    for row, (phase, figure) in enumerate(peaks.items()):
        length, predicted = (260 * (value or 0.0) / largest for value in (figure.value, figure.lower))
        label = f"{phase} {(figure.value or 0.0) / 2**20:.2f} MiB, model {(figure.lower or 0.0) / 2**20:.2f}"
        colour, top = _PHASE_COLOURS.get(phase, "var(--bar)"), row * _ROW
        parts.append(
            f'<rect y="{top + 2}" width="{length:.1f}" height="{_ROW - 4}" fill="{colour}"/>'
            f'<rect x="{predicted:.1f}" y="{top}" width="2" height="{_ROW}" fill="CanvasText"/>'
            f'<text x="{max(length, predicted) + 6:.0f}" y="{top + 10}">{label}</text>'
        )
    return Markup(f'<svg width="520" height="{_ROW * len(peaks)}" role="img">{"".join(parts)}</svg>')


def loss_curve(losses: Sequence[float | None], baseline: Sequence[float | None] = ()) -> Markup:
    """A line over the steps, its first and last value, and dashed that of a baseline; empty if one is not finite."""
    values, others = ([value for value in found if value is not None] for found in (losses, baseline))
    if len(values) < len(losses) or len(others) < len(baseline) or not values:
        return Markup()
    low, high = min(values + others), max(values + others)
    span = (high - low) or 1.0

    def line(points: Sequence[float], style: str) -> str:
        places = " ".join(f"{10 + 15 * step},{22 - 18 * (value - low) / span:.1f}" for step, value in enumerate(points))
        return f'<polyline points="{places}" fill="none" stroke-width="2" {style}/>' if points else ""

    lines = line(values, 'stroke="var(--bar)"') + line(others, 'stroke="CanvasText" stroke-dasharray="3 2"')
    label = f"{values[0]:.4f} to {values[-1]:.4f}" + (f", baseline to {others[-1]:.4f}" if others else "")
    return Markup(
        f'<svg width="{20 + 15 * len(values)}" height="26" role="img" aria-label="{label}">{lines}</svg>'
        f"<small> {label}</small>"
    )


def timeline(collectives: Sequence[Collective]) -> Markup:
    """The collectives of a step from left to right, a row for each group, phases above; in order, not to scale of time.

    Each says what it is to a pointer that rests on it; the same stands as text beside the picture.
    """
    if not collectives:
        return Markup()
    groups = list(dict.fromkeys(one.group for one in collectives))
    parts = [f'<text x="0" y="{_ROW * (row + 2) - 3}">{escape(group)}</text>' for row, group in enumerate(groups)]
    start = 0
    for phase, run in groupby(one.phase for one in collectives):
        left, length = _NAMES + _EVENT * start, len(list(run))
        parts.append(f'<rect x="{left}" y="0" width="1" height="{_ROW * (len(groups) + 1)}" fill="var(--none)"/>')
        name = phase if _EVENT * length > 6 * len(phase) else phase[:1]
        parts.append(f'<text x="{left + 3}" y="{_ROW - 3}">{escape(name)}</text>')
        start += length
    for number, one in enumerate(collectives):
        parts.append(
            f'<rect x="{_NAMES + _EVENT * number + 2}" y="{_ROW * (groups.index(one.group) + 1)}" '
            f'width="{_EVENT - 2}" height="{_ROW - 2}" fill="{_KIND_COLOURS.get(one.kind, "var(--none)")}">'
            f"<title>{escape(f'{one.phase} {one.kind} {one.group}, {one.nbytes} B')}</title></rect>"
        )
    width, height = _NAMES + _EVENT * len(collectives) + 2, _ROW * (len(groups) + 1)
    return Markup(f'<svg width="{width}" height="{height}" role="img" aria-label="collectives">{"".join(parts)}</svg>')
