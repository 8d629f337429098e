"""Reductions in the order of NCCL's ring and of a tree, on real ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from conformance.experiments.context import start_process_group
from conformance.numerics.arithmetic import OWN, SUMS_VARIABLE
from conformance.numerics.rings import GLOO_RING, NCCL_RING, ring_sum
from conformance.run.pool import Pools, RunFailed, Task
from conformance.run.ranks.messages import RankContext

RANKS = 4
needs_unboxing = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "unbox"), reason="this torch boxes process groups")


def terms(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(RANKS, 33, generator=generator).to(dtype) for _ in range(RANKS)]


def reduce_by_all_means(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Reduce this rank's term in every way that the suite's runs do; returns nested lists of numbers."""
    start_process_group(context)
    term = terms(getattr(torch, payload["dtype"]))[context.rank]
    world = list(range(context.world_size))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    results = {}
    for name in ("SUM", "AVG", "MAX"):
        operation = getattr(dist.ReduceOp, name)
        reduced = term.clone()
        dist.all_reduce(reduced, op=operation)
        results[f"all_reduce {name}"] = reduced
        if name != "MAX":
            shard = term.new_empty(1, 33)
            work = scatter(shard, term, op=operation, async_op=True)
            work.wait()
            results[f"reduce_scatter {name}"] = shard
    results["functional all_reduce"] = functional.all_reduce(term, "sum", world) + 0
    results["functional reduce_scatter"] = functional.reduce_scatter_tensor(term, "sum", 0, world) + 0
    scalar = term[0, 0].clone()
    dist.all_reduce(scalar)
    results["scalar"] = scalar
    dist.destroy_process_group()
    return {name: result.double().tolist() for name, result in results.items()}


def product(context: RankContext, _payload: dict[str, Any]) -> None:
    start_process_group(context)
    dist.all_reduce(torch.full((2,), 3.0), op=dist.ReduceOp.PRODUCT)


def reduce_with_another_default_dtype(context: RankContext, _payload: dict[str, Any]) -> list[float]:
    start_process_group(context)
    reduced = torch.ones(2, dtype=torch.float32)
    if context.rank == 0:
        torch.set_default_dtype(torch.float64)
    try:
        dist.all_reduce(reduced)
    finally:
        torch.set_default_dtype(torch.float32)
    dist.destroy_process_group()
    return reduced.tolist()


def results(pools: Pools, sums: str, dtype: str = "float32") -> list[dict[str, Any]]:
    task = Task(f"{__name__}:reduce_by_all_means", {"dtype": dtype})
    env = {} if sums == OWN.sums else {SUMS_VARIABLE: sums}
    return pools.run(task, world_size=RANKS, deadline_s=60, env=env)


def tree(of: Sequence[Tensor]) -> Tensor:
    return (of[0] + of[1]) + (of[2] + of[3])


@needs_unboxing
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sums", ["ring", "tree"])
def test_every_reduction_adds_in_the_order_that_is_asked_for(pools: Pools, sums: str, dtype: str) -> None:
    given = terms(getattr(torch, dtype))
    quarters = [term * 0.25 for term in given]
    all_reduced = {
        name: tree(of) if sums == "tree" else ring_sum(of, dim=None, ring=NCCL_RING)
        for name, of in (("SUM", given), ("AVG", quarters))
    }
    scattered = {
        name: tree(of) if sums == "tree" else ring_sum(of, dim=0, ring=NCCL_RING)
        for name, of in (("SUM", given), ("AVG", quarters))
    }
    for rank, measured in enumerate(results(pools, sums, dtype)):
        for name in ("SUM", "AVG"):
            assert measured[f"all_reduce {name}"] == all_reduced[name].double().tolist()
            assert measured[f"reduce_scatter {name}"] == scattered[name][rank : rank + 1].double().tolist()
        assert measured["functional all_reduce"] == measured["all_reduce SUM"]
        assert measured["functional reduce_scatter"] == measured["reduce_scatter SUM"]
        assert measured["all_reduce MAX"] == torch.stack(given).amax(0).double().tolist()


def test_without_the_option_gloo_adds_in_its_own_order(pools: Pools) -> None:
    given = terms(torch.bfloat16)
    expected = ring_sum(given, dim=None, ring=GLOO_RING)
    assert not torch.equal(expected, ring_sum(given, dim=None, ring=NCCL_RING))
    assert not torch.equal(expected, tree(given))
    for measured in results(pools, OWN.sums, "bfloat16"):
        assert measured["all_reduce SUM"] == expected.double().tolist()


@needs_unboxing
def test_another_reduction_is_refused(pools: Pools) -> None:
    with pytest.raises(RunFailed, match="--sums knows sums, means, maxima and minima"):
        pools.run(Task(f"{__name__}:product", {}), world_size=4, deadline_s=30, env={SUMS_VARIABLE: "ring"})


@needs_unboxing
def test_the_default_dtype_of_a_rank_does_not_matter(pools: Pools) -> None:
    """ENV-2 looks for ranks in other states, and has to hear of them by collectives."""
    task = Task(f"{__name__}:reduce_with_another_default_dtype", {})
    assert pools.run(task, world_size=RANKS, deadline_s=30, env={SUMS_VARIABLE: "ring"}) == [[4.0, 4.0]] * RANKS
