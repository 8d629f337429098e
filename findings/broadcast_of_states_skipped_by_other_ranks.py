"""`set_state_dict` hangs with the state that `get_state_dict` gave, if rank 0 alone has it.

With `full_state_dict`, `cpu_offload` and `broadcast_from_rank0` ranks other than 0 get an empty state, as documented.
`set_state_dict` takes an empty state of the model for none, and skips the broadcast of the model on these ranks: rank 0
waits. `set_model_state_dict` and `set_optimizer_state_dict`, one after the other, work. Seen with torch 2.13.0 on the
CPU.

Prints how each process ended. Exit status 1 if one did not finish. Needs torch alone, two processes; half a minute.
"""

import datetime
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

WORLD_SIZE = 2
LIMIT_S = 20.0


def take_and_load(rank: int, file: str) -> None:
    """Load the state of a model and an optimizer that was just taken."""
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE, timeout=limit)
    net = nn.Linear(4, 4)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    model, state = get_state_dict(net, optimizer, options=options)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state, options=options)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        context = mp.start_processes(
            take_and_load, (f"{directory}/rendezvous",), WORLD_SIZE, join=False, start_method="spawn"
        )
        for process in context.processes:
            process.join(2 * LIMIT_S)
        ends = [process.exitcode for process in context.processes]
        for process in context.processes:
            process.kill()
    print(f"torch {torch.__version__}: exit codes expected {[0] * WORLD_SIZE}, got {ends}")
    sys.exit(any(end != 0 for end in ends))
