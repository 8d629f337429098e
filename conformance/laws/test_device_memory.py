"""MEM-10: of a device's memory a run asks for what the cell needs."""

from conformance.judge.law import Measure, law
from conformance.judge.measurements import measure as report
from conformance.laws import compare
from conformance.laws.memory_bounds import compare_phases, phase_bounds, phases
from conformance.plan.cells import Cell
from conformance.plan.substrates import CUDA

MEMORY_STATS = "https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html"
_KINDS = ("allocated_bytes", "active_bytes", "reserved_bytes")


@law("MEM-10", reference=MEMORY_STATS, since="2.9", substrates=CUDA)
def test_memory_of_a_device_is_that_of_the_model(measure: Measure, cell: Cell) -> None:
    """On each rank the most that torch asks of its device's allocator in each phase, and what is left after forward
    and after the step, MUST be what the cell needs: between bounds at most 2 % apart.

    What the allocator rounds up and holds in reserve, and what others have of the device, are figures without bounds.
    cuBLAS's workspaces are there since the warm step. Wrong if a group is not resharded, or a buffer is kept too long:
    the record of the measurement has the allocator's history, `snapshot-rankN.pickle`.
    """
    bounds = phase_bounds(measure, cell, on_device=True)
    for rank, measured in enumerate(measure("memory:step_on_ranks", cell)):
        compare_phases(phases(measured), bounds, where=f"rank {rank}", ratio=1.02)
        for kind in _KINDS:
            report(f"{kind} of rank {rank}", max(segment[kind] for segment in measured["segments"]), unit="bytes")
        report(f"device level of rank {rank}", measured["device_level_bytes"], unit="bytes")


@law("ENV-4", reference="https://docs.nvidia.com/deploy/nvml-api/", substrates=CUDA)
def test_devices_are_free_and_pinned_down(measure: Measure, cell: Cell) -> None:
    """A rank's device MUST have no process of another session on it, and what decides the last bits of its results
    MUST be pinned down: TF32 off, sums of products in fp32, deterministic algorithms, cuBLAS's workspace.

    Also how much memory cuBLAS and NCCL take for themselves, as figures.
    """
    for rank, found in enumerate(measure("device_memory:surroundings", cell)):
        foreign = found["foreign_processes"]
        compare.count(len(foreign), name="foreign processes", expected=0, detail=f"{foreign}", unit="processes")
        wrong = [name for name, pinned in found["pinned"].items() if not pinned]
        compare.count(len(wrong), name="knobs not pinned", expected=0, detail=", ".join(wrong), unit="knobs")
        for name in ("cublas_workspace_bytes", "nccl_buffer_bytes", "free_bytes"):
            report(f"{name} of rank {rank}", found[name], unit="bytes")
