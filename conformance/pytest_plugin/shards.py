"""`--shard I/N`: the same profile divided among N machines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.plan.matrix import Case


@dataclass(frozen=True)
class Shard:
    """One of `count` parts, counted from 1."""

    index: int
    count: int

    def of(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """The cases of each `count`-th cell: all cases of a cell share its run, so they stay together, and cells that
        are alike, neighbours in the matrix, are spread. Raises ValueError if there are fewer cells than parts."""
        cells = dict.fromkeys(case.cell.id for case in cases)
        if cells and self.count > len(cells):
            raise ValueError(f"--shard {self.index}/{self.count}: there are {len(cells)} cells, ask for fewer shards")
        mine = {cell for place, cell in enumerate(cells) if place % self.count == self.index - 1}
        return tuple(case for case in cases if case.cell.id in mine)


def parse_shard(text: str) -> Shard:
    """`2/5` is the second of five. Raises ValueError for anything else."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"--shard {text}: write I/N with 1 <= I <= N, such as 2/5")
    return Shard(int(found[1]), int(found[2]))
