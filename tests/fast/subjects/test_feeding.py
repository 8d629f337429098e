"""Data of an owner's loop: a sampler whose share is not that of the rank is refused."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from conformance.subjects.feeding import Feed
from conformance.subjects.protocol import SubjectMistake
from conformance.subjects.reference import promoted


def loader(*, replicas: int, rank: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.arange(8))
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas=replicas, rank=rank))


def test_a_sampler_of_the_rank_is_replaced() -> None:
    feed = Feed([["a", "b"], ["c"]], data_rank=1, data_ranks=2)
    with feed.in_place_of_loaders():
        assert list(loader(replicas=2, rank=1)) == ["a", "b", "c"]


@pytest.mark.parametrize(("replicas", "rank"), [(1, 0), (2, 0), (4, 1)])
def test_a_sampler_of_another_share_is_refused(replicas: int, rank: int) -> None:
    feed = Feed([["a"]], data_rank=1, data_ranks=2)
    with feed.in_place_of_loaders(), pytest.raises(SubjectMistake, match="ranks would train on the same data"):
        iter(loader(replicas=replicas, rank=rank))


def test_a_norm_without_eps_is_the_same_function_in_fp64() -> None:
    norm, x = torch.nn.RMSNorm(4), torch.full((1, 4), 1e-4)
    assert torch.allclose(promoted(norm, torch.float64)(x.double()).float(), norm(x), rtol=1e-6)
    assert torch.nn.RMSNorm(4, eps=0.5).eps == promoted(torch.nn.RMSNorm(4, eps=0.5), torch.float64).eps
