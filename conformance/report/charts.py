"""Charts of the HTML report, as SVG.

Values are put into SVG by `Markup.format`, which escapes them.
"""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from conformance.judge.measurements import Measurement
from conformance.report.wording import bounds_text, is_outside, value_text

_WIDTH, _HEIGHT, _ROW = 120, 10, 13
_PLOT, _STEP, _DOT, _DECADES = 44, 15, 2.5, 4
"""Plot of deviations: height, width of a step, radius of a dot, and powers of ten below the bounds."""


def bounds_bar(metric: Measurement) -> Markup:
    """Return a value between its bounds: the box is their range, the line is the value; red outside.

    Empty without two bounds and a finite value.
    """
    lower, upper, value = metric.lower, metric.upper, metric.value
    if lower is None or upper is None or value is None:
        return Markup()
    margin = _WIDTH / 5
    x = min(max(margin + _share(value, lower, upper) * (_WIDTH - 2 * margin), 1.0), _WIDTH - 1.0)
    return Markup(
        '<svg width="{width}" height="{height}" role="img" aria-label="{label}">'
        '<rect x="{margin:.0f}" y="2" width="{box:.0f}" height="{box_height}" fill="none" stroke="var(--none)"/>'
        '<rect x="{x:.1f}" width="3" height="{height}" fill="var({colour})"/></svg>'
    ).format(
        width=_WIDTH,
        height=_HEIGHT,
        label="outside" if is_outside(metric) else "inside",
        margin=margin,
        box=_WIDTH - 2 * margin,
        box_height=_HEIGHT - 4,
        x=x - 1,
        colour="--bad" if is_outside(metric) else "--good",
    )


def share_bar(share: float | None) -> Markup:
    """Return a bar of a share of a bound, which is the right border; red beyond the border. Empty for None."""
    if share is None:
        return Markup()
    return Markup(
        '<svg class="share" viewBox="0 0 100 {height}" preserveAspectRatio="none" aria-hidden="true">'
        '<rect width="{length:.1f}" height="{height}" fill="var({colour})"/>'
        '<line x1="99.5" x2="99.5" y1="0" y2="{height}" class="bound"/></svg>'
    ).format(height=_HEIGHT, length=min(100 * share, 100.0), colour="--bad" if share > 1 else "--bar")


def _share(value: float, lower: float, upper: float) -> float:
    """0 at the lower bound, 1 at the upper one; where both are equal, the middle, or far off."""
    if upper > lower:
        return (value - lower) / (upper - lower)
    return 0.5 if value == lower else math.copysign(2.0, value - lower)


def bar(metric: Measurement, *, largest: float) -> Markup:
    """Return a value as a bar on a scale from 0 to `largest`, with the bounds drawn in; the bar is red outside of them.

    The solid line is the lower bound, the dashed line the upper one. The width is set by `svg.bar` in report.css.
    """
    scale = 100 / largest if largest else 0.0
    lines = Markup().join(
        Markup('<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height}" class="bound"{dash}/>').format(
            x=min(bound * scale, 99.5), height=_HEIGHT, dash=dash
        )
        for bound, dash in ((metric.lower, Markup()), (metric.upper, Markup(' stroke-dasharray="3 2"')))
        if bound is not None
    )
    return Markup(
        '<svg class="bar" viewBox="0 0 100 {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<rect width="{length:.2f}" y="2" height="{bar_height}" fill="var({colour})"/>{lines}</svg>'
    ).format(
        height=_HEIGHT,
        label=f"{value_text(metric)}, bounds {bounds_text(metric)}",
        length=(metric.value or 0.0) * scale,
        bar_height=_HEIGHT - 4,
        colour="--bad" if is_outside(metric) else "--bar",
        lines=lines,
    )


def deviations(metrics: Mapping[str, Measurement]) -> Markup:
    """Return a dot for each deviation on a logarithmic scale, below or above the line of its bound; red above.

    Empty without metrics that have a positive upper bound. A deviation that is 0 or not finite lies at the border.
    """
    shown = {name: metric for name, metric in metrics.items() if metric.upper}
    if not shown:
        return Markup()
    exponents = [math.log10(metric.upper) for metric in shown.values() if metric.upper]
    low, high = min(exponents) - _DECADES, max(exponents) + 1

    def height(value: float | None) -> float:
        exponent = high if value is None else math.log10(value) if value > 0 else low
        return _DOT + 1 + (_PLOT - 2 * _DOT - 2) * (high - min(max(exponent, low), high)) / (high - low)

    marks = Markup().join(
        Markup(
            '<line x1="{left}" x2="{right}" y1="{bound:.1f}" y2="{bound:.1f}" class="bound"/>'
            '<circle cx="{x}" cy="{y:.1f}" r="{radius}" fill="var({colour})"><title>{label}</title></circle>'
        ).format(
            left=_STEP * index,
            right=_STEP * (index + 1),
            x=_STEP * index + _STEP // 2,
            radius=_DOT,
            bound=height(metric.upper),
            y=height(metric.value),
            colour="--bad" if is_outside(metric) else "--good",
            label=f"{name}: {value_text(metric)}, bounds {bounds_text(metric)}",
        )
        for index, (name, metric) in enumerate(shown.items())
    )
    return Markup('<svg width="{}" height="{}" role="img" aria-label="deviations below their bounds">{}</svg>').format(
        _STEP * len(shown), _PLOT, marks
    )


def loss_curve(losses: Sequence[float | None], baseline: Sequence[float | None] = ()) -> Markup:
    """Return the losses of all steps as a line, those of a baseline dashed, with first and last value as text.

    Empty if a loss is not finite.
    """
    values, others = ([loss for loss in each if loss is not None] for each in (losses, baseline))
    if len(values) < len(losses) or len(others) < len(baseline) or not values:
        return Markup()
    low, high = min(values + others), max(values + others)
    span = (high - low) or 1.0

    def line(points: Sequence[float], style: Markup) -> Markup:
        places = " ".join(f"{10 + 15 * step},{22 - 18 * (value - low) / span:.1f}" for step, value in enumerate(points))
        return Markup('<polyline points="{}" fill="none" stroke-width="2" {}/>').format(places, style)

    lines = line(values, Markup('stroke="var(--bar)"'))
    label = f"{values[0]:.4f} to {values[-1]:.4f}"
    if others:
        lines += line(others, Markup('stroke="CanvasText" stroke-dasharray="3 2"'))
        label += f", baseline to {others[-1]:.4f}"
    return Markup(
        '<svg width="{width}" height="26" role="img" aria-label="{label}">{lines}</svg><small> {label}</small>'
    ).format(width=20 + 15 * len(values), label=label, lines=lines)
