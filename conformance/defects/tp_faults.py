"""Faults of tensor parallelism: partial sums that are not reduced, and biases that are counted wrongly."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.model import FeedForward

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def tensor_parallel_gradient(
    local_of: Callable[[DTensor, tuple[Placement, ...]], Tensor],
) -> AbstractContextManager[None]:
    """Let FSDP take `local_of(grad, placements)` for this rank's shard of a tensor-parallel gradient.

    The placements are those of the parameter, which the gradient must get.
    """

    def inner_tensor(original: Callable[..., Tensor], param: Any, grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor):
            return original(param, grad)
        return local_of(grad, param._unsharded_dtensor_spec.placements)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "_get_grad_inner_tensor", inner_tensor)


def unreduced(grad: DTensor, _placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a gradient, reduced or not."""
    return grad.to_local()


def summed(grad: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a gradient, of which partial sums are summed over ranks."""
    return grad.redistribute(placements=placements).to_local()


SP_NORM_GRADIENT_UNREDUCED = Defect(
    id="sp-norm-grad-unreduced",
    title="the gradient of a replicated tensor-parallel parameter stays a partial sum",
    source="https://github.com/pytorch/pytorch/issues/121295",
    mechanism="FSDPParam takes the local tensor of a partial gradient instead of reducing it over tp",
    laws=("PAR-1", "PAR-5"),
    cells="id = tp2-fp32-default-meta",
    inject=partial(tensor_parallel_gradient, unreduced),
    inject_twin=partial(tensor_parallel_gradient, summed),
)


def averaged(grad: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a gradient, of which partial sums are averaged over ranks."""
    ranks = grad.device_mesh.size() if any(placement.is_partial() for placement in grad.placements) else 1
    return summed(grad, placements) / ranks


SP_NORM_GRADIENT_AVERAGED = Defect(
    id="sp-norm-grad-averaged",
    title="the gradient of a replicated tensor-parallel parameter is averaged over ranks instead of summed",
    source="https://github.com/NVIDIA/TransformerEngine/issues/435",
    mechanism="an all-reduce outside of the model takes the mean; replicas stay equal",
    laws=("PAR-1",),
    cells="id = tp2-fp32-default-meta",
    inject=partial(tensor_parallel_gradient, averaged),
    inject_twin=partial(tensor_parallel_gradient, summed),
)


def local_input(grad_placement: Placement | None) -> AbstractContextManager[None]:
    """Multiply by the column-wise weights of the feed-forward network as plain tensors.

    The gradient of the input is then a partial sum, which the `grad_placements` of `to_local` must say.
    """

    def forward(_original: object, network: FeedForward, x: DTensor) -> Tensor:
        local = x.to_local(grad_placements=[grad_placement] if grad_placement else None)
        out: Tensor = network.w2(network.combine(_linear(local, network.w1), _linear(local, network.w3)))
        return out

    return replaced_call("reference_trainer.model:FeedForward", "forward", forward)


def _linear(x: Tensor, module: nn.Linear) -> Tensor:
    return F.linear(x, _local(module.weight), _local(module.bias))


def _local(parameter: Tensor) -> Tensor:
    """Return the local tensor with autograd, which `conformance.instruments.sharding.local` detaches."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


TP_TO_LOCAL_NO_GRAD_PLACEMENT = Defect(
    id="tp-to-local-no-grad-placement",
    title="the gradient of a tensor-parallel region's input stays a partial sum",
    source="https://github.com/pytorch/torchtitan/issues/1805",
    mechanism="to_local() of a replicated input to local weights, without grad_placements=[Partial()]",
    laws=("PAR-1", "PAR-5", "MP-4"),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    inject=partial(local_input, None),
    inject_twin=partial(local_input, Partial()),
)


def row_wise_bias(before_sum: Callable[[Tensor, int], Tensor]) -> AbstractContextManager[None]:
    """Add `before_sum(bias, ranks)` for the feed-forward network's row-wise layer on each rank, before the sum.

    This fits activations that are replicated between tensor-parallel regions.
    """

    def forward(_original: object, network: FeedForward, x: Tensor) -> Tensor:
        hidden = network.combine(network.w1(x), network.w3(x))
        weight, bias = network.w2.weight, _local(network.w2.bias)
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        partial_sum = F.linear(hidden, weight.to_local(), before_sum(bias, mesh.size()))
        return DTensor.from_local(partial_sum, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

    return replaced_call("reference_trainer.model:FeedForward", "forward", forward)


def _share(bias: Tensor, ranks: int) -> Tensor:
    """Return a rank's share of a bias, as DTensor adds it, with the gradient of the whole bias."""
    return bias - (bias - bias / ranks).detach()


ROWWISE_BIAS_SUMMED = Defect(
    id="rowwise-bias-summed",
    title="the bias of a row-wise layer is counted once for each tensor-parallel rank",
    source="https://github.com/huggingface/text-generation-inference/issues/1036",
    mechanism="each rank adds the bias to its partial sum, before these sums are reduced",
    laws=("PAR-1",),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    inject=partial(row_wise_bias, lambda bias, _: bias),
    inject_twin=partial(row_wise_bias, _share),
)
ROWWISE_BIAS_GRADIENT_TOO_SMALL = Defect(
    id="rowwise-bias-grad-divided",
    title="the gradient of a row-wise layer's bias is too small by the number of tensor-parallel ranks",
    source="https://github.com/pytorch/torchtitan/pull/4332",
    mechanism="each rank adds its share of the bias, and autograd divides the replicated gradient as well",
    laws=("PAR-1",),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    inject=partial(row_wise_bias, lambda bias, ranks: bias / ranks),
    inject_twin=partial(row_wise_bias, _share),
)
