"""`python -m conformance predict`: memory of each rank and bytes on the wire, for a model of any size."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tabulate import tabulate

from conformance.cli.command import Answer, Commands

if TYPE_CHECKING:
    from conformance.cli.prediction import Prediction, Request
    from conformance.cli.simulation import Simulation

_GIB = 1024**3


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("predict", help="memory of each rank and bytes on the wire, for any size")
    parser.add_argument("--model", required=True, help="shapes in conformance/models: llama3-8b, ...")
    parser.add_argument("--mesh", required=True, help="dp8, dp64-tp8, hsdp16x8, ... up to 4096 in each dimension")
    parser.add_argument("--precision", default="bf16-mp", help="fp32, bf16-mp, bf16-reduce (default: %(default)s)")
    parser.add_argument(
        "--reshard", default="default", help='a mode, a number of ranks, or a table: \'{"layers.*": "never"}\''
    )
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples of each rank (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches (default: %(default)s)")
    parser.add_argument("--offload", default="none", help="none or cpu")
    parser.add_argument("--activation-checkpointing", default="none", help="none, selective or full")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="another value in the model's shape, such as n_layers=48; can be repeated",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="also run two steps of the trainer with FSDP2 on fake tensors, in one process, and compare",
    )
    parser.add_argument("--json", action="store_true", help="all numbers as JSON, in bytes")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also write a chart of the memory as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Predict, and simulate if asked to. Raises ValueError for what cannot be predicted or simulated."""
    from conformance.cli.prediction import Request, prediction

    request = Request(**{name: getattr(options, name) for name in Request.__struct_fields__})
    predicted = prediction(request)
    if options.picture:
        options.picture.write_text(chart(request, predicted))
    simulated = _simulation(request) if options.simulate else None
    if options.json:
        return Answer(as_json(predicted, simulated))
    sections = [prediction_text(request, predicted)]
    if simulated:
        sections.append(simulation_text(predicted, simulated))
    return Answer("\n\n".join(sections))


def _simulation(request: "Request") -> "Simulation":
    from conformance.cli.simulation import simulation

    return simulation(request)


def as_json(predicted: "Prediction", simulated: "Simulation | None" = None) -> str:
    """Return all numbers as JSON; those of a simulation under `simulation`."""
    more = {"simulation": simulated} if simulated else {}
    return msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(predicted) | more)).decode()


def prediction_text(request: "Request", predicted: "Prediction") -> str:
    """Return two tables: memory by phase, and what is sent, in GiB."""
    name = " ".join([request.model, *(["with", *request.overrides] if request.overrides else [])])
    memory = [[phase, use["peak_bytes"] / _GIB, use["end_bytes"] / _GIB] for phase, use in predicted.phases.items()]
    sent = [[t["phase"], t["kind"], t["group"], t["dtype"], t["count"], t["nbytes"] / _GIB] for t in predicted.traffic]
    where = "device" if request.offload == "none" else "host"
    return "\n\n".join(
        [
            f"{name}, {predicted.parameters / 1e9:.2f} billion parameters: "
            f"{request.mesh} ({predicted.ranks} ranks), {request.precision}, reshard {request.reshard}, "
            f"{request.batch} x {request.seq_len} tokens",
            tabulate(memory, headers=["phase", "peak (GiB)", "held afterwards (GiB)"], floatfmt=".2f"),
            f"State on the {where}: {predicted.state_bytes / _GIB:.2f} GiB. Activations, an estimate: "
            f"{predicted.activation_bytes / _GIB:.2f} GiB. Without workspaces, fragmentation and buffers of the "
            "backend.\nBuffers live as in torch up to 2.13, verified on the CPU; on a GPU all of this is unverified.",
            tabulate(sent, headers=["phase", "collective", "group", "dtype", "number", "sent (GiB)"], floatfmt=".3f"),
        ]
    )


def simulation_text(predicted: "Prediction", simulated: "Simulation") -> str:
    """Return a table of what was simulated and what the memory model predicts, in GiB."""
    metrics = {"state": simulated.state}
    metrics |= {
        f"{phase} {kind}": metric for phase, kinds in simulated.phases.items() for kind, metric in kinds.items()
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


def chart(request: "Request", predicted: "Prediction") -> str:
    """Return the memory of each phase as an SVG file."""
    from conformance.report.charts import predicted_memory

    return predicted_memory(
        {phase: use["peak_bytes"] for phase, use in predicted.phases.items()},
        resident_bytes=predicted.state_bytes if request.offload == "none" else 0,
        title=f"{request.model} on {request.mesh}: memory of each rank (dark: parameters and optimizer)",
    )
