"""Text of a prediction: tables of memory, of room on a device, of traffic and of a simulation, in GiB."""

from typing import TYPE_CHECKING

from tabulate import tabulate

from conformance.cli.prediction import KINDS, checkpointing_kinds, reshard_modes

if TYPE_CHECKING:
    from conformance.cli.device_fit import DeviceFit, Setting
    from conformance.cli.prediction import Prediction, Request
    from conformance.cli.simulation import Simulation

_GIB = 1024**3
_NOT_COUNTED = """\
Not counted: CUDA context, buffers of NCCL, fragmentation of the allocator, workspaces of kernels, and temporaries of an
optimizer that steps all parameters at once, as torch's does on a GPU (foreach). Buffers live as in torch up to 2.14,
verified on the CPU; on a GPU all of this is unverified."""


def prediction_text(request: "Request", predicted: "Prediction", fit: "DeviceFit | None" = None) -> str:
    """Return a heading, memory by phase, the room on a device if it was asked for, and traffic."""
    sections = [_heading(request, predicted), _memory(request, predicted), _NOT_COUNTED]
    if fit:
        sections.append(_fit(request, fit))
    if predicted.modes:
        sections.append(_modes(predicted))
    return "\n\n".join([*sections, _traffic(predicted)])


def label(phase: str) -> str:
    """Return the name of a phase for a reader who does not know the trainer's names."""
    return "after zero_grad" if phase == "idle" else phase


def _fit(request: "Request", fit: "DeviceFit") -> str:
    """Verdict on the device: what is left of it, or what is too much and with which settings the model would fit."""
    device = f"{fit.device_bytes / _GIB:.2f} GiB of device memory"
    if fit.fits:
        return f"Fits into {device}: {fit.left_bytes / _GIB:.2f} GiB left at the peak, in {label(fit.phase)}."
    verdict = f"Does not fit into {device}: {-fit.left_bytes / _GIB:.2f} GiB too much in {label(fit.phase)}."
    fitting = [setting for setting in fit.tried if setting.left_bytes >= 0]
    return f"{verdict}\n{_fitting_settings(fitting) if fitting else _none_fits(request, fit.tried)}"


def _fitting_settings(settings: "list[Setting]") -> str:
    rows = [[s.reshard, s.activation_checkpointing, s.peak_bytes / _GIB, s.left_bytes / _GIB] for s in settings]
    headers = ["--reshard", "--activation-checkpointing", "peak (GiB)", "left (GiB)"]
    return "These would fit, the least recomputation first:\n" + tabulate(rows, headers=headers, floatfmt=".2f")


def _none_fits(request: "Request", tried: "list[Setting]") -> str:
    least = min(tried, key=lambda setting: setting.peak_bytes)
    return (
        f"Nor does any --reshard ({', '.join(reshard_modes(request))}) together with any\n--activation-checkpointing "
        f"({', '.join(checkpointing_kinds(request))}): the least is {least.peak_bytes / _GIB:.2f} GiB, with --reshard "
        f"{least.reshard}\n--activation-checkpointing {least.activation_checkpointing}. Try more ranks, or fewer or "
        f"shorter samples{', or --offload cpu' if request.offload == 'none' else ''}."
    )


def simulation_text(predicted: "Prediction", simulated: "Simulation") -> str:
    """Return a table of what was simulated and what the memory model predicts, in GiB."""
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
                rows,
                headers=["", "simulated (GiB)", "predicted (GiB)", "ratio"],
                floatfmt=("", ".3f", ".3f", ".4f"),
            ),
            f"Both with the activations of the CPU's operators, {operators:.2f} GiB, since norms are not fused there; "
            f"above, with the estimate of {estimate:.2f} GiB.",
        ]
    )


def _heading(request: "Request", predicted: "Prediction") -> str:
    name = " ".join([request.model, *(["with", *request.overrides] if request.overrides else [])])
    return (
        f"{name}, {predicted.parameters / 1e9:.2f} billion parameters: "
        f"{request.mesh} ({predicted.ranks} ranks), {request.precision},\nreshard {request.reshard}, activation "
        f"checkpointing {request.activation_checkpointing}, offload {request.offload}, "
        f"{request.batch} x {request.seq_len} tokens"
    )


def _memory(request: "Request", predicted: "Prediction") -> str:
    """Peaks of all phases by kind of memory, and what is held afterwards."""
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


def _modes(predicted: "Prediction") -> str:
    """Both sides of the trade under a pipeline: memory, and gathers."""
    rows = [[m.reshard, m.peak_bytes / _GIB, m.all_gathers, m.gathered_bytes / _GIB] for m in predicted.modes]
    headers = ["--reshard", "peak (GiB)", "all-gathers", "their inputs (GiB)"]
    peaks = ", ".join(f"{peak / _GIB:.2f}" for peak in predicted.stage_peaks_bytes)
    return (
        f"Peaks of the ranks of the pipeline: {peaks} GiB; all else is of rank {predicted.stage}.\n"
        "Reshard modes, each on the rank that needs most, in one step:\n"
        + tabulate(rows, headers=headers, floatfmt=".2f")
    )


def _traffic(predicted: "Prediction") -> str:
    headers = ["phase", "collective", "group", "ranks", "dtype", "number", "input\n(GiB)", "sent per rank\n(ring, GiB)"]
    rows = [
        [label(t.phase), t.kind, t.group, t.ranks, t.dtype, t.count, t.input_bytes / _GIB, t.sent_bytes / _GIB]
        for t in predicted.traffic
    ]
    return "Collectives of each rank in one step:\n" + tabulate(rows, headers=headers, floatfmt=".3f")
