"""Shards: together all cases, none twice, and the same ones each time."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.detection.bench import the_matrix
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.pytest_plugin.shards import Shard, parse_shard

CASES = st.lists(st.builds(Case, st.sampled_from(["PAR-1", "PAR-2", "MP-1"]), st.builds(Cell, seed=st.integers(0, 30))))


@given(cases=CASES, data=st.data())
def test_shards_are_a_partition_and_keep_cells_whole(cases: list[Case], data: st.DataObject) -> None:
    cells = len({case.cell for case in cases})
    count = data.draw(st.integers(1, max(1, cells)))
    parts = [Shard(index, count).of(cases) for index in range(1, count + 1)]
    assert Counter(case for part in parts for case in part) == Counter(cases)
    assert sum(len({case.cell for case in part}) for part in parts) == cells
    sizes = [len({case.cell for case in part}) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("profile", ["smoke", "pr"])
def test_the_shards_of_a_profile_are_the_profile(profile: str) -> None:
    cases = the_matrix().cases(profile)
    parts = [case for index in range(1, 8) for case in Shard(index, 7).of(cases)]
    assert sorted(parts, key=cases.index) == list(cases)


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/0", "1/3/5", "a/b", " 1/2", "1.0/2"])
def test_what_is_not_a_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write I/N with 1 <= I <= N, such as 2/5"):
        parse_shard(text)


def test_more_shards_than_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 cells, ask for fewer shards"):
        Shard(1, 2).of([Case("PAR-1", Cell()), Case("PAR-2", Cell())])
