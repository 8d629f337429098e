"""Memory of FSDP1 and FSDP2 on the simulated accelerator: `python -m benchmarks.simulated_accelerator [--write]`.

Peaks of one step at both ends of what timings can do: a device that keeps up with the host, and one that is as far
behind as events permit; on the latter FSDP2 also with process groups as NCCL's were up to torch 2.7. With `--write` the
table goes into docs/simulated_accelerator.md, and the picture beside it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.experiments.device_memory import ENDS, DevicePeaks, step_on_device, step_with_older_process_group
from conformance.plan.cells import RECORD_STREAMS, Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import find_hardware
from conformance.run.devices.nvml import machine_devices
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DOCUMENT = PROJECT / "docs" / "simulated_accelerator.md"
PICTURE = PROJECT / "docs" / "simulated_accelerator.svg"
MESHES = ("dp4", "dp2-tp2")
KINDS = ("allocated", "active", "reserved")
_MEBI = 1 << 20
_LABELS, _WIDTH, _ROW, _TOP = 300, 420, 26, 58
_COLOURS = {"eager": "#8c959f", "lazy": "#0969da"}
_TIMINGS = {"eager": "device keeps up", "lazy": "device lags behind"}


def implementations(mesh: str) -> dict[str, Cell]:
    """Return the cells that are compared, by name; all have one model and one mesh."""
    fsdp2 = Cell(mesh=mesh, model="deep", init="full")
    fsdp1 = fsdp2.but(implementation="fsdp1")
    return {
        "FSDP2": fsdp2,
        "FSDP1, limit_all_gathers": fsdp1,
        "FSDP1, no limit": fsdp1.but(limit_all_gathers=False),
    }


def measured_peaks(mesh: str) -> dict[str, dict[str, DevicePeaks]]:
    """Return the peaks of rank 0 by implementation and by timing, each measured in processes of its own."""
    hardware = find_hardware(machine_devices(), accelerator="sim", share_gpu="auto")
    peaks = {}
    with tempfile.TemporaryDirectory() as directory, Pools(isolate=True) as pools:
        version = str(torch.__version__)
        store = RecordStore(
            Path(directory), "memory", version, defect=None, deadline_s=600.0, pools=pools, hardware=hardware
        )
        for name, cell in implementations(mesh).items():
            peaks[name] = CaseRuns(store).measure(step_on_device, cell)[0]
        older = CaseRuns(store).measure(step_with_older_process_group, implementations(mesh)["FSDP2"])[0]
    for value, of_value in older.items():
        peaks[f"FSDP2, {RECORD_STREAMS}={value} of 2.7"] = {"lazy": of_value}
    return peaks


def table(by_mesh: dict[str, dict[str, dict[str, DevicePeaks]]]) -> str:
    """Return the table of peaks in MiB, in the markdown of GitHub."""
    rows = [
        [mesh, name, _TIMINGS[timing], *(getattr(of_timing, kind) / _MEBI for kind in KINDS)]
        for mesh, by_name in by_mesh.items()
        for name, peaks in by_name.items()
        for timing, of_timing in peaks.items()
    ]
    headers = ["mesh", "implementation", "timing", *(f"{kind} (MiB)" for kind in KINDS)]
    text = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f")
    return f"`python -m benchmarks.simulated_accelerator --write`, torch {torch.__version__}, rank 0:\n\n{text}"


def picture(mesh: str, by_name: dict[str, dict[str, DevicePeaks]]) -> str:
    """Return an SVG with a bar for each peak of active memory."""
    names = implementations(mesh)
    bars = [(name, timing, peaks.active) for name in names for timing, peaks in by_name[name].items()]
    largest = max(active for *_, active in bars)
    height = _TOP + _ROW * len(bars) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABELS + _WIDTH + 90} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">Active memory at its peak in one step, {mesh}</text>',
        '<text x="12" y="42" fill="#57606a">What FSDP1 pays when the GPU lags behind, measured on a laptop without one'
        "</text>",
    ]
    for index, (name, timing, active) in enumerate(bars):
        y, width = _TOP + _ROW * index, _WIDTH * active / largest
        lines += [
            f'<text x="{_LABELS - 8}" y="{y + 15}" text-anchor="end">{name if timing == ENDS[0] else ""} '
            f'<tspan fill="#57606a">{_TIMINGS[timing]}</tspan></text>',
            f'<rect x="{_LABELS}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" fill="{_COLOURS[timing]}"/>',
            f'<text x="{_LABELS + width + 6:.1f}" y="{y + 15}">{active / _MEBI:.2f} MiB</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Print the table, and write it and the picture if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description="Memory of FSDP1 and FSDP2 on the simulated accelerator.")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name} and {PICTURE.name}")
    arguments = parser.parse_args()
    by_mesh = {mesh: measured_peaks(mesh) for mesh in MESHES}
    text = table(by_mesh)
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "simulated-memory", text)
        PICTURE.write_text(picture(MESHES[0], by_mesh[MESHES[0]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
