"""Table of the features of training that meet FSDP2: the cells that have each, and the laws that judge them.

Cells and laws are those of the lock file, defects those of the catalogue.
"""

from collections import Counter
from typing import NamedTuple

from tabulate import tabulate

from conformance.defects.catalogue import Signature, signatures
from conformance.plan.content import compiled
from conformance.plan.matrix import Matrix


class Feature(NamedTuple):
    """Feature of a run, and the cells that have it."""

    name: str
    cells: str
    """Cells as `--cells` takes them."""


FEATURES = (
    Feature("experts", "model = experts"),
    Feature("experts with tensor parallelism", "model = experts and tp > 1"),
    Feature("context parallelism", "cp > 1"),
    Feature("float8", "float8 != none"),
    Feature("a compiled model", "compiled = model"),
    Feature("frozen and thawed groups", "frozen != none"),
    Feature("several forward passes before a backward", "passes > 1"),
    Feature("evaluation between micro-batches", "evaluation != none"),
    Feature("blocks that some passes leave out", "skipped != none"),
    Feature("`Shard(1)` by `shard_placement_fn`", "shard_placement != rows"),
    Feature("gradient division factors by group", "gradient_divisor != ranks"),
)
_PROFILES = ("smoke", "pr", "nightly")
_HEADERS = ("feature", "cells", "laws", "by family", "defects")
_INTRODUCTION = f"""## Features by laws

What is combined with FSDP2 beside dense training: cells of the profiles {" / ".join(_PROFILES)}, laws that judge such
cells in nightly, and defects that show on such cells alone, each with a benign twin."""


def section(matrix: Matrix) -> str:
    """Return the section of docs/torch_coverage.md: a row for each feature."""
    rows = [_row(matrix, feature) for feature in FEATURES]
    return f"{_INTRODUCTION}\n\n{tabulate(rows, headers=_HEADERS, tablefmt='github', disable_numparse=True)}\n"


def _row(matrix: Matrix, feature: Feature) -> list[str]:
    has = compiled(feature.cells)
    cases = {profile: [case for case in matrix.cases(profile) if has(case.cell)] for profile in _PROFILES}
    numbers = [len({case.cell.id for case in each}) for each in cases.values()]
    laws = {case.law for case in cases["nightly"]}
    families = Counter(law.partition("-")[0] for law in laws)
    return [
        f"{feature.name}: `{feature.cells}`",
        " / ".join(map(str, numbers)),
        str(len(laws)),
        ", ".join(f"{family} {number}" for family, number in sorted(families.items())),
        str(sum(_shows_on(matrix, defect, feature) for defect in signatures())),
    ]


def _shows_on(matrix: Matrix, defect: Signature, feature: Feature) -> bool:
    """Return whether all cells on which a defect shows have the feature."""
    if not defect.cells:
        return False
    shows, has = compiled(defect.cells), compiled(feature.cells)
    cells = [cell for cell in matrix.cells.values() if shows(cell)]
    return bool(cells) and all(map(has, cells))
