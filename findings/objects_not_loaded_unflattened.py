"""Loading without flattening leaves all values as they are that are no tensors: a counter of steps, a learning rate.

`DefaultLoadPlanner(flatten_state_dict=False)` loads them into a copy of the state dict, which it makes to flatten
sharded tensors (`set_up_planner` and `load_bytes` in torch/distributed/checkpoint/default_planner.py).

severity: medium
visible: silent
training: a resumed run has its weights, and begins its schedule and its counters anew
thread: https://github.com/pytorch/pytorch/issues/92823
law: CKPT-7
avoid: DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
ranks: 1
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
loaded = {"weight": torch.zeros(2), "step": 0}
with tempfile.TemporaryDirectory() as directory:
    saving = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"weight": torch.ones(2), "step": 7}, checkpoint_id=directory, planner=saving)
    dcp.load(loaded, checkpoint_id=directory, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
print(f"torch {torch.__version__}: expected weights of 1 and step 7, got {loaded['weight'].tolist()}, {loaded['step']}")
dist.destroy_process_group()
sys.exit(int(loaded["step"] != 7))
