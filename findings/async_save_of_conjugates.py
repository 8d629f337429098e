"""`async_save` saves the numbers of a lazy conjugate or negative without the conjugation or the sign.

`StateDictStager._offload_tensor` (torch/distributed/checkpoint/_state_dict_stager.py) copies the storage, and drops the
bits that say how to read it. `save`, and a `FileSystemWriter` that stages by itself, keep them.

severity: medium
visible: silent
training: complex gradients and buffers that are conjugates, as those of products, are resumed as other numbers
thread: none known
law: CKPT-7
avoid: resolve_conj() and resolve_neg() before async_save, or a FileSystemWriter without async_stager
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
state = {"conjugate": torch.tensor([1 + 2j]).conj()}
loaded = {"conjugate": torch.zeros(1, dtype=torch.complex64)}
with tempfile.TemporaryDirectory() as directory:
    started = dcp.async_save(state, checkpoint_id=directory)
    getattr(started, "upload_completion", started).result()
    dcp.load(loaded, checkpoint_id=directory)
expected, got = state["conjugate"].item(), loaded["conjugate"].item()
print(f"torch {torch.__version__}: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(int(got != expected))
