"""Norm on a shard of the sequence, the gradient of whose replicated weight is not summed over the shards."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module

from benchmarks.located.mistakes.trainer import Llama, Trainer


class SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over a group of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `x`."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the ranks' gradients."""
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class WrongNorm(nn.RMSNorm):
    """Norm that computes on local tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, features)."""
        if not isinstance(self.weight, DTensor):
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)  # mistake: norm-gradient


class RightNorm(nn.RMSNorm):
    """Norm that computes on local tensors, and sums the gradient of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, features)."""
        if not isinstance(self.weight, DTensor):
            return super().forward(x)
        group = self.weight.device_mesh.get_group()
        weight = SumGradient.apply(self.weight.to_local(), group)  # type: ignore[no-untyped-call]
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class WrongLlama(Llama):
    """Model with these norms."""

    norm_class: ClassVar[type[nn.RMSNorm]] = WrongNorm


class RightLlama(Llama):
    """Model with these norms."""

    norm_class: ClassVar[type[nn.RMSNorm]] = RightNorm


class Wrong(Trainer):
    """Trainer with the mistake."""

    model_class: ClassVar[type[Llama]] = WrongLlama

    def replicate_norm(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        """Replicate the weight of a norm that computes on local tensors."""
        distribute_module(norm, mesh)


class Right(Wrong):
    """Trainer without it."""

    model_class = RightLlama
