"""`python -m conformance sim fidelity`: the rules of the simulated device, measured on it or on a GPU."""

import argparse
from pathlib import Path

from conformance.cli.command import Answer, Commands
from conformance.project import require_checkout
from reference_trainer.checks import UsageError

_DEVICES = ("sim", "cuda")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    text = "measure the rules of the device's model; exit status 1 if the device does not follow them"
    parser = commands.add_parser("fidelity", help=text)
    parser.add_argument(
        "--device", choices=_DEVICES, help="device to measure (default: cuda if there is one, else sim)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="leave the facts in a file")
    parser.add_argument(
        "--write", action="store_true", help="write docs/sim/fidelity.md, and a GPU's facts to docs/gpu/fidelity.json"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Measure a device and compare it with the model.

    Raises UsageError for a GPU that is not there, and Unsupported if the simulated device cannot be built.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    device_type = options.device or ("cuda" if has_cuda else "sim")
    if device_type == "cuda" and not has_cuda:
        raise UsageError(f"--device cuda needs a GPU, and torch {torch.__version__} finds none here: try --device sim")
    if options.write:
        require_checkout("--write")
    if device_type == "sim":
        from conformance.sim.enabling import enable

        enable("lazy", 2)
    from conformance.sim_runs.fidelity import report
    from conformance.sim_runs.fidelity.measuring import as_json, measure

    measured = measure(torch.device(device_type, 0))
    if options.json:
        options.json.write_text(as_json(measured))
    if options.write and device_type == "cuda":
        report.GPU_FACTS.write_text(as_json(measured))
    if options.write:
        report.DOCUMENT.parent.mkdir(exist_ok=True)
        report.DOCUMENT.write_text(report.as_markdown())
    return Answer(report.comparison(measured), status=int(bool(report.disagreements(measured))))
