"""BroadcastingTorchSaveReader, which loads a file of `torch.save` on rank 0 and shards it, hangs for DTensors.

Rank 0 broadcasts a full plain tensor, which all others receive into a DTensor of its own layout
(`torch.empty_like(planner.state_dict[...])` in torch/distributed/checkpoint/format_utils.py).

severity: medium
visible: hang
training: a model that FSDP2 or tensor parallelism has sharded cannot be loaded as this class documents
thread: none known
law: none
avoid: torch_save_to_dcp, or a full state dict with broadcast_from_rank0
ranks: 2
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group(
    "gloo",
    rank=int(os.environ.get("RANK", "0")),
    world_size=int(os.environ.get("WORLD_SIZE", "1")),
    timeout=timedelta(seconds=5),
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(32.0).reshape(8, 4)
state = {"weight": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])}
expected = distribute_tensor(full, mesh, [Shard(0)]).to_local()
file = f"{tempfile.gettempdir()}/{os.environ.get('MASTER_PORT')}.pt"
if dist.get_rank() == 0:
    torch.save({"weight": full}, file)
try:
    dcp.load(state, storage_reader=BroadcastingTorchSaveReader(file), planner=DynamicMetaLoadPlanner())
    is_right = torch.equal(state["weight"].to_local(), expected)
    got, status = "the right shard" if is_right else "another one", int(not is_right)
except (RuntimeError, dcp.CheckpointException) as error:
    got, status = f"{type(error).__name__} after 5 s", 1
print(f"torch {torch.__version__}: expected the right shard, got {got}")
sys.exit(status)  # without destroying the process group, which cannot be used any more
