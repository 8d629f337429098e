"""A prediction as tables in GiB, as JSON in bytes, and as a chart.

The chart is an SVG file: a bar for each phase, stacked by kind of memory. `Markup.format` puts values into it and
escapes them. No style sheet of a page is around the file, so that colours and background are fixed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from markupsafe import Markup
from tabulate import tabulate

from conformance.sizing.device import DeviceFit, Setting
from conformance.sizing.prediction import (
    KINDS,
    PhaseMemory,
    Prediction,
    Request,
    checkpointing_kinds,
    reshard_modes,
)

if TYPE_CHECKING:
    from conformance.sizing.simulation import Simulation

_GIB = 1024**3
_NOT_COUNTED = """\
Not counted: fragmentation of the allocator, and workspaces of kernels other than matrix products. Buffers live as in
torch up to 2.14, verified on the CPU; on a GPU all of this is unverified."""
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


def as_json(predicted: Prediction, fit: DeviceFit | None = None, simulated: "Simulation | None" = None) -> str:
    """Return all numbers as JSON; those of a device under `device`, those of a simulation under `simulation`."""
    more = {"device": fit, "simulation": simulated}
    given = {name: value for name, value in more.items() if value is not None}
    return msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(predicted) | given)).decode()


def prediction_text(request: Request, predicted: Prediction, fit: DeviceFit | None = None) -> str:
    """Return a heading, memory by phase, the room on a device if it was asked for, and traffic."""
    sections = [_heading(request, predicted), *_notes(predicted), _memory(request, predicted)]
    sections += [_fixed_costs(predicted), _NOT_COUNTED]
    if fit:
        sections.append(_fit(request, fit))
    if predicted.modes:
        sections.append(_modes(predicted))
    return "\n\n".join([*sections, _traffic(predicted)])


def _notes(predicted: Prediction) -> list[str]:
    return ["\n".join(predicted.notes)] if predicted.notes else []


def _fixed_costs(predicted: Prediction) -> str:
    costs = predicted.fixed_costs
    rows = [[cost.name, cost.least_bytes / _GIB, cost.most_bytes / _GIB, cost.phase, cost.source] for cost in costs]
    return (
        "Needed on a CUDA device beside the above, as others have reported (unverified; --fixed-costs SIZE for your "
        "own), in GiB:\n" + tabulate(rows, headers=["", "least", "most", "phase", "source"], floatfmt=".2f")
    )


def label(phase: str) -> str:
    """Return the name of a phase for a reader who does not know the trainer's names."""
    return "after zero_grad" if phase == "idle" else phase


def _fit(request: Request, fit: DeviceFit) -> str:
    """Return the verdict on the device: the room left, or the excess and the settings that would fit."""
    device = f"{fit.device_bytes / _GIB:.2f} GiB of device memory"
    peak = f"{label(fit.phase)}, with up to {fit.fixed_bytes / _GIB:.2f} GiB of fixed costs"
    if fit.fits:
        return f"Fits into {device}: {fit.left_bytes / _GIB:.2f} GiB left at the peak, in {peak}."
    verdict = f"Does not fit into {device}: {-fit.left_bytes / _GIB:.2f} GiB too much in {peak}."
    fitting = [setting for setting in fit.tried if setting.left_bytes >= 0]
    return f"{verdict}\n{_fitting_settings(fitting) if fitting else _none_fits(request, fit.tried)}"


def _fitting_settings(settings: list[Setting]) -> str:
    rows = [[s.reshard, s.activation_checkpointing, s.peak_bytes / _GIB, s.left_bytes / _GIB] for s in settings]
    headers = ["--reshard", "--activation-checkpointing", "peak (GiB)", "left (GiB)"]
    return "These would fit, the least recomputation first:\n" + tabulate(rows, headers=headers, floatfmt=".2f")


def _none_fits(request: Request, tried: list[Setting]) -> str:
    least = min(tried, key=lambda setting: setting.peak_bytes)
    return (
        f"Nor does any --reshard ({', '.join(reshard_modes(request))}) together with any\n--activation-checkpointing "
        f"({', '.join(checkpointing_kinds(request))}): the least is {least.peak_bytes / _GIB:.2f} GiB, with --reshard "
        f"{least.reshard}\n--activation-checkpointing {least.activation_checkpointing}. Try more ranks, or fewer or "
        f"shorter samples{', or --offload cpu' if request.offload == 'none' else ''}."
    )


