"""DTensors that are redistributed with `async_op=True` corrupt memory on gloo.

Several all-gathers are in flight in each of two processes, on a mesh of CPUs, and all are waited for. After seconds a
process dies of SIGSEGV or SIGABRT ("malloc(): unaligned tcache chunk detected"). A debugger shows it in a worker thread
of gloo, at the end of `AsyncAllgatherCoalescedWork::allgather_coalesced`, where the buffers of `gloo::AllgatherOptions`
are destroyed, while another worker is inside `gloo::allgather`. The functional all-gather, which DTensor uses, takes
this path, and so does `ProcessGroup.allgather_into_tensor_coalesced`, which dies as soon. `all_gather_into_tensor` of
`torch.distributed` takes another one and does not die within 60,000 calls, 40 in flight, nor does the functional
operator with one call in flight within 240,000, nor with a process group of a single worker thread within 57,000. Why
memory is corrupted is not known. Seen with torch 2.9.1, 2.13.0 and 2.15.0 on the CPU.

Prints how each process ended. Exit status 1 if one of them died. Needs torch alone, two processes; takes a minute if
nothing happens.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORLD_SIZE = 2
TENSORS = 40
LIMIT_S = 60.0


def gather_again_and_again(rank: int, file: str) -> None:
    """Gather as many tensors at once until the time is over, which rank 0 decides."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    tensors = [distribute_tensor(torch.ones(45, 30), mesh, [Shard(0)]) for _ in range(TENSORS)]
    start_s, goes_on = time.monotonic(), torch.ones(1)
    while goes_on:
        started = [tensor.redistribute(placements=[Replicate()], async_op=True) for tensor in tensors]
        for gathered in started:
            gathered.full_tensor().clone()
        goes_on.fill_(time.monotonic() - start_s < LIMIT_S)
        dist.broadcast(goes_on, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        context = mp.start_processes(
            gather_again_and_again, (f"{directory}/rendezvous",), WORLD_SIZE, join=False, start_method="spawn"
        )
        for process in context.processes:
            process.join(2 * LIMIT_S)
        ends = [process.exitcode for process in context.processes]
    print(f"torch {torch.__version__}: exit codes expected {[0] * WORLD_SIZE}, got {ends}")
    sys.exit(any(ends))
