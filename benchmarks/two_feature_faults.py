"""Faults that need two features: `python -m benchmarks.two_feature_faults [--only NAME ...] [--write]`.

Each fault is one of the catalogue, in force only where a cell has both features. All laws on numbers judge one
combined cell, whose other features have nothing to do with the fault. Prints for how many of the laws that fail the
search for the smallest failing cell names just the two, and its cost: cases judged and seconds, for the first law and
for all.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.defects.catalogue import injected, require_known
from conformance.defects.injection import replaced_call
from conformance.detection.case_judge import CaseJudge, judge_case, the_matrix
from conformance.judge.judge import Judged
from conformance.judge.shrinking import Shrunk
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import AxisValue, Cell
from conformance.plan.matrix import Case
from conformance.pytest_plugin.shrinking import Shrinker
from conformance.report.schema import CaseResult
from conformance.report.shared_axes import spelled
from conformance.run.pool import Pools
from reference_trainer.config import TrainerConfig

DOCUMENT = PROJECT / "docs" / "performance.md"
LIMIT_S = 600.0
HEADERS = ["fault", "features", "needs", "laws that name these", "judged", "first law", "seconds", "in all"]
COMBINED = Cell(
    reshard="except-last",
    init="layerwise",
    model="even",
    optimizer="sgd",
    clip=0.1,
    norm_type="3",
    foreach_clip=False,
    accumulation=2,
    forward_prefetch=1,
    backward_prefetch=1,
    offload="cpu",
    activation_checkpointing="full",
    tied_embeddings=True,
)
"""Cell of 13 features, of which a fault changes two to its own."""
TRAINER = "reference_trainer.train:Trainer"
Condition = Callable[[TrainerConfig], bool]


class Fault(NamedTuple):
    """Fault that shows with two features."""

    defect: str
    """Id of the defect of the catalogue."""
    features: Mapping[str, AxisValue]
    """The two features, by axis."""
    holds: Condition
    """Predicate of the configurations with both features."""
    method: str = "train_step"
    """Method of the trainer in which the defect is in force."""


def _in_force(fault: Fault) -> AbstractContextManager[None]:
    """Put a defect in force while a trainer whose configuration has both features is built, or trains a step."""

    def call(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if fault.method == "__init__" else trainer.config
        with injected(fault.defect if fault.holds(config) else None):
            return original(trainer, *args, **kwargs)

    return replaced_call(TRAINER, fault.method, call)


FAULTS = {
    "summed_if_offloaded_and_accumulated": Fault(
        "grads-summed",
        {"offload": "cpu", "accumulation": 2},
        lambda config: config.offload == "cpu" and config.accumulation > 1,
    ),
    "summed_by_sgd_with_the_largest_as_norm": Fault(
        "grads-summed",
        {"norm_type": "inf", "optimizer": "sgd"},
        lambda config: config.optimizer.norm_type == "inf" and config.optimizer.name == "sgd",
    ),
    "not_averaged_if_never_resharded_and_recomputed": Fault(
        "loss-dp-factor-forgotten",
        {"reshard": "never", "activation_checkpointing": "full"},
        lambda config: config.reshard == "never" and config.activation_checkpointing == "full",
    ),
    "same_data_if_built_in_full_for_long": Fault(
        "wrong-data-per-rank",
        {"init": "full", "steps": 8},
        lambda config: config.init == "full" and config.steps == 8,
    ),
    "own_tokens_if_tied_and_accumulated": Fault(
        "loss-local-token-mean",
        {"tied_embeddings": True, "accumulation": 2},
        lambda config: config.model.tied_embeddings and config.accumulation > 1,
    ),
    "same_data_if_prefetched_both_ways": Fault(
        "wrong-data-per-rank",
        {"forward_prefetch": 1, "backward_prefetch": 2},
        lambda config: config.forward_prefetch == 1 and config.backward_prefetch == 2,
    ),
    "parameter_dropped_by_sgd_if_offloaded": Fault(
        "opt-drop-params",
        {"optimizer": "sgd", "offload": "cpu"},
        lambda config: config.optimizer.name == "sgd" and config.offload == "cpu",
        method="__init__",
    ),
    "wrong_weights_if_layerwise_and_tied": Fault(
        "init-std-wrong",
        {"init": "layerwise", "tied_embeddings": True},
        lambda config: config.init == "layerwise" and config.model.tied_embeddings,
        method="__init__",
    ),
    "summed_in_bf16_without_clipping": Fault(
        "grads-summed",
        {"precision": "bf16-mp", "clip": 0.0},
        lambda config: config.precision == "bf16-mp" and config.optimizer.max_norm == 0.0,
    ),
    "summed_if_recomputed_with_parallel_loss": Fault(
        "grads-summed",
        {"loss_parallel": True, "activation_checkpointing": "selective", "mesh": "dp2-tp2"},
        lambda config: config.loss_parallel and config.activation_checkpointing == "selective",
    ),
}
# Names that `--defect FILE.py:NAME` finds.
globals().update({name: lambda fault=fault: _in_force(fault) for name, fault in FAULTS.items()})


def combined_cell(features: Mapping[str, AxisValue]) -> Cell:
    """Return the combined cell with these features, and otherwise with its own."""
    return COMBINED.but(**features)


class Found(NamedTuple):
    """Result of the search for one law that fails."""

    law: str
    shrunk: Shrunk
    judged: int
    seconds: float

    def is_exact(self, features: Mapping[str, AxisValue]) -> bool:
        """Return whether the features are named and no others, apart from what no case of the law can do without."""
        named = self.shrunk.features
        return self.shrunk.complete and named.items() <= features.items() <= (named | self.shrunk.bound).items()


def search(name: str, cell: Cell, pools: Pools, directory: Path) -> Iterator[Found]:
    """Judge the laws on numbers on a cell with a fault; yields the smallest cell of each that fails."""
    judge = CaseJudge(directory, pools)
    store = judge.store(defect=require_known(f"{__file__}:{name}"))
    laws = [law for law in the_matrix().laws_on(cell) if the_matrix().scopes[law].numbers]
    judged = [judge_case(Case(law, cell), store) for law in laws]
    results = [result_of(case) for case in judged]
    shrinker = Shrinker(the_matrix(), results, lambda case, _limit_s: judge_case(case, store), budget_s=LIMIT_S)
    guesses: list[Cell] = []
    for case in judged:
        if case.verdict == Verdict.FAIL:
            start_s, before = time.monotonic(), shrinker.judged
            shrunk = shrinker.search(case.case, guesses=guesses)
            guesses.append(shrunk.cell)
            yield Found(case.case.law, shrunk, shrinker.judged - before, time.monotonic() - start_s)


def result_of(judged: Judged) -> CaseResult:
    """Return what a report has of a judged case, as far as the search reads it."""
    case = judged.case
    return CaseResult(
        id=case.id,
        law=case.law,
        must="",
        cell=case.cell.id,
        substrate=judged.substrate,
        verdict=judged.verdict.value,
        reason=judged.reason,
        duration_s=0.0,
        wait_s=judged.wait_s,
        run_s=judged.run_s,
        measured=judged.measured,
        repro="",
        nodeid="",
    )


def row_of(name: str, pools: Pools) -> list[str]:
    """Return the row of a fault in the table."""
    fault = FAULTS[name]
    cell = combined_cell(fault.features)
    with tempfile.TemporaryDirectory() as directory:
        found = list(search(name, cell, pools, Path(directory)))
    exact = [of_law for of_law in found if of_law.is_exact(fault.features)]
    for of_law in found:
        print(
            name,
            of_law.law,
            of_law.shrunk.features,
            of_law.shrunk.bound,
            of_law.judged,
            f"{of_law.seconds:.1f}",
            flush=True,
        )
    return [
        name.replace("_", " "),
        str(cell.features),
        " and ".join(f"{axis} = {spelled(value)}" for axis, value in fault.features.items()),
        f"{len(exact)} of {len(found)}",
        str(sum(of_law.judged for of_law in found)),
        str(found[0].judged if found else 0),
        f"{found[0].seconds if found else 0.0:.1f}",
        f"{sum(of_law.seconds for of_law in found):.1f}",
    ]


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="What the search for the smallest failing cell names, and its cost.")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="faults (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    options = parser.parse_args()
    with Pools() as pools:
        rows = [row_of(name, pools) for name in options.only]
    table = tabulate(rows, headers=HEADERS, tablefmt="github")
    text = f"`python -m benchmarks.two_feature_faults --write`, torch {torch.__version__}:\n\n{table}"
    print(text)
    if options.write:
        write_block(DOCUMENT, "two-feature-faults", text)


if __name__ == "__main__":
    main()
