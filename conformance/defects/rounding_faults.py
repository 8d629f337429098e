"""Faults of mixed precision that leave every dtype right: numbers are rounded once more than they should be."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conformance.defects.injection import Defect, replaced_call
from conformance.defects.precision_faults import through
from conformance.instruments.sharding import local
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.model import Block, Transformer

_PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_BF16, _FP64 = torch.bfloat16, torch.float64


def reduced_gradients(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Round gradients to a dtype when they have been reduced."""

    def round_output(reduced: Tensor) -> None:
        reduced.copy_(through(reduced, dtype))

    def parallelize(
        original: Callable[..., None], model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any
    ) -> None:
        original(model, mesh, config, policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(round_output)

    return replaced_call("reference_trainer.build", "parallelize", parallelize)


GRADIENTS_ROUNDED = Defect(
    id="grads-rounded",
    title="gradients reduced in fp32 are rounded to bf16 before the optimizer sees them",
    source="https://github.com/pytorch/pytorch/issues/153077",
    mechanism="a hook after the reduction casts to bf16 and back",
    laws=("PAR-2",),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(reduced_gradients, _BF16),
    inject_twin=partial(reduced_gradients, _FP64),
)
FP16_GRADIENTS_THROUGH_BF16 = Defect(
    id="fp16-gradients-through-bf16",
    title="gradients of a run in fp16 keep 8 of the 11 bits that they were computed with",
    source="https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
    mechanism="gradients are cast to bf16 for communication, as a compressing hook does for runs in fp32",
    laws=("AMP-3", "PAR-2"),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(reduced_gradients, _BF16),
    inject_twin=partial(reduced_gradients, _FP64),
)


def _without_last_bits(tensor: Tensor, bits: int) -> Tensor:
    """Return fp32 numbers with the last bits of their mantissas set to zero, other numbers as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    return (tensor.view(torch.int32) & -(1 << bits)).view(torch.float32)


@contextmanager
def tensor_parallel_sums(*, lost_bits: int) -> Iterator[None]:
    """Cut the last bits off sums over tensor-parallel ranks."""

    def summed(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        return _without_last_bits(original(*args, **options), lost_bits)

    collectives = "torch.distributed._functional_collectives"
    with replaced_call(collectives, "all_reduce", summed), replaced_call(collectives, "reduce_scatter_tensor", summed):
        yield


TENSOR_PARALLEL_SUMS_CUT = Defect(
    id="tp-sums-cut",
    title="sums over tensor-parallel ranks lose four bits of 24",
    source="https://github.com/pytorch/pytorch/issues/153077",
    mechanism="a reduction that computes in a shorter dtype and returns fp32",
    laws=("PAR-1",),
    cells="id = tp2-fp32-default-meta",
    inject=partial(tensor_parallel_sums, lost_bits=4),
    inject_twin=partial(tensor_parallel_sums, lost_bits=0),
)


def sums_of_many_shards(*, lost_bits: int) -> AbstractContextManager[None]:
    """Cut the last bits off gradients that more than two ranks have reduced."""

    def reduce_scatter(
        original: Callable[..., Any], comm: Any, output_tensor: Tensor, *, group: Any, **options: Any
    ) -> Any:
        work = original(comm, output_tensor, group=group, **options)
        if work is not None:
            work.wait()
        if group.size() > 2:
            output_tensor.copy_(_without_last_bits(output_tensor, lost_bits))
        return work

    return replaced_call(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter", "__call__", reduce_scatter
    )


SUMS_OF_MANY_SHARDS_CUT = Defect(
    id="many-shards-sums-cut",
    title="gradients of more than two shards lose two bits of 24",
    source="https://github.com/pytorch/pytorch/issues/153077",
    mechanism="partial sums are handed on in a shorter dtype",
    laws=("API-1",),
    cells="id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp16reduce-default-meta)",
    inject=partial(sums_of_many_shards, lost_bits=2),
    inject_twin=partial(sums_of_many_shards, lost_bits=0),
)


def compiled_backward(factor: float) -> AbstractContextManager[None]:
    """Multiply the gradient with which the backward of each compiled block begins by a factor."""

    def apply_compile(original: Callable[..., None], block: Block, *, backend: str) -> None:
        original(block, backend=backend)
        compiled = block.layer

        def layer(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = compiled(*args, **kwargs)
            if output.requires_grad:
                output.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
            return output

        block.layer = layer  # type: ignore[method-assign]

    return replaced_call("reference_trainer.parallelize", "apply_compile", apply_compile)


COMPILED_BACKWARD_OFF = Defect(
    id="compiled-backward-off",
    title="gradients of compiled blocks are off by less than one percent",
    source="https://github.com/pytorch/pytorch/issues/193061",
    mechanism="the backward of a compiled graph is not that of the operators that it was traced from",
    laws=("PAR-1", "PAR-2"),
    cells="compile = true and precision in (fp32, bf16-mp) and world > 1 and world <= 4 and saved_on = none",
    inject=partial(compiled_backward, 1.0 + 2.0**-7),
    inject_twin=partial(compiled_backward, 1.0),
)


def after_step(dtype: torch.dtype, *, moments: bool) -> AbstractContextManager[None]:
    """Round the optimizer's moments, or the parameters, to a dtype after each step."""

    def round_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
        _round(state if moments else parameters, dtype)

    def build_optimizer(
        original: Callable[..., torch.optim.Optimizer], model: nn.Module, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        optimizer = original(model, config)
        optimizer.register_step_post_hook(round_state)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


def _round(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    for tensor in tensors:
        local(tensor).copy_(through(local(tensor), dtype))


MASTERS_ROUNDED = Defect(
    id="masters-rounded",
    title="fp32 master weights hold bf16 numbers",
    source="https://github.com/NVIDIA/apex/issues/1728",
    mechanism="after each step the optimizer writes back weights that it has rounded to bf16",
    laws=("MP-5", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(after_step, _BF16, moments=False),
    inject_twin=partial(after_step, _FP64, moments=False),
)
MOMENTS_ROUNDED = Defect(
    id="moments-rounded",
    title="fp32 moments hold bf16 numbers",
    source="https://github.com/databricks/flashoptim/issues/2",
    mechanism="after each step the optimizer rounds its state through bf16",
    laws=("MP-5", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(after_step, _BF16, moments=True),
    inject_twin=partial(after_step, _FP64, moments=True),
)


def loaded_weights(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Round the weights that were loaded from a checkpoint to a dtype."""

    def load_weights(original: Callable[..., Any], model: Transformer, **options: Any) -> Any:
        form = original(model, **options)
        _round(model.parameters(), dtype)
        return form

    return replaced_call("reference_trainer.build", "load_weights", load_weights)


LOAD_ROUNDS_WEIGHTS = Defect(
    id="load-rounds-weights",
    title="weights of an fp32 checkpoint are rounded to bf16 when they are loaded",
    source="https://github.com/TensorAuto/OpenTau/issues/185",
    mechanism="the loader goes through the compute dtype",
    laws=("MP-2",),
    cells="id = dp2-bf16mp-default-checkpoint",
    inject=partial(loaded_weights, _BF16),
    inject_twin=partial(loaded_weights, _FP64),
)


def gathered_weights(dtype: torch.dtype, *, in_backward_alone: bool = False) -> AbstractContextManager[None]:
    """Round weights to a dtype when they have been all-gathered, in forward and backward or in backward alone."""

    def wait_for_unshard(original: Callable[[Any], None], group: Any) -> None:
        result = group._all_gather_result
        if result is not None and (group._training_state.name == "PRE_BACKWARD" or not in_backward_alone):
            result.all_gather_output.copy_(through(result.all_gather_output, dtype))
        original(group)

    return replaced_call(_PARAM_GROUP, "wait_for_unshard", wait_for_unshard)


GATHER_THROUGH_FP8 = Defect(
    id="gather-through-fp8",
    title="weights are rounded to fp8 where bf16 is configured",
    source="https://github.com/pytorch/ao/issues/4300",
    mechanism="all-gathered weights are cast to float8_e4m3fn and back to bf16",
    laws=("PAR-3", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(gathered_weights, torch.float8_e4m3fn),
    inject_twin=partial(gathered_weights, _FP64),
)
BACKWARD_GATHER_ROUNDED = Defect(
    id="backward-gather-rounded",
    title="backward computes with other weights than forward",
    source="https://github.com/pytorch/ao/issues/4300",
    mechanism="weights that are gathered again in backward are rounded to bf16, as a compressed all-gather would",
    laws=("PAR-4", "PAR-1"),
    cells="id in (dp2-fp32-default-meta, dp2-fp32-never-meta)",
    inject=partial(gathered_weights, _BF16, in_backward_alone=True),
    inject_twin=partial(gathered_weights, _FP64, in_backward_alone=True),
)