def simulation_text(predicted: Prediction, simulated: "Simulation") -> str:
    """Return a table of simulated and predicted memory, in GiB."""
    metrics = {"state": simulated.state}
    metrics |= {
        f"{label(phase)} {kind}": metric for phase, kinds in simulated.phases.items() for kind, metric in kinds.items()
    }
    rows = [[name, m.simulated_bytes / _GIB, m.predicted_bytes / _GIB, m.ratio] for name, m in metrics.items()]
    seconds = f"{simulated.wall_s:.0f} s ({simulated.cpu_s:.0f} s of CPU time)"
    operators, estimate = simulated.activation_bytes / _GIB, predicted.activation_bytes / _GIB
    return "\n\n".join(
        [
            f"Simulated with torch {simulated.torch} in {seconds}:",
            tabulate(
                rows, headers=["", "simulated (GiB)", "predicted (GiB)", "ratio"], floatfmt=("", ".3f", ".3f", ".4f")
            ),
            f"Both with the activations of the CPU's operators, {operators:.2f} GiB, since norms are not fused there; "
            f"above, with the estimate of {estimate:.2f} GiB.",
        ]
    )


def _heading(request: Request, predicted: Prediction) -> str:
    name = " ".join([request.model, *(["with", *request.overrides] if request.overrides else [])])
    active = f" ({predicted.active_parameters / 1e9:.2f} active)"
    return (
        f"{name}, {predicted.parameters / 1e9:.2f} billion parameters"
        f"{active if predicted.active_parameters < predicted.parameters else ''}: "
        f"{request.mesh} ({predicted.ranks} ranks), {request.precision},\nreshard {request.reshard}, activation "
        f"checkpointing {request.activation_checkpointing}, logits {request.logits}, offload {request.offload}, "
        f"{request.batch} x {request.seq_len} tokens"
    )


def _memory(request: Request, predicted: Prediction) -> str:
    """Return the peaks of all phases by kind of memory, and the memory held afterwards."""
    phases = predicted.phases.values()
    rows = {kind: [memory.kinds_at_peak[kind] for memory in phases] for kind in KINDS}
    rows |= {"peak": [memory.peak_bytes for memory in phases], "held afterwards": [m.end_bytes for m in phases]}
    table = [[name, *(nbytes / _GIB for nbytes in row)] for name, row in rows.items()]
    where = "device" if request.offload == "none" else "host"
    return "\n".join(
        [
            "Memory of each rank at the peak of each phase, in GiB:",
            tabulate(table, headers=["", *map(label, predicted.phases)], floatfmt=".2f"),
            f"State on the {where}: {predicted.state_bytes / _GIB:.2f} GiB. Activations that are kept for backward, an "
            f"estimate: {predicted.activation_bytes / _GIB:.2f} GiB.",
        ]
    )


def _modes(predicted: Prediction) -> str:
    """Return the trade of each reshard mode under a pipeline: memory against gathers."""
    rows = [[m.reshard, m.peak_bytes / _GIB, m.all_gathers, m.gathered_bytes / _GIB] for m in predicted.modes]
    headers = ["--reshard", "peak (GiB)", "all-gathers", "their inputs (GiB)"]
    peaks = ", ".join(f"{peak / _GIB:.2f}" for peak in predicted.stage_peaks_bytes)
    return (
        f"Peaks of the ranks of the pipeline: {peaks} GiB; all else is of rank {predicted.stage}.\n"
        "Reshard modes, each on the rank that needs most, in one step:\n"
        + tabulate(rows, headers=headers, floatfmt=".2f")
    )


def _traffic(predicted: Prediction) -> str:
    headers = ["phase", "collective", "group", "ranks", "dtype", "number", "input\n(GiB)", "sent per rank\n(ring, GiB)"]
    rows = [
        [label(t.phase), t.kind, t.group, t.ranks, t.dtype, t.count, t.input_bytes / _GIB, t.sent_bytes / _GIB]
        for t in predicted.traffic
    ]
    return "Collectives of each rank in one step:\n" + tabulate(rows, headers=headers, floatfmt=".3f")


def memory_chart(phases: Mapping[str, PhaseMemory], *, title: str, device_bytes: int | None = None) -> Markup:
    """Return the chart of the peaks of `phases`, with a line at the memory of the device if it is given."""
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
    """Return the bar of a phase, with its name before it and its peak behind the largest bar."""
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
