"""Saving a checkpoint before the first step changes what SGD with momentum and weight decay learns.

`get_optimizer_state_dict` lets an optimizer without state take a step with zero gradients, so that it has a state to
return (torch/distributed/checkpoint/state_dict.py, `_init_optim_state`; pytorch#164929 is the same for Adam's step
counter). SGD keeps `momentum_buffer = weight_decay * parameter` of that step. The first real step is too large by
`lr * momentum * weight_decay * parameter`.

Prints the weight after one step of a run that was never saved (expected) and of one that was (got). Exit status 1 if
they differ. Needs torch alone, one process.
"""

import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def weight_after_one_step(*, is_saved: bool) -> float:
    """Return a weight of 1 after a step with a gradient of zero: weight decay alone changes it."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    if is_saved:
        get_optimizer_state_dict(model, optimizer)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    return model.weight.item()


expected, got = weight_after_one_step(is_saved=False), weight_after_one_step(is_saved=True)
print(f"torch {torch.__version__}: expected {expected:.3f}, got {got:.3f}")
sys.exit(expected != got)
