"""Collectives of the simulated device: gloo's results, in the order of streams."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.sim import device
from conformance.sim.schedules import Schedule
from tests.support.simulated_processes import exit_codes

RANKS = 2
BLOCK = 1 << 18
"""Number of elements of a tensor."""


def in_world(check: Callable[[int], None], rank: int, ranks: int, directory: Path) -> None:
    """Call a check with its rank in a process group, under the schedule `lazy`."""
    device.follow(Schedule.parse("lazy"))
    store, limit = f"file://{directory}/store", timedelta(seconds=60)
    dist.init_process_group(device.BACKENDS, init_method=store, rank=rank, world_size=ranks, timeout=limit)
    check(rank)
    dist.destroy_process_group()


def results_are_those_of_gloo(rank: int) -> None:
    device.follow(Schedule.parse(f"random:{rank}"))
    for where in ("cpu", "sim"):
        x = torch.full((4,), rank + 1.0, device=where)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 4
        gathered = torch.empty(4 * RANKS, device=where)
        dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank), device=where))
        assert gathered.tolist() == [0.0] * 4 + [1.0] * 4
        scattered = torch.empty(2, device=where)
        dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=where))
        assert scattered.tolist() == [4.0 * rank, 4.0 * rank + 2]
        dist.broadcast(x, src=1)


def an_asynchronous_collective_has_a_stream_of_its_own(rank: int) -> None:
    x = torch.full((4,), rank + 1.0, device="sim")
    host = torch.zeros(4, pin_memory=True)
    work = dist.all_reduce(x, async_op=True)
    host.copy_(x)
    assert host.tolist() == [rank + 1.0] * 4, "the current stream has not waited"
    assert work is not None
    work.wait()
    host.copy_(x)
    assert host.tolist() == [3.0] * 4


def memory_of_collectives_is_held_as_by_nccl(rank: int) -> None:
    """Freed memory is held for the stream of a collective by record_stream alone, which those of FSDP avoid."""
    for lifetime, holds in zip(device.Lifetime, (False, False, True), strict=True):
        device.use_lifetime(lifetime)
        for is_asynchronous, is_of_fsdp in ((True, False), (False, False), (False, True)):
            x = torch.ones(BLOCK, device="sim")
            if is_of_fsdp:
                dist.reduce_scatter_tensor(torch.empty(BLOCK // RANKS, device="sim"), x)
            elif work := dist.all_reduce(x, async_op=is_asynchronous):
                work.wait()
            work = None
            del x
            statistics = torch.accelerator.memory_stats()
            held = statistics["active_bytes.all.current"] - statistics["allocated_bytes.all.current"]
            assert (held > 0) == (holds and not is_of_fsdp), (lifetime, is_asynchronous, is_of_fsdp, held)
            torch.accelerator.synchronize()
            torch.empty(1, device="sim")  # the allocator looks for streams that have caught up


def ranks_that_send_to_each_other_go_on(rank: int) -> None:
    """Neither rank waits for the other's receive; later writes to the sent buffer do not arrive."""
    peer = 1 - rank
    for device_type in ("cpu", "sim"):
        received = torch.empty(4, device=device_type)
        for step in range(3):
            x = torch.full((4,), rank + 10.0 * step, device=device_type)
            transfers = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            x.fill_(-1.0)
            assert received.tolist() == [peer + 10.0 * step] * 4


def a_rank_sends_to_itself_in_a_group_alone(rank: int) -> None:
    """The transfers of a group are matched in their order, and a sent tensor that changes later arrives unchanged."""
    sent = [torch.full((4,), 10.0 * number + rank, device="sim") for number in range(2)]
    received = [torch.empty(4, device="sim") for _ in sent]
    transfers = [dist.P2POp(dist.irecv, x, rank) for x in received] + [dist.P2POp(dist.isend, x, rank) for x in sent]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    for x in sent:
        x.fill_(-1.0)
    assert [x.tolist() for x in received] == [[10.0 * number + rank] * 4 for number in range(2)]
    with pytest.raises(RuntimeError, match="outside of a group"):
        dist.isend(sent[0], rank)


def a_transfer_is_awaited_by_streams(rank: int) -> None:
    x, host = torch.full((4,), float(rank), device="sim"), torch.zeros(4, pin_memory=True)
    if rank == 0:
        dist.send(x + 7.0, 1)
    else:
        work = dist.irecv(x, 0)
        host.copy_(x)
        assert host.tolist() == [1.0] * 4, "the current stream has not waited"
        assert work is not None
        work.wait()
        host.copy_(x)
        assert host.tolist() == [7.0] * 4


def a_host_that_waits_for_its_peers_lets_its_device_go_on(rank: int) -> None:
    """Rank 1 reads a result that needs rank 0's device, while rank 0 waits for rank 1 in a collective of hosts."""
    x = torch.ones(4, device="sim")
    dist.all_reduce(x)
    if rank == 1:
        assert x.tolist() == [2.0] * 4
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "check",
    [
        results_are_those_of_gloo,
        an_asynchronous_collective_has_a_stream_of_its_own,
        memory_of_collectives_is_held_as_by_nccl,
        ranks_that_send_to_each_other_go_on,
        a_rank_sends_to_itself_in_a_group_alone,
        a_transfer_is_awaited_by_streams,
        a_host_that_waits_for_its_peers_lets_its_device_go_on,
    ],
)
def test_collectives(check: Callable[[int], None], tmp_path: Path) -> None:
    assert exit_codes(partial(in_world, check), ranks=RANKS, directory=tmp_path) == [0] * RANKS
