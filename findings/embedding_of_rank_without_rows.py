"""A row-wise parallel embedding raises on a rank that has no rows, while the other ranks wait.

DTensor maps indices of other ranks to row 0 of the shard (`_MaskPartial`, torch/distributed/tensor/placement_types.py),
and a rank without rows has none.

severity: low
visible: hang
training: four ranks cannot share five rows, which are 2, 2, 1 and 0; the run hangs until a time limit
thread: none known
law: TP-1
avoid: pad the embedding so that each rank has a row, or use ColwiseParallel
ranks: 4
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=2))
embedding = nn.Embedding(5, 2)  # rows of the ranks are 2, 2, 1 and 0
nn.init.ones_(embedding.weight)
indices = torch.zeros(3, dtype=torch.int64)
expected = embedding(indices).tolist()
parallelize_module(embedding, DeviceMesh.from_group(group, "cpu"), RowwiseParallel(input_layouts=Replicate()))
try:
    with torch.no_grad():
        got = embedding(indices).tolist()
    status = int(got != expected)
except (RuntimeError, IndexError) as error:
    got, status = f"{type(error).__name__}: {str(error)[:100]}", 1
print(f"rank {dist.get_rank()}: expected {expected}, got {got}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(status)
