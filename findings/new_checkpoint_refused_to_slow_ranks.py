"""Without collectives a save that must not overwrite refuses its own checkpoint on ranks that are slower than rank 0.

`FileSystemWriter(overwrite=False)` asks whether there are metadata of rank 0 (`_metadata_exists` in
torch/distributed/checkpoint/filesystem.py). A rank that asks after rank 0 has saved raises, and rank 0 waits for it in
the barrier at the end.

severity: medium
visible: hang
training: a save fails now and then, the more often the more ranks there are
thread: none known
law: none
avoid: save with collectives, the default, or overwrite=True
ranks: 2
"""

import os
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group(
    "gloo",
    rank=int(os.environ.get("RANK", "0")),
    world_size=int(os.environ.get("WORLD_SIZE", "1")),
    timeout=timedelta(seconds=5),
)
folders = [tempfile.mkdtemp()]
dist.broadcast_object_list(folders)
time.sleep(dist.get_rank())  # rank 1 is slower
try:
    writer = dcp.FileSystemWriter(folders[0], overwrite=False)
    dcp.save({"weight": torch.ones(2)}, storage_writer=writer, use_collectives=False)
    got, status = "no error", 0
except (RuntimeError, dcp.CheckpointException) as error:
    got, status = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}", 1
print(f"torch {torch.__version__}, rank {dist.get_rank()}: expected no error in a new folder, got {got}")
sys.exit(status)  # without destroying the process group, which cannot be used any more
