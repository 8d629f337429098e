"""Parts of full tensors that ranks hold, and the names of ranks."""

import pytest
import torch

from conformance.instruments.taps import PARTIAL, REPLICATED
from conformance.localisation.layouts import Held, expected_shard, is_partial
from conformance.localisation.ranks import Ranks
from tests.support.taps import tap_of

RANKS = Ranks(
    [{"dp_shard": 0, "tp": 0}, {"dp_shard": 0, "tp": 1}, {"dp_shard": 1, "tp": 0}, {"dp_shard": 1, "tp": 1}],
    [0, 0, 1, 1],
)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (0, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_plain_tensor_is_cut_where_the_sizes_add_up(sizes: tuple[int, int], dim: int) -> None:
    full = torch.arange(20.0).view(4, 5).movedim(0, dim)
    shards = torch.split(full, list(sizes), dim)
    group = [Held(tap_of(shard), shard) for shard in shards]
    for index, shard in enumerate(shards):
        found = expected_shard(full, group, index)
        assert found is not None
        assert torch.equal(found, shard)


def test_a_tensor_of_the_full_shape_is_a_copy_or_a_term() -> None:
    full = torch.ones(4)
    group = [Held(tap_of(full, placements={"tp": PARTIAL}), full)] * 2
    assert expected_shard(full, group, 1) is full
    assert is_partial(group[0].tap)
    assert not is_partial(tap_of(full, placements={"tp": REPLICATED}))
    assert not is_partial(tap_of(full))


def test_a_shape_that_no_layout_fits_is_told() -> None:
    shard = torch.ones(3)
    assert expected_shard(torch.ones(4), [Held(tap_of(shard), shard)] * 2, 0) is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 2, 3], "all ranks"),
        ([1, 3], "tp rank 1 of 2"),
        ([2, 3], "dp_shard rank 1 of 2"),
        ([0, 1, 2], "ranks 0, 1, 2 of 4"),
    ],
)
def test_ranks_are_named_by_their_places(ranks: list[int], text: str) -> None:
    assert RANKS.text(ranks) == text


def test_groups_of_ranks() -> None:
    assert RANKS.peers(3) == [2, 3]
    assert RANKS.group(3, "dp_shard") == [1, 3]
    assert RANKS.group(0, "world") == [0, 1, 2, 3]
    assert RANKS.group(0, "pp") == []
    assert RANKS.sharding_dimensions() == ["dp_shard", "tp"]
    assert RANKS.reduction_dimensions() == "dp_shard"
