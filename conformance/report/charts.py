"""Charts of the HTML report, and the one that `predict` writes, as SVG.

Values are put into SVG by `Markup.format`, which escapes them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from markupsafe import Markup

from conformance.judge.measurements import Measurement
from conformance.report.cell_facts import Collective
from conformance.report.wording import is_outside

_WIDTH, _HEIGHT, _ROW = 120, 10, 13
_PHASE_COLOURS = {"forward": "#0969da", "backward": "#8250df", "clip": "#bf8700", "optimizer": "#1a7f37"}
_KIND_COLOURS = {"all_gather": "#0969da", "reduce_scatter": "#8250df", "all_reduce": "#bf8700"}
_NAMES, _EVENT = 90, 9
"""Width of the names of groups, and of one collective."""
_GIB = 1024**3


def bounds_bar(metric: Measurement) -> Markup:
    """Return a value between its bounds: the box is what the law allows, the line is the value; red outside.

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


def _share(value: float, lower: float, upper: float) -> float:
    """0 at the lower bound, 1 at the upper one; where both are equal, the middle, or far off."""
    if upper > lower:
        return (value - lower) / (upper - lower)
    return 0.5 if value == lower else math.copysign(2.0, value - lower)


def memory_bar(peaks: Mapping[str, Measurement], *, largest_bytes: float) -> Markup:
    """Return a line for each phase, as long as its peak in bytes, with a mark at the lower bound of the model."""
    row = Markup(
        '<rect y="{y}" width="{length:.1f}" height="{height}" fill="{colour}"/>'
        '<rect x="{predicted:.1f}" y="{top}" width="2" height="{row}" fill="CanvasText"/>'
        '<text x="{text_x:.0f}" y="{text_y}">{phase} {peak:.2f} MiB, model {model:.2f}</text>'
    )
    rows = Markup()
    for index, (phase, metric) in enumerate(peaks.items()):
        peak_bytes, model_bytes = metric.value or 0.0, metric.lower or 0.0
        length, predicted = (260 * value / largest_bytes for value in (peak_bytes, model_bytes))
        rows += row.format(
            y=index * _ROW + 2,
            length=length,
            height=_ROW - 4,
            colour=_PHASE_COLOURS.get(phase, "var(--bar)"),
            predicted=predicted,
            top=index * _ROW,
            row=_ROW,
            text_x=max(length, predicted) + 6,
            text_y=index * _ROW + 10,
            phase=phase,
            peak=peak_bytes / 2**20,
            model=model_bytes / 2**20,
        )
    return Markup('<svg width="520" height="{}" role="img">{}</svg>').format(_ROW * len(peaks), rows)


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


def timeline(collectives: Sequence[Collective]) -> Markup:
    """Return the collectives of a step in their order, not to scale of time: a row for each group, phases above.

    Each rectangle has a tooltip; the report has the same as text.
    """
    if not collectives:
        return Markup()
    groups = list(dict.fromkeys(collective.group for collective in collectives))
    name = Markup('<text x="0" y="{}">{}</text>')
    names = Markup().join(name.format(_ROW * (row + 2) - 3, group) for row, group in enumerate(groups))
    events = Markup().join(
        Markup(
            '<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}">'
            "<title>{c.phase} {c.kind} {c.group}, {c.nbytes} B</title></rect>"
        ).format(
            x=_NAMES + _EVENT * index + 2,
            y=_ROW * (groups.index(collective.group) + 1),
            width=_EVENT - 2,
            height=_ROW - 2,
            colour=_KIND_COLOURS.get(collective.kind, "var(--none)"),
            c=collective,
        )
        for index, collective in enumerate(collectives)
    )
    width, height = _NAMES + _EVENT * len(collectives) + 2, _ROW * (len(groups) + 1)
    return Markup('<svg width="{}" height="{}" role="img" aria-label="collectives">{}{}{}</svg>').format(
        width, height, names, _phase_marks(collectives, height=height), events
    )


def _phase_marks(collectives: Sequence[Collective], *, height: int) -> Markup:
    """A line where each phase begins, and its name or, where there is no room, the first letter."""
    marks, start = Markup(), 0
    for phase, events in groupby(collective.phase for collective in collectives):
        x, length = _NAMES + _EVENT * start, len(list(events))
        marks += Markup(
            '<rect x="{}" y="0" width="1" height="{}" fill="var(--none)"/><text x="{}" y="{}">{}</text>'
        ).format(x, height, x + 3, _ROW - 3, phase if _EVENT * length > 6 * len(phase) else phase[:1])
        start += length
    return marks


def predicted_memory(peaks_bytes: Mapping[str, int], *, resident_bytes: int, title: str) -> Markup:
    """Return an SVG file with a bar for each phase: what is resident in all of them, and what it adds at its peak.

    A file of its own, so colours are fixed, and the background is the viewer's.
    """
    scale = 520 / max(peaks_bytes.values())
    row = Markup(
        '<text x="8" y="{text_y}">{phase}</text>'
        '<rect x="90" y="{y}" width="{width:.1f}" height="22" fill="#7fb3d5"/>'
        '<rect x="90" y="{y}" width="{resident:.1f}" height="22" fill="#1f618d"/>'
        '<text x="{text_x:.1f}" y="{text_y}">{peak:.2f} GiB</text>'
    )
    rows = Markup().join(
        row.format(
            phase=phase,
            y=40 + 34 * index,
            text_y=56 + 34 * index,
            width=peak_bytes * scale,
            resident=resident_bytes * scale,
            text_x=96 + peak_bytes * scale,
            peak=peak_bytes / _GIB,
        )
        for index, (phase, peak_bytes) in enumerate(peaks_bytes.items())
    )
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" '
        'font-family="sans-serif" font-size="13"><title>{title}</title><text x="8" y="22">{title}</text>{rows}</svg>\n'
    ).format(height=60 + 34 * len(peaks_bytes), title=title, rows=rows)
