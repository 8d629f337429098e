"""Taking the state of an optimizer before its first step changes the first step.

`get_optimizer_state_dict` lets an optimizer without state take a step with zero gradients
(torch/distributed/checkpoint/state_dict.py, `_init_optim_state`) and leaves the state there: Adam counts the step and
corrects its first real one as the second; SGD keeps `weight_decay * parameter` in its buffer of momentum.

severity: medium
visible: silent
training: a run whose checkpoint of step 0 is saved learns differently; Adam's first update is a quarter smaller
thread: https://github.com/pytorch/pytorch/issues/164929
law: CKPT-5
avoid: save no optimizer state before the first step
ranks: 1
"""

import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def weight_after_step(name: str, options: dict[str, float], *, is_saved: bool) -> float:
    """Return a weight of 1 after one step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    if is_saved:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item()


status = 0
for name, options in (("AdamW", {}), ("SGD", {"momentum": 0.9})):
    expected, got = (weight_after_step(name, options, is_saved=is_saved) for is_saved in (False, True))
    print(f"{name}: expected {expected:.4f}, after get_optimizer_state_dict got {got:.4f}")
    status |= int(expected != got)
sys.exit(status)
