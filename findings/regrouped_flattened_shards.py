"""Rows that were flattened with a sharded dimension, and are then regrouped, come in another order.

Sequences that are sharded along their length, flattened over the batch, are a (_StridedShard(0, sf=BATCH)). A view that
groups these rows by larger groups keeps the split factor, which counts the groups of each new row and not of all rows
(torch/distributed/tensor/_ops/_view_ops.py, _rewrite_strided_shard): `full_tensor()` and every operator that
redistributes the result are wrong.

severity: high
visible: silent
training: activations of other tokens, where sequences are flattened and then grouped by another batch size
thread: none known
law: DT-3
avoid: view the tensor in its first shape in between, or gather it before the view
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
batch = torch.arange(32.0).view(4, 4, 2)  # four sequences of four tokens
expected = batch.flatten(0, 1).view(2, 8, 2)
try:
    sharded = distribute_tensor(batch, mesh, [Shard(1)])
    regrouped = sharded.flatten(0, 1).view(2, 8, 2)
    got = regrouped.full_tensor()
    text, status = f"{got[0, :, 0].tolist()} of {regrouped.placements}", int(not torch.equal(got, expected))
except (RuntimeError, NotImplementedError) as error:
    text, status = f"refused: {str(error).splitlines()[0][:100]}", 2
if dist.get_rank() == 0:
    print(f"expected {expected[0, :, 0].tolist()}, got {text}", flush=True)
dist.destroy_process_group()
sys.exit(status)
