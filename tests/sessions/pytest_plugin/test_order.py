"""Shards are a partition of a session's cases; cells of one kind follow each other, the longest first."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.pytest_plugin.cases import RunOrder, Shard, parse_shard

CASES = st.lists(st.builds(Case, st.sampled_from(["PAR-1", "PAR-2", "MP-1"]), st.builds(Cell, seed=st.integers(0, 30))))


@given(cases=CASES, data=st.data())
def test_shards_are_a_partition_and_keep_cells_together(cases: list[Case], data: st.DataObject) -> None:
    cells = len({case.cell for case in cases})
    count = data.draw(st.integers(1, max(1, cells)))
    shards = [Shard(index, count).of(cases) for index in range(1, count + 1)]
    assert Counter(case for shard in shards for case in shard) == Counter(cases)
    assert sum(len({case.cell for case in shard}) for shard in shards) == cells
    sizes = [len({case.cell for case in shard}) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1/3/5", " 1/2", "1.0/2"])
def test_parse_shard_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"write I/N with 1 <= I <= N, such as 2/5"):
        parse_shard(text)


def test_cells_whose_ranks_can_be_the_same_processes_follow_each_other() -> None:
    """On one device each change of kind costs new contexts and communicators."""
    cells = [Cell(mesh="dp2", model=model, seed=seed) for seed in range(3) for model in ("tiny", "even")]
    cases = [Case("PAR-1", cell) for cell in cells]
    seconds = {case.cell.id: float(number) for number, case in enumerate(cases)}
    grouped = RunOrder(cases, seconds, kind=lambda cell: cell.model)
    assert [case.cell.model for case in sorted(cases, key=grouped.key)] == ["even"] * 3 + ["tiny"] * 3
    longest_first = sorted(cases, key=RunOrder(cases, seconds).key)
    assert longest_first == cases[::-1]


def test_workers_on_processors_alternate_between_cells() -> None:
    """Cases of one cell in a row would make workers wait for the one that runs the cell."""
    cells = [Cell(mesh=mesh) for mesh in ("hsdp2x2", "dp2", "tp2")]
    cases = [Case(law, cell) for cell in cells for law in ("MP-1", "ENV-1", "PAR-1")]
    seconds = {cell.id: number for number, cell in enumerate(cells, 1)}

    def ordered(workers: int, **options: Callable[[Cell], str]) -> list[tuple[str, str]]:
        order = RunOrder(cases, seconds, workers=workers, **options)
        return [(case.law, case.cell.mesh) for case in sorted(cases, key=order.key)]

    alternating = ordered(2)
    assert [law for law, _ in alternating[:3]] == ["ENV-1"] * 3, "preconditions come first"
    assert [mesh for _, mesh in alternating[3:]] == ["tp2", "dp2"] * 2 + ["hsdp2x2"] * 2, "the longest come first"
    assert [mesh for _, mesh in ordered(1)[3:]] == ["hsdp2x2"] * 2 + ["dp2"] * 2 + ["tp2"] * 2
    assert ordered(2, kind=lambda _: "") == ordered(1), "on devices the ranks of a world stay"
