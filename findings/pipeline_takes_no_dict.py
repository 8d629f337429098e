"""A pipeline whose last stage returns a dict cannot run, although `output_merge_spec` may be one.

One rank raises, the others wait for it until their time limit: metadata is made of tensors and tuples alone
(`validate_and_normalize_to_tuple` in torch/distributed/pipelining/_utils.py).

severity: low
visible: loud
training: it cannot begin, and the error is that of a peer that waited
thread: none known
law: PP-6
avoid: return a tensor or a tuple from the last stage
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()


class Head(nn.Linear):
    """Layer that returns a dict."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute logits."""
        return {"logits": super().forward(x)}


stage = PipelineStage((nn.Linear, Head)[rank](4, 4), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(
    stage,
    2,
    loss_fn=lambda out, target: (out["logits"] - target).sum(),
    output_merge_spec={"logits": TensorChunkSpec(0)},
)
x = torch.ones(4, 4)
try:
    _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
except Exception as error:
    print(f"rank {rank}: expected a step, got {type(error).__name__}: {str(error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
