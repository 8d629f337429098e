"""`python -m conformance predict`: memory of each rank and bytes on the wire, for a model of any size."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.cli.command import Answer, Commands
from reference_trainer.checks import UsageError, require

if TYPE_CHECKING:
    from conformance.sizing.prediction import Prediction, Request
    from conformance.sizing.simulation import Simulation


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("predict", help="memory of each rank and bytes on the wire, for any size")
    parser.add_argument(
        "--model",
        required=True,
        help="llama3-8b or another of conformance/sizing/models, a .yaml like those, or a config.json of Hugging Face",
    )
    parser.add_argument(
        "--mesh", required=True, help="dp8, dp64-tp8, pp4-dp16, hsdp16x8, dp64-ep8, ... up to 4096 in each dimension"
    )
    parser.add_argument("--precision", default="bf16-mp", help="fp32, bf16-mp, bf16-reduce (default: %(default)s)")
    parser.add_argument(
        "--reshard", default="default", help='a mode, a number of ranks, or a table: \'{"layers.*": "never"}\''
    )
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples of each rank (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches (default: %(default)s)")
    parser.add_argument(
        "--pipeline",
        default="1f1b",
        help="schedule of a mesh with pp: 1f1b, gpipe, interleaved-1f1b, looped-bfs, interleaved-zero-bubble or "
        "zbv-zero-bubble",
    )
    parser.add_argument(
        "--groups",
        default="blocks-and-ends",
        help="FSDP groups: blocks-and-ends, or blocks, with embedding, norm and output in the root's group, as a tied "
        "weight needs (default: %(default)s)",
    )
    parser.add_argument("--offload", default="none", help="none or cpu")
    parser.add_argument(
        "--activation-checkpointing",
        default="none",
        help="none, selective (matrix products are kept), selective-op (as torchtitan: every second one) or full",
    )
    parser.add_argument(
        "--logits",
        default="kept",
        help="the model's output in backward: kept, kept-fp32 (the model raises it, and the loop keeps that), freed "
        "(the loop deletes it before), or chunked (the loss computes few at once: not counted) (default: %(default)s)",
    )
    parser.add_argument("--loss-parallel", action="store_true", help="logits stay sharded over tensor parallelism")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="another value in the model's shape, such as n_layers=48; can be repeated",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of the device, such as 80GiB: exit status 1 if the peak is larger, and what would fit",
    )
    parser.add_argument(
        "--fixed-costs",
        metavar="SIZE",
        help="CUDA context, NCCL and workspaces of your device, such as 2GiB, in place of the ranges that are printed",
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
    """Predict, compare with a device, and simulate if asked to; status 1 if the model does not fit into the device.

    Raises UsageError for what cannot be predicted or simulated.
    """
    from conformance.sizing.device import device_fit
    from conformance.sizing.fixed_costs import parse_bytes
    from conformance.sizing.prediction import Request, prediction
    from conformance.sizing.rendering import as_json, prediction_text, simulation_text

    device_bytes = parse_bytes(options.device_memory) if options.device_memory is not None else None
    request = Request(**{name: getattr(options, name) for name in Request.__struct_fields__})
    predicted = prediction(request)
    fit = device_fit(request, predicted, device_bytes=device_bytes) if device_bytes else None
    if options.picture:
        _write_chart(options.picture, request, predicted, device_bytes)
    simulated = _simulation(request) if options.simulate else None
    status = 1 if fit and not fit.fits else 0
    if options.json:
        return Answer(as_json(predicted, fit, simulated), status)
    sections = [prediction_text(request, predicted, fit)]
    if simulated:
        sections.append(simulation_text(predicted, simulated))
    return Answer("\n\n".join(sections), status)


def _simulation(request: "Request") -> "Simulation":
    from conformance.sizing.simulation import simulation

    return simulation(request)


def _write_chart(file: Path, request: "Request", predicted: "Prediction", device_bytes: int | None) -> None:
    """Write the chart. Raises UsageError if the file cannot be written."""
    from conformance.sizing.rendering import memory_chart

    model = Path(request.model)
    title = f"{Path(model.parent.name, model.name)} on {request.mesh}: peak memory of each rank"
    require(file.is_file() or not file.exists(), f"--picture {file} cannot be written: it exists and is no file")
    try:
        file.write_text(memory_chart(predicted.phases, title=title, device_bytes=device_bytes))
    except OSError as error:
        raise UsageError(f"--picture {file} cannot be written: {error.strerror}") from None
