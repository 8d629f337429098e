"""Integer arithmetic for the model (`arithmetic: integer`), with which every mesh must give exactly the same bits.

Linear layers, embedding and residual sums stay as they are; norms only scale, attention and feed-forward only add.
Weights are -1, 0 or 1, so every number is an integer and, as long as it is below 2**24, exact in fp32: sums then do not
depend on their order, on how a mesh splits them, or on fused multiply-add. The loss is minus the sum of the labels'
logits, whose gradient is -1 at each label; scaled by ranks / valid tokens that gradient is a power of two if both are,
and the backward pass computes integers times that power. `largest_partial_sum` measures how large the integers get.
"""

import copy

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

EXACT_BELOW = 2.0**24
"""Bound below which fp32 represents every integer."""


class Scale(nn.RMSNorm):
    """Product with a weight; replaces a norm, which would also divide by the root mean square."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale activations of shape (batch, seq_len, dim)."""
        return x * self.weight


def linear_attention(q: Tensor, k: Tensor, v: Tensor, _table: Tensor) -> Tensor:
    """Return, for each query head, q + k + the sum of v up to the own position.

    All have shape (batch, seq_len, heads, head_dim); `k` and `v` may have fewer heads, as in `softmax_attention`.
    """
    grouped_by_kv_head = q.view(*k.shape[:3], -1, k.shape[3])
    return (grouped_by_kv_head + (k + v.cumsum(1)).unsqueeze(3)).flatten(2, 3)


def largest_partial_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return a bound on the absolute value of each sum and partial sum, before the loss is scaled.

    `model` is not sharded; `inputs` and `labels`, int64 of shape (batch, seq_len), are all valid. The function runs a
    copy in fp64 with the absolute values of the weights: all terms then have the same sign, so that no partial sum
    exceeds its sum, and no sum is smaller than with the weights themselves. The sums are those that enter and leave a
    module in forward, and their gradients.
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
