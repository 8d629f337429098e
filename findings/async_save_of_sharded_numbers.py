"""An asynchronous save by a `FileSystemWriter` has a later value of each DTensor without dimensions.

`_create_cpu_state_dict` (torch/distributed/_state_dict_utils.py) makes no copy of such a DTensor, but returns it, and
training changes it before it is written. `DefaultStager` copies it.

severity: medium
visible: silent
training: a temperature or scale that tensor parallelism replicates is resumed as it was later than all other weights
thread: none known
law: CKPT-8
avoid: give async_save a DefaultStager
ranks: 1
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state = {"scale": distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])}
writer = dcp.FileSystemWriter(tempfile.mkdtemp())
staged = writer.stage(state)  # as async_save does before it returns
state["scale"].add_(1)
got = staged["scale"].full_tensor().item()
print(f"torch {torch.__version__}: expected a copy of 1.0, got {got}")
dist.destroy_process_group()
sys.exit(int(got != 1.0))
