"""Gaps: cells in the MUST of laws that the laws cannot judge yet, each with the reason.

`python -m conformance coverage` counts the gaps of each law.
"""

from dataclasses import dataclass
from functools import cached_property

from conformance.plan.selection import Selection, parse


@dataclass(frozen=True)
class Gap:
    """Cells that a law leaves out."""

    cells: str
    """Selection, see `conformance.plan.selection`."""
    reason: str
    """Reason for which the law cannot judge them."""

    @cached_property
    def selection(self) -> Selection:
        """The compiled selection."""
        return parse(self.cells)


GAPS = {
    # Numbers that no oracle predicts.
    "masks-of-micro-batches": Gap("dropout > 0.0", "micro-batches draw other masks than one large batch"),
    "resumed": Gap(
        "saved_on != none", "the steps before the checkpoint are in no record; CKPT-1 to CKPT-3 judge steps"
    ),
    "compiled-roundings": Gap(
        "compile = true and precision != fp32", "inductor keeps in fp32 what the emulation rounds; PAR-2 judges it"
    ),
    "16-bit-micro-batches": Gap(
        "precision != fp32", "with the number of micro-batches the roundings change, not their order alone"
    ),
    "16-bit-factor": Gap(
        "precision not in (bf16-mp, fp16-mp)", "the factor between two errors is derived for sums in fp32 alone"
    ),
    "skipped-first-step": Gap(
        "loss_scale = overflows",
        "the law judges the first step, whose gradients have overflowed; PAR-2 judges the others",
    ),
    "float-model": Gap(
        "optimizer != sgd or clip != 0.0 or steps != 1 or precision != fp32",
        "only the first gradients, and the first update of SGD without clipping, are whole numbers",
    ),
    "integer-model": Gap(
        "model = integer",
        "oracles of dtypes and of rounding describe the float model; PAR-9 judges whole numbers in bits",
    ),
    "pipelines": Gap("pp > 1", "the law expects every rank to hold the full model, in one forward and one backward"),
    # Cells that would run for one law alone.
    "norms-on-one-shard": Gap(
        "norms_in_tp = false and dp_shard = 1",
        "that norms are on a mesh of their own shows in reductions over dp_shard, which need two shards",
    ),
    "second-run": Gap(
        "features > 2", "the law needs another run of each cell; laws on the numbers of one run judge it"
    ),
    "rerun-cost-combined": Gap(
        "features > 2 and (pp = 1 or features > 4 or model != cut)",
        "the law needs another run of each cell; laws on the numbers of one run judge it",
    ),
    "second-build": Gap("features > 3", "the law needs another run of each cell; INIT-2 judges its weights"),
    "repetition": Gap(
        "features > 1 or features = 1 and dropout = 0.0 and compile = false and precision != bf16-mp",
        "the law runs each cell twice, and what differs between runs shows without other features too",
    ),
    "delay-cost": Gap(
        "pin_memory = false and (features > 1 and (pp = 1 or features > 3 or model != cut or saved_on != none) "
        "or features = 1 and reshard != never and precision = fp32 and offload = none)",
        "the law runs each cell once more for each kind of delay",
    ),
    "large-models": Gap(
        "model in (deep, half, wide)", "a run takes many times as long; laws on memory judge these models in simulation"
    ),
    "large-world-neighbours": Gap("features > 0 and world > 4", "the law needs two more runs of each cell"),
    "reshard-modes-combined": Gap("features > 3", "MEM-1 judges the memory of these cells"),
}
"""Gaps by name, as `@law(..., gaps=[...])` names them."""
