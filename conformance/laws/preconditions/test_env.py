"""ENV: preconditions of the suite, judged first; if one of them fails, no other verdict means anything."""

import re
from collections.abc import Iterable, Mapping

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import operands_of_emulation
from conformance.experiments.environment import RankEnvironment, pinned_variables, probe, surroundings
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles.emulation import emulated_step
from conformance.oracles.initialisation import initial_weights
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.substrates import CUDA

_MIN_AVAILABLE_BYTES = 1 << 30
"""Minimum for the smallest worlds, chosen and not derived: pytest and the oracles need memory too."""
_RANK_BYTES = 300 << 20
"""Peak resident set of a rank in a run of the matrix's model: 284 to 289 MiB measured on dp4 and dp2-tp2 (torch 2.13.0,
CPU), of which 55 MiB are its own; shared libraries are counted for each rank."""
_MAX_CLOCK_SPREAD_S = 5.0
"""Largest difference of the ranks' clocks after a barrier; a larger one means that ranks, whose failures are ordered by
time, do not share a clock."""


@law("ENV-1", where="features = 0", reference="https://docs.pytorch.org/docs/stable/distributed.html")
def test_collectives_are_exact_in_every_dtype(measure: Measure, cell: Cell) -> None:
    """all_reduce, all_gather, reduce_scatter and broadcast MUST be exact on small integers in every dtype.

    Wrong if the backend is broken, an interface is misconfigured, or ranks have wrong numbers.
    """
    world = cell.world_size
    numbers = [[rank + 1 + i for i in range(world)] for rank in range(world)]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    ranks = _environments(measure, cell)
    for rank, facts in enumerate(ranks):
        expected = {
            "all_reduce": sums,
            "all_gather": [number for rank_numbers in numbers for number in rank_numbers],
            "reduce_scatter": [sums[rank]],
            "broadcast": numbers[world - 1],
        }
        for dtype, results in facts.collectives.items():
            assert results == expected, f"rank {rank}, {dtype}: measured {results}, expected {expected}"
    dtypes = len(ranks[0].collectives)
    report("dtypes", dtypes, kind="exact", lower=dtypes, unit="dtypes with exact collectives")


@law("ENV-2", where="features = 0", reference="https://docs.pytorch.org/docs/stable/notes/randomness.html")
def test_ranks_run_the_same_software_in_the_same_state(measure: Measure, cell: Cell) -> None:
    """All ranks MUST run the same torch with the same backend, number of threads and global state.

    A precondition, for jobs whose ranks start on several hosts: those of one host are forked from one process.
    """
    ranks = _environments(measure, cell)
    for fact in ("torch", "python", "numpy", "threads", "default_dtype", "grad_enabled", "backend"):
        values = {str(getattr(facts, fact)) for facts in ranks}
        assert len(values) == 1, f"{fact} differs between ranks: {sorted(values)}"
    assert ranks[0].default_dtype == "torch.float32"
    assert ranks[0].grad_enabled
    compare.count(len({facts.pid for facts in ranks}), name="processes", expected=len(ranks), unit="processes")


@law("ENV-3", where="features = 0", reference="https://docs.python.org/3/library/time.html#time.monotonic")
def test_machine_has_memory_and_one_clock(measure: Measure, cell: Cell) -> None:
    """The machine MUST have memory for a run, and one monotonic clock for all ranks.

    A precondition: without it, runs are killed, and the rank that failed first is not known.
    """
    ranks = _environments(measure, cell)
    needed = max(_MIN_AVAILABLE_BYTES, cell.world_size * _RANK_BYTES)
    available = min(facts.available_memory_bytes for facts in ranks)
    report("available memory", available, kind="memory", lower=needed, unit="bytes")
    assert available >= needed, f"{available} bytes of memory available, need {needed}"
    clocks = [facts.monotonic_s for facts in ranks]
    spread = max(clocks) - min(clocks)
    report("clock spread", spread, kind="time", lower=0.0, upper=_MAX_CLOCK_SPREAD_S, unit="s")
    assert spread <= _MAX_CLOCK_SPREAD_S, f"clocks after a barrier are {spread:.1f} s apart: {clocks}"


def _environments(measure: Measure, cell: Cell) -> list[RankEnvironment]:
    """Return the facts of each rank of a world of the cell's size."""
    return measure(probe, Cell(mesh=f"dp{cell.world_size}"))


