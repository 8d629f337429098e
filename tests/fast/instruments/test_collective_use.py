"""Collectives that a rank could have left out, on a process group that sends nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor

from conformance.experiments.context import simulated_world
from conformance.instruments.collective_use import CollectiveUse
from conformance.instruments.collectives import CollectiveLog
from conformance.instruments.dispatch_tap import DispatchTap


@contextmanager
def listening() -> Iterator[CollectiveUse]:
    log = CollectiveLog()
    use = CollectiveUse(count_collectives=log.count, settle=lambda: None)
    use.is_on = True
    with simulated_world(2), DispatchTap([log.listen], outcomes=[use.listen_to_outcomes]):
        yield use


def gathered(x: Tensor, dim: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return all_gather_tensor(x, dim, group)


def twice(x: Tensor) -> None:
    first, _second = gathered(x, 0), gathered(x, 0)
    first.sum()


def twice_in_other_places(x: Tensor) -> None:
    kept = gathered(x, 1)
    gathered(x, 1)
    kept.sum()


def again_when_gone(x: Tensor) -> None:
    gathered(x, 0).sum()
    gathered(x, 0).sum()


def again_when_changed(x: Tensor) -> None:
    kept = gathered(x, 0)
    x.add_(1)
    gathered(x, 0).sum()
    kept.sum()


def result_changed(x: Tensor) -> None:
    kept = gathered(x, 0)
    kept.add_(1)
    gathered(x, 0).sum()
    kept.sum()


def own_share(x: Tensor) -> None:
    gathered(x, 1).chunk(2, 1)[0].contiguous().sum()


def other_share(x: Tensor) -> None:
    gathered(x, 1).chunk(2, 1)[1].contiguous().sum()


def list_of_own(x: Tensor) -> None:
    outputs = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(outputs, x)
    outputs[0].sum()


def list_again(x: Tensor) -> None:
    first, second = ([torch.empty_like(x), torch.empty_like(x)] for _ in range(2))
    dist.all_gather(first, x)
    dist.all_gather(second, x)
    torch.cat(first + second).sum()


def list_of_all(x: Tensor) -> None:
    outputs = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(outputs, x)
    torch.cat(outputs).sum()


def list_of_others(x: Tensor) -> None:
    """Read the shares of others, and keep the gradient of the own one, as contrastive losses do."""
    outputs = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(outputs, x)
    torch.cat([x, outputs[1]]).sum()


def into_tensor(x: Tensor) -> None:
    output = torch.empty(8, 4)
    dist.all_gather_into_tensor(output, x)
    output[:4].sum()


def share_of_a_sum(x: Tensor) -> None:
    dist.all_reduce(x)
    x[:, :2].sum()


def first_row_of_a_sum(x: Tensor) -> None:
    dist.all_reduce(x)
    x[1:3].sum()


def piece(x: Tensor) -> None:
    dist.all_reduce(x)
    gathered(x[:2], 0).sum()
    x.sum()


def statistics(x: Tensor) -> None:
    counts = x.sum(0)
    dist.all_reduce(counts)
    counts[:2].sum()


FOUND: list[tuple[Callable[[Tensor], None], list[str]]] = [
    (twice, ["sent again"]),
    (twice_in_other_places, ["sent again"]),
    (again_when_gone, []),
    (again_when_changed, []),
    (result_changed, []),
    (own_share, ["own share read"]),
    (other_share, []),
    (list_of_own, ["own share read"]),
    (list_again, ["sent again"]),
    (list_of_all, []),
    (list_of_others, []),
    (into_tensor, ["own share read"]),
    (share_of_a_sum, ["own share read"]),
    (first_row_of_a_sum, []),
    (piece, ["sent a piece of a result"]),
    (statistics, []),
]


@pytest.mark.parametrize(("program", "expected"), FOUND)
def test_what_could_be_left_out_is_found(program: Callable[[Tensor], None], expected: list[str]) -> None:
    with listening() as use:
        program(torch.ones(4, 4))
        assert [found.waste for found in use.facts()] == expected
