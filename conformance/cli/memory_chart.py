"""Chart of the memory that is predicted for a rank, as an SVG file: a bar for each phase, stacked by kind of memory.

Values are put into SVG by `Markup.format`, which escapes them. A file has no style sheet of a page around it, so that
colours are fixed, and so is the background.
"""

from collections.abc import Mapping

from markupsafe import Markup

from conformance.cli.prediction import PhaseMemory
from conformance.cli.prediction_text import label

_GIB = 1024**3
_COLOURS = {
    "sharded parameters": "#0072b2",
    "optimizer state": "#56b4e9",
    "gradients": "#cc79a7",
    "unsharded parameters": "#009e73",
    "communication buffers": "#f0e442",
    "activations": "#e69f00",
    "temporaries": "#999999",
}
"""Colours that colour-blind people can tell apart (https://jfly.uni-koeln.de/color/), by kind of memory."""
_LEFT, _RIGHT, _WIDTH = 110, 690, 800
"""Horizontal extent of the bars, and width of the chart."""
_TOP, _ROW, _BAR = 64, 34, 22
"""First row, distance of rows and height of a bar."""
_LEGEND_COLUMNS, _LEGEND_ROW = 4, 24


def memory_chart(phases: Mapping[str, PhaseMemory], *, title: str, device_bytes: int | None = None) -> Markup:
    """Return the chart of the peaks of `phases`, with a line at the memory of the device if there is one."""
    largest = max(device_bytes or 0, *(memory.peak_bytes for memory in phases.values()))
    scale = (_RIGHT - _LEFT) / largest
    bottom = _TOP + _ROW * len(phases)
    rows = Markup().join(
        _row(phase, memory, y=_TOP + _ROW * index, scale=scale) for index, (phase, memory) in enumerate(phases.items())
    )
    line = _device_line(device_bytes, scale=scale, bottom=bottom) if device_bytes else Markup()
    kinds = [kind for kind in _COLOURS if any(memory.kinds_at_peak[kind] for memory in phases.values())]
    legend_rows = -(-len(kinds) // _LEGEND_COLUMNS)
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        'font-size="13"><title>{title}</title><rect width="{width}" height="{height}" fill="#ffffff"/>'
        '<text x="8" y="24" font-size="15">{title}</text>{rows}{line}{legend}</svg>\n'
    ).format(
        width=_WIDTH,
        height=bottom + _LEGEND_ROW * legend_rows + 20,
        title=title,
        rows=rows,
        line=line,
        legend=_legend(kinds, y=bottom + 12),
    )


def _row(phase: str, memory: PhaseMemory, *, y: int, scale: float) -> Markup:
    """The bar of a phase, with its name before it and its peak behind the largest bar."""
    bars, x = Markup(), float(_LEFT)
    for kind, colour in _COLOURS.items():
        nbytes = memory.kinds_at_peak[kind]
        if nbytes:
            bars += Markup(
                '<rect class="memory" x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="{}"><title>{}</title></rect>'
            ).format(x, y, nbytes * scale, _BAR, colour, f"{phase}, {kind}: {nbytes / _GIB:.2f} GiB")
            x += nbytes * scale
    return Markup(
        '<text x="8" y="{y}">{phase}</text>{bars}<text x="{x}" y="{y}" text-anchor="end">{peak}</text>'
    ).format(y=y + 16, phase=label(phase), bars=bars, x=_WIDTH - 8, peak=f"{memory.peak_bytes / _GIB:.2f} GiB")


def _device_line(device_bytes: int, *, scale: float, bottom: int) -> Markup:
    x = _LEFT + device_bytes * scale
    return Markup(
        '<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#000000" stroke-width="2" '
        'stroke-dasharray="5 3"/><text x="{x:.1f}" y="{label_y}" text-anchor="{anchor}">{label}</text>'
    ).format(
        x=x,
        top=_TOP - 10,
        bottom=bottom,
        label_y=_TOP - 16,
        anchor="end" if x > (_LEFT + _RIGHT) / 2 else "start",
        label=f"device: {device_bytes / _GIB:.2f} GiB",
    )


def _legend(kinds: list[str], *, y: int) -> Markup:
    column = (_WIDTH - 16) // _LEGEND_COLUMNS
    entries = Markup()
    for index, kind in enumerate(kinds):
        row, place = divmod(index, _LEGEND_COLUMNS)
        entries += Markup(
            '<rect class="legend" x="{}" y="{}" width="12" height="12" fill="{}"/><text x="{}" y="{}">{}</text>'
        ).format(
            8 + place * column,
            y + row * _LEGEND_ROW,
            _COLOURS[kind],
            26 + place * column,
            y + row * _LEGEND_ROW + 11,
            kind,
        )
    return entries
