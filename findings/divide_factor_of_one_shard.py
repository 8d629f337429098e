"""FSDP2 divides gradients twice by a custom factor if parameters have one shard and reductions are forced to sums.

`set_gradient_divide_factor(8)` with `set_force_sum_reduction_for_comms(True)` on a mesh of four replicas and one shard
gives an eighth of the gradient that is right; on a mesh of one replica and four shards it is right. Without forced sums
both are right. Seen with torch 2.13.0 on the CPU.

Prints the gradient on each mesh. Exit status 1 if one of them is wrong. Needs torch alone, four processes; seconds.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD_SIZE = 4
FACTOR = 8.0
EXPECTED = WORLD_SIZE / FACTOR
"""Sum of the gradients of all ranks, which are 1, over the factor."""


def gradient(shape: tuple[int, int]) -> float:
    """Return an element of the gradient of a layer of ones on a mesh of so many replicas and shards."""
    net = nn.Linear(8, 8, bias=False)
    nn.init.ones_(net.weight)
    net = fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    net.set_force_sum_reduction_for_comms(True)
    net.set_gradient_divide_factor(FACTOR)
    net(torch.ones(1, 8)).sum().backward()
    return float(net.weight.grad.full_tensor().flatten()[0])


def compare(rank: int, file: str) -> None:
    """Print the gradients of both meshes on rank 0; raises SystemExit on every rank if one is wrong."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE)
    gradients = {shape: gradient(shape) for shape in ((1, WORLD_SIZE), (WORLD_SIZE, 1))}
    if rank == 0:
        for (replicas, shards), measured in gradients.items():
            print(f"{replicas} x {shards}: gradient expected {EXPECTED}, got {measured}")
    dist.destroy_process_group()
    sys.exit(any(measured != EXPECTED for measured in gradients.values()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        context = mp.start_processes(
            compare, (f"{directory}/rendezvous",), WORLD_SIZE, join=False, start_method="spawn"
        )
        for process in context.processes:
            process.join(60.0)
        ends = [process.exitcode for process in context.processes]
    print(f"torch {torch.__version__}: exit codes expected {[0] * WORLD_SIZE}, got {ends}")
    sys.exit(any(ends))