@law("ENV-4", where="features = 0", reference="https://docs.nvidia.com/deploy/nvml-api/", substrates=CUDA)
def test_cuda_devices_are_free_and_pinned(measure: Measure, cell: Cell) -> None:
    """A rank's device MUST have no process of another session on it, and every knob of bitwise determinism MUST be
    pinned, in the ranks and where the process that judges emulates them: TF32 off, sums of products in fp32,
    deterministic algorithms, cuBLAS's workspace.

    The memory that cuBLAS and NCCL take for themselves is reported without bounds.
    """
    for rank, facts in enumerate(measure(surroundings, cell)):
        if not facts.sees_itself:
            raise Unsupported(
                "the driver names processes by ids of another namespace: whether others use the device is not seen; "
                "start the container with the host's (docker run --pid=host)"
            )
        foreign = facts.foreign_processes
        compare.count(len(foreign), name="foreign processes", expected=0, detail=f"{foreign}", unit="processes")
        _require_pinned(facts.pinned, where=f"rank {rank}")
        for name in ("cublas_workspace_bytes", "nccl_buffer_bytes", "free_bytes"):
            report(f"{name} of rank {rank}", getattr(facts, name), kind="memory", unit="bytes")
    emulated = emulated_step(cell.config, initial_weights(cell.config), step=0, device="cuda")
    _require_pinned(emulated.knobs | pinned_variables(), where="the process that judges")


@law(
    "ENV-5",
    where="compile = false",
    gaps=["integer-model", "large-models"],
    reference="https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
)
def test_emulation_has_the_operands_of_the_run(run: Run, cell: Cell) -> None:
    """Operators that add numbers up MUST get operands of the same dtypes, shapes, strides and alignments in a run and
    in its emulation by one process.

    A precondition of every bound that is 0: a library chooses by these in which order it adds. Both sides are judged in
    the first step; how often an operator is called does not count, nor, on the simulated device, the name of a fused
    attention, all of which are one kernel of the CPU, nor in a ring the strides of its operands.
    """
    record = run(cell)
    measured = {operands for facts in record.ranks for operands in facts.operands}
    expected = operands_of_emulation(record)
    if record.device_type == "sim":
        measured, expected = (_attention_merged(operands, cell) for operands in (measured, expected))
    if not expected:
        raise RuntimeError(f"cell {cell.id}: the emulation has handed nothing to operators that add up")
    for name, only in (("in the run alone", measured - expected), ("in the emulation alone", expected - measured)):
        detail, unit = "; ".join(sorted(only)[:4]), f"operands, of {len(expected)}"
        compare.count(len(only), name=f"operands {name}", expected=0, detail=detail, unit=unit)


@law(
    "ENV-6",
    where="id = pp2-dp2-fp32-default-meta-cut-acc4 or features = 0 or (features = 1 and (compile = true or "
    "activation_checkpointing != none or tied_embeddings = true or sequence_parallel = false or offload = cpu))",
    own_run=True,
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html",
)
def test_taps_change_no_bit(run: Run, cell: Cell) -> None:
    """A run with taps on all modules MUST leave every tensor that the run without taps leaves, in every bit, and issue
    the same collectives.

    A precondition of every location of a fault: otherwise the run that is explained is not the one that failed.
    """
    plain, tapped = run(cell), run(cell, tapped=True)
    for facts, other in zip(plain.ranks, tapped.ranks, strict=True):
        wrong = [key for key, bits in facts.fingerprints.items() if other.fingerprints.get(key) != bits]
        detail, unit = f"rank {facts.rank}: {', '.join(wrong[:4])}", f"tensors, of {len(facts.fingerprints)}"
        compare.count(len(wrong), name="changed by taps", expected=0, detail=detail, unit=unit)
        if facts.collectives != other.collectives:
            raise ConformanceFailure(f"rank {facts.rank} issued other collectives with taps")
    if (plain.losses, plain.grad_norms) != (tapped.losses, tapped.grad_norms):
        raise ConformanceFailure(f"losses {plain.losses} are {tapped.losses} with taps, or norms differ")


def _attention_merged(operands: Iterable[str], cell: Cell) -> set[str]:
    """Return operands with one name for all fused attentions, and one for their gradients; of rings without strides."""
    named = {
        re.sub(r"^aten::_scaled_dot_product_[a-z_]+_attention(_for_cpu)?", "attention", noted) for noted in operands
    }
    if cell.config.mesh.cp == 1:
        return named
    return {re.sub(r"\([0-9, ]*\)", "", noted) if noted.startswith("attention") else noted for noted in named}


def _require_pinned(pinned: Mapping[str, bool], *, where: str) -> None:
    __tracebackhide__ = True
    wrong = [name for name, is_pinned in pinned.items() if not is_pinned]
    detail = f"{where}: {', '.join(wrong)}"
    compare.count(len(wrong), name="knobs not pinned", expected=0, detail=detail, unit="knobs")
