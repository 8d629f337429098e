"""torch.optim.Muon without Nesterov's momentum normalizes the momentum buffer itself if parameters are in bf16.

The first step of Newton-Schulz divides the matrix that it was given, in place, by its norm. `grad.bfloat16()` is no
copy of a tensor in bf16, and without Nesterov's momentum this tensor is the buffer. From the second step on, momentum
has almost no weight beside a gradient.

severity: high
visible: silent
training: momentum is lost, and with it the steps that it would have made
thread: https://github.com/pytorch/pytorch/pull/194664
law: OPT-3
avoid: nesterov=True, the default, or parameters in fp32
ranks: 1
"""

import sys

import torch

parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
optimizer = torch.optim.Muon([parameter], momentum=0.5, nesterov=False)
parameter.grad = 8 * torch.eye(2, dtype=torch.bfloat16)
optimizer.step()
got = optimizer.state[parameter]["momentum_buffer"].diag().tolist()
print(f"momentum of a gradient of 8: expected [4.0, 4.0], got {got}")
sys.exit(int(got != [4.0, 4.0]))
