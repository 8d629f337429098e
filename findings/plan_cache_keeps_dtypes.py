"""Plans that `enable_plan_caching` keeps have the dtypes of the first checkpoint, to which `dcp_to_torch_save` rounds.

`_compare_save_plans` (torch/distributed/checkpoint/planner_helpers.py) compares names, shapes and offsets alone, so
that the metadata of the first checkpoint is written again.

severity: medium
visible: silent
training: weights that are fp32 from some step on, as in a last phase, are converted to the 16 bits they had before
thread: none known
law: CKPT-7
avoid: DefaultSavePlanner without enable_plan_caching
ranks: 1
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
with tempfile.TemporaryDirectory() as directory:
    for dtype in (torch.bfloat16, torch.float32):
        folder = f"{directory}/{dtype}"
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"weight": torch.tensor([1.001], dtype=dtype)}, checkpoint_id=folder, planner=planner)
    dcp_to_torch_save(folder, f"{folder}/weight.pt")
    weight = torch.load(f"{folder}/weight.pt")["weight"]
print(f"torch {torch.__version__}: expected 1.001 in torch.float32, got {weight.item()} in {weight.dtype}")
dist.destroy_process_group()
sys.exit(int(weight.dtype != torch.float32))
