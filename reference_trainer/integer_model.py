"""What the model computes with `arithmetic: integer`, so that every mesh must give exactly the same bits.

Linear layers, embedding and residual sums stay as they are; norms only scale, attention and feed-forward only add.
Weights are -1, 0 or 1, so every number is whole and, as long as it is below 2**24, exact in fp32: sums then do not
depend on their order, on how a mesh splits them, or on fused multiply-add. The loss is minus the sum of the labels'
logits, whose gradient is -1 at each label; scaled by ranks / valid tokens it is a power of two if both are, and the
backward pass computes whole numbers times that power. `largest_partial_sum` measures how large they get.
"""

import copy

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

EXACT_BELOW = 2.0**24
"""fp32 represents each whole number up to here."""


class Scale(nn.RMSNorm):
    """Takes the place of a norm: the product with its weight, without dividing by the root mean square."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def linear_attention(q: Tensor, k: Tensor, v: Tensor, _table: Tensor) -> Tensor:
    """For each query head q + k + the sum of v up to the own position, all (batch, seq, heads, head_dim)."""
    grouped_by_kv_head = q.view(*k.shape[:3], -1, k.shape[3])
    return (grouped_by_kv_head + (k + v.cumsum(1)).unsqueeze(3)).flatten(2, 3)


def largest_partial_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Bound on the size of each sum, whole or partial, in forward and in backward before the loss is scaled.

    `model` is whole, on one process; `inputs` and `labels`, (batch, seq) int64, are all valid. Runs a copy in fp64 with
    the absolute values of the weights: all terms then have the same sign, so that no part of a sum exceeds the whole,
    and no sum is smaller in size than with the weights themselves. The sums are those that enter and leave a module,
    and their gradients.
    """
    model = copy.deepcopy(model).double()
    for parameter in model.parameters():
        parameter.data.abs_()
    sums: list[Tensor] = []

    def note(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for tensor in (*inputs, output):
            if tensor.requires_grad:  # neither tokens nor the RoPE table
                sums.append(tensor.detach())
                tensor.register_hook(sums.append)  # type: ignore[no-untyped-call]

    for module in model.modules():
        module.register_forward_hook(note)
    logits = model(inputs)
    loss = F.nll_loss(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.autograd.backward(loss)
    sums += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return max(float(tensor.abs().max()) for tensor in sums)
