"""FSDP2 cannot gather parameters that are sharded along dimension 1 and resharded after forward to fewer ranks.

`fully_shard(..., reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(1))` on four ranks takes a forward
pass; the all-gather in backward raises `IndexError: list index out of range`, since the shard that is kept after
is flat. With `reshard_after_forward=True` it works. Seen with torch 2.13.0 on the CPU.

Prints what each setting ends in. Exit status 1 if one of them raises. Needs torch alone, four processes; seconds.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

WORLD_SIZE = 4


def end_of_step(reshard_after_forward: bool | int) -> str:
    """Return the error of a forward and backward pass; empty if there is none."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    fully_shard(
        net[0], mesh=mesh, reshard_after_forward=reshard_after_forward, shard_placement_fn=lambda parameter: Shard(1)
    )
    fully_shard(net, mesh=mesh)
    try:
        net(torch.ones(1, 8)).sum().backward()
    except IndexError as error:
        return repr(error)
    return ""


def compare(rank: int, file: str) -> None:
    """Print on rank 0 how both settings end; raises SystemExit on every rank if one raises an error."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE)
    errors = {setting: end_of_step(setting) for setting in (True, 2)}
    if rank == 0:
        for setting, error in errors.items():
            print(f"reshard_after_forward={setting}: expected no error, got {error or 'none'}")
    dist.destroy_process_group()
    sys.exit(any(errors.values()))


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
