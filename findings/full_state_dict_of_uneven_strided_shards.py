"""A full state dict cannot be loaded with FSDP2 and tensor parallelism if a dimension is not divisible by the ranks.

`set_model_state_dict` with `full_state_dict=True` raises AssertionError on 2 x 2 ranks for a column-wise layer of ten
rows: `_StridedShard._shard_tensor` splits five rows into three and two and requires equal shapes, although
`get_model_state_dict` has made this state dict. Eight rows work, and so does `broadcast_from_rank0=True`. Seen with
torch 2.13.0 on the CPU.

Prints what each number of rows ends in. Exit status 1 if one raises. Needs torch alone, four processes; seconds.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

WORLD_SIZE = 4


def end_of_load(rows: int) -> str:
    """Return the error of loading the state that was just taken; empty if there is none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(8, rows))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(net, options=options)
    try:
        set_model_state_dict(net, state, options=options)
    except AssertionError as error:
        return repr(error)
    return ""


def compare(rank: int, file: str) -> None:
    """Print on rank 0 how both sizes end; raises SystemExit on every rank if one raises an error."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE)
    errors = {rows: end_of_load(rows) for rows in (8, 10)}
    if rank == 0:
        for rows, error in errors.items():
            print(f"{rows} rows: expected no error, got {error or 'none'}")
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
