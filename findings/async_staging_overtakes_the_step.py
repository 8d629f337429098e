"""Asynchronous staging for a checkpoint copies weights on a stream that does not wait for the optimizer's step.

`DefaultStager` with `use_async_staging` and `use_non_blocking_copy`, as by default, copies in a thread on a stream that
it has made, and waits for that stream alone. Nothing makes it wait for the one that computes, and streams of CUDA that
torch makes do not wait for the default stream: a copy that is early has the weights of before the last update, or of
none. Seen on the simulated accelerator, unverified on a GPU.

severity: high
visible: silent
training: a run that is resumed from asynchronous checkpoints continues from older weights, or from a mixture
thread: none known
law: STREAM-7
avoid: torch.accelerator.synchronize() before async_save, or StagingOptions(use_non_blocking_copy=False)
ranks: 1
"""

import sys

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

if not torch.accelerator.is_available():
    from conformance.sim.enabling import enable

    enable("lazy")  # a model of a GPU that is behind its host; on CUDA the products below keep the GPU behind
device = torch.accelerator.current_accelerator()
matrix, weight = torch.ones(4096, 4096, device=device), torch.zeros(4, device=device)
got = []
stager = DefaultStager(StagingOptions(use_shared_memory=False))
for _ in range(3):
    if device.type != "sim":
        for _ in range(50):
            torch.mm(matrix, matrix)
    weight.add_(1)
    got.append(stager.stage({"weight": weight}).result()["weight"].tolist())
stager.close()
expected = [[1.0] * 4, [2.0] * 4, [3.0] * 4]
print(f"expected weights after each of three steps of {expected}, got {got}", flush=True)
sys.exit(int(got != expected))
