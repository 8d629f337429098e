"""Scopes of laws: where each law holds, as its test declares it, and gaps: cells in the MUST that it cannot judge yet.

Declarations are read from the source of the tests, which import torch: a process that only plans does not.
`python -m conformance coverage` counts the gaps of each law.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from conformance.plan.cells import Cell
from conformance.plan.selection import Facts, Selection, SelectionError, parse
from conformance.project import test_files
from reference_trainer.strict_yaml import allowed


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
        "precision != fp32 or float8 != none",
        "with the number of micro-batches the roundings change, not their order alone",
    ),
    "16-bit-factor": Gap(
        "precision not in (bf16-mp, fp16-mp)", "the factor between two errors is derived for sums in fp32 alone"
    ),
    "float8-roundings": Gap(
        "float8 != none",
        "the distance from fp32 is derived for fp16 alone; PAR-2 judges the roundings of float8 in bits",
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
    "balance-of-micro-batches": Gap(
        "model = experts", "experts are balanced over each micro-batch, not over the large batch; PAR-1 judges them"
    ),
    "pipelines": Gap("pp > 1", "the law expects every rank to hold the full model, in one forward and one backward"),
    "experts-in-16-bit": Gap(
        "model = experts and precision != fp32",
        "one process in fp32 sends other tokens to an expert than a run in 16 bits; PAR-2 and PAR-3 judge the latter",
    ),
    "experts-unnamed": Gap(
        "model = experts",
        "the law leaves out a parameter whose name this model does not have; CKPT-1 and CKPT-2 judge its state",
    ),
    # Cells that would run for one law alone.
    "norms-on-one-shard": Gap(
        "norms_in_tp = false and dp_shard = 1",
        "that norms are on a mesh of their own shows in reductions over dp_shard, which need two shards",
    ),
    "second-run": Gap(
        "features > 2 or model = large",
        "the law needs another run of each cell; laws on the numbers of one run judge it",
    ),
    "rerun-cost-combined": Gap(
        # What an evaluation must not change shows in no other law.
        "features > 2 and evaluation = none and (pp = 1 or features > 4 or model != cut) or model = large",
        "the law needs another run of each cell; laws on the numbers of one run judge it",
    ),
    "second-build": Gap(
        "features > 3 or model = large", "the law needs another run of each cell; INIT-2 judges its weights"
    ),
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
    "streams-alike": Gap(
        "saved_on != none or tied_embeddings = true or batches = uneven",
        "the law runs each cell under several schedules; streams are used as on the cells without these options",
    ),
    "large-neighbours": Gap("model = large", "the law needs runs of neighbours; INIT-2 judges the sizes of this model"),
    "large-world-neighbours": Gap("features > 0 and world > 4", "the law needs two more runs of each cell"),
    "reshard-modes-combined": Gap("features > 3", "MEM-1 judges the memory of these cells"),
}
"""Gaps by name, as `@law(..., gaps=[...])` names them."""


_DECORATOR = "law"
_DECLARED = ("where", "gaps", "numbers", "own_run", "of")
Trainers = Literal["reference trainer", "any trainer"]
"""Trainers that a law is about: the reference trainer, or the trainer that `conformance judge` is given."""


@dataclass(frozen=True)
class Scope:
    """Cells on which a law is judged."""

    law: str
    """Id such as `PAR-1`."""
    where: Selection
    """Cells of which the law's MUST speaks."""
    gaps: tuple[Gap, ...] = ()
    """Cells of which the MUST speaks and which the law cannot judge yet."""
    of: Trainers = "reference trainer"
    numbers: bool = False
    """True if the law judges the numbers that a run computes: gradients, norms, updates or bits of its state."""
    own_run: bool = False
    """True if the law needs a further run of a cell, as long as its training, see `Profile.own_runs`."""

    def holds(self, cell: Cell) -> bool:
        """Return whether the law is judged on the cell."""
        return self.judges(cell.facts())

    def judges(self, facts: Facts) -> bool:
        """Return whether the law is judged on a cell with these facts, which are computed once for many laws."""
        return self.where.holds(facts) and self._gap(facts) is None

    def gap(self, facts: Facts) -> Gap | None:
        """Return the first gap that leaves out a cell of which the MUST speaks; None if there is none."""
        return self._gap(facts) if self.where.holds(facts) else None

    def _gap(self, facts: Facts) -> Gap | None:
        return next((gap for gap in self.gaps if gap.selection.holds(facts)), None)


def scope(
    law: str,
    *,
    where: str,
    gaps: Sequence[str] = (),
    numbers: bool = False,
    own_run: bool = False,
    of: Trainers = "reference trainer",
) -> Scope:
    """Return a scope; raises ValueError, with the law, for an expression that cannot be compiled and an unknown gap."""
    for name in gaps:
        if name not in GAPS:
            raise ValueError(f"law {law}: unknown gap `{name}`{allowed(name, GAPS)}")
    try:
        return Scope(law, parse(where), tuple(GAPS[name] for name in gaps), of, numbers, own_run)
    except SelectionError as error:
        raise ValueError(f"law {law}: {error}") from None


def in_order(law: str) -> tuple[bool, str, int]:
    """Return a key to sort laws by: preconditions come first, and `PAR-10` comes after `PAR-9`.

    Laws of any trainer, whose ids are words, come last, in the order in which they are declared. A case whose worker
    died before its law was known has the law `?`.
    """
    if not law[:1].isupper():
        return True, "~", 0
    family, _, number = law.partition("-")
    return family != "ENV", family, int(number)


def declared_scopes(directory: Path, *, of: Trainers = "reference trainer") -> dict[str, Scope]:
    """Return the scopes of the laws of these trainers that tests in a directory declare, by id of the law, in order.

    Raises ValueError for a law that is declared twice, or otherwise than by literals.
    """
    return {law: each for law, each in _scopes(directory).items() if each.of == of}


@cache
def _scopes(directory: Path) -> dict[str, Scope]:
    scopes: dict[str, Scope] = {}
    for file in test_files(directory):
        for call in _declarations(ast.parse(file.read_text())):
            declared = _scope_of(call, f"{file.name}:{call.lineno}")
            if declared.law in scopes:
                raise ValueError(f"{file.name}:{call.lineno}: law {declared.law} is declared twice")
            scopes[declared.law] = declared
    return {law: scopes[law] for law in sorted(scopes, key=in_order)}


def _declarations(module: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of the decorator `law`."""
    for function in (node for node in module.body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == _DECORATOR:
                yield decorator


def _scope_of(call: ast.Call, place: str) -> Scope:
    wanted = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in _DECLARED}
    try:
        law = ast.literal_eval(call.args[0])
        declared = {str(name): ast.literal_eval(value) for name, value in wanted.items()}
        where = declared.pop("where")
    except (IndexError, KeyError, ValueError):
        raise ValueError(
            f"{place}: write id, `where`, `gaps`, `numbers`, `own_run` and `of` of a law as literals"
        ) from None
    return scope(law, where=where, **declared)
