"""Consolidated safetensors files have zero in place of each tensor without dimensions, such as a temperature.

`_write_sub_tensor_to_file_optimized` (torch/distributed/checkpoint/_consolidate_hf_safetensors.py) takes a tensor whose
shape is empty for one without elements, and leaves the zeros that are there. The files of the ranks have its number.

severity: high
visible: silent
training: the exported model has scales, temperatures and counters of zero
thread: none known
law: CKPT-8
avoid: give such tensors a dimension, or save without enable_consolidation
ranks: 1
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
loaded = {"scale": torch.ones(())}
with tempfile.TemporaryDirectory() as directory:
    writer = HuggingFaceStorageWriter(directory, save_distributed=True, enable_consolidation=True)
    dcp.save({"scale": torch.tensor(2.5)}, storage_writer=writer)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(directory))
print(f"torch {torch.__version__}: expected 2.5, got {loaded['scale'].item()}")
dist.destroy_process_group()
sys.exit(int(loaded["scale"].item() != 2.5))
