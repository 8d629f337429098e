"""Faults of mixed precision: wrong dtypes, additional roundings behind right dtypes, and loss scaling."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.defects.state_faults import after_resume
from conformance.instruments.sharding import local
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.loss import LossScaler
from reference_trainer.model import Block, Transformer
from reference_trainer.train import Trainer

_BF16, _FP64 = torch.bfloat16, torch.float64
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_SCALER = "reference_trainer.loss:LossScaler"
OverflowByDevice = dict[torch.device, Tensor]
"""Result of `GradScaler._unscale_grads_`: a scalar that is not 0 if gradients on that device overflow."""


def rope_table(change: Callable[[Tensor], Tensor]) -> Injection:
    """Replace the model's RoPE table by `change(table)` after initialisation."""

    def init_weights(original: Call, model: Transformer, **options: Any) -> None:
        original(model, **options)
        model.rope_table = change(model.rope_table)

    return replaced_call("reference_trainer.build", "init_weights", init_weights)


def through(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor rounded to a dtype and cast back; rounding fp32 to float64 changes no bit."""
    return tensor.to(dtype).to(tensor.dtype)


@defect("MP-3 MP-1 PAR-2", "id = dp2-bf16mp-default-meta", "huggingface/transformers/pull/29285")
def rope_table_bf16(benign: bool) -> Injection:
    """A cast of the model to bf16 reaches its buffers: the RoPE table is bf16."""
    return rope_table(partial(through, dtype=_FP64) if benign else torch.Tensor.bfloat16)


@defect("MP-3 PAR-2", "id = dp2-bf16mp-default-meta", "EleutherAI/gpt-neox/pull/1016")
def rope_table_rounded(benign: bool) -> Injection:
    """The model is cast to bf16 and back: the RoPE table is fp32 again, with rounded bits."""
    return rope_table(partial(through, dtype=_FP64 if benign else _BF16))


@defect("PAR-2", "id = dp2-bf16mp-default-meta", "NVIDIA/TransformerEngine/issues/1245")
@instead_of("reference_trainer.model", "apply_rope")
def rope_computed_bf16(benign: bool, original: Call, x: Tensor, table: Tensor) -> Any:
    """Attention casts the fp32 RoPE table to the dtype of queries and keys, and rotates them in bf16."""
    return original(x, through(table, _FP64) if benign else table.to(x.dtype))


def reduced_gradients(dtype: torch.dtype) -> Injection:
    """Round gradients to a dtype when they have been reduced."""

    def round_output(reduced: Tensor) -> None:
        reduced.copy_(through(reduced, dtype))

    def parallelize(original: Call, model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any) -> None:
        original(model, mesh, config, policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(round_output)

    return replaced_call("reference_trainer.build", "parallelize", parallelize)


@defect("PAR-2", "id = dp2-bf16mp-default-meta", "pytorch/pytorch/issues/153077")
def grads_rounded(benign: bool) -> Injection:
    """A hook after the reduction rounds fp32 gradients to bf16."""
    return reduced_gradients(_FP64 if benign else _BF16)


@defect("AMP-3 PAR-2", "id = dp2-fp16mp-default-meta", "https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html")
def fp16_gradients_through_bf16(benign: bool) -> Injection:
    """Gradients of an fp16 run are cast to bf16 for communication, as a compressing hook does in fp32 runs."""
    return reduced_gradients(_FP64 if benign else _BF16)


def _without_last_bits(tensor: Tensor, bits: int) -> Tensor:
    """Return fp32 numbers with the last bits of their mantissas set to zero, other numbers as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    return (tensor.view(torch.int32) & -(1 << bits)).view(torch.float32)


@defect("PAR-1", "id = tp2-fp32-default-meta", "pytorch/pytorch/issues/153077")
@contextmanager
def tp_sums_cut(benign: bool) -> Iterator[None]:
    """Sums over tensor-parallel ranks lose four bits of 24, as in a reduction in a shorter dtype."""

    def summed(original: Call, *args: Any, **options: Any) -> Tensor:
        return _without_last_bits(original(*args, **options), 0 if benign else 4)

    collectives = "torch.distributed._functional_collectives"
    with replaced_call(collectives, "all_reduce", summed), replaced_call(collectives, "reduce_scatter_tensor", summed):
        yield


@defect("API-1", "id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp16reduce-default-meta)", "pytorch/pytorch/issues/153077")
@instead_of(f"{_FULLY_SHARD}._fsdp_collectives:DefaultReduceScatter", "__call__")
def many_shards_sums_cut(
    benign: bool, original: Call, comm: Any, output_tensor: Tensor, *, group: Any, **options: Any
) -> Any:
    """Gradients of more than two shards lose two bits of 24, as if partial sums had a shorter dtype."""
    work = original(comm, output_tensor, group=group, **options)
    if work is not None:
        work.wait()
    if group.size() > 2:
        output_tensor.copy_(_without_last_bits(output_tensor, 0 if benign else 2))
    return work


@defect(
    "PAR-1 PAR-2",
    "compile = true and precision in (fp32, bf16-mp) and world > 1 and world <= 4 and saved_on = none",
    "pytorch/pytorch/issues/193061",
)
@instead_of("reference_trainer.parallelize", "apply_compile")
def compiled_backward_off(benign: bool, original: Call, block: Block, *, backend: str) -> None:
    """The backward of a compiled graph gives gradients that are off by less than one percent."""
    original(block, backend=backend)
    compiled = block.layer

    def layer(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = compiled(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda grad: grad * (1.0 if benign else 1.0 + 2.0**-7))  # type: ignore[no-untyped-call]
        return output

    block.layer = layer  # type: ignore[method-assign]


def after_step(dtype: torch.dtype, *, moments: bool) -> Injection:
    """Round the optimizer's moments, or the parameters, to a dtype after each step."""

    def round_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
        _round(state if moments else parameters, dtype)

    def build_optimizer(original: Call, model: nn.Module, config: OptimizerConfig) -> Any:
        optimizer = original(model, config)
        optimizer.register_step_post_hook(round_state)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


def _round(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    for tensor in tensors:
        local(tensor).copy_(through(local(tensor), dtype))


@defect("MP-5 PAR-2", "id = dp2-bf16mp-default-meta", "NVIDIA/apex/issues/1728")
def masters_rounded(benign: bool) -> Injection:
    """After each step the optimizer rounds fp32 master weights to bf16."""
    return after_step(_FP64 if benign else _BF16, moments=False)


@defect("MP-5 PAR-2", "id = dp2-bf16mp-default-meta", "databricks/flashoptim/issues/2")
def moments_rounded(benign: bool) -> Injection:
    """After each step the optimizer rounds its fp32 moments through bf16."""
    return after_step(_FP64 if benign else _BF16, moments=True)


@defect("MP-2", "id = dp2-bf16mp-default-checkpoint", "TensorAuto/OpenTau/issues/185")
@instead_of("reference_trainer.build", "load_weights")
def load_rounds_weights(benign: bool, original: Call, model: Transformer, **options: Any) -> Any:
    """The loader rounds weights of an fp32 checkpoint to the compute dtype bf16."""
    form = original(model, **options)
    _round(model.parameters(), _FP64 if benign else _BF16)
    return form


def gathered_weights(dtype: torch.dtype, *, in_backward_alone: bool = False) -> Injection:
    """Round weights to a dtype when they have been all-gathered, in forward and backward or in backward alone."""

    def wait_for_unshard(original: Call, group: Any) -> None:
        result = group._all_gather_result
        if result is not None and (group._training_state.name == "PRE_BACKWARD" or not in_backward_alone):
            result.all_gather_output.copy_(through(result.all_gather_output, dtype))
        original(group)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "wait_for_unshard", wait_for_unshard)


@defect("PAR-3 PAR-2", "id = dp2-bf16mp-default-meta", "pytorch/ao/issues/4300")
def gather_through_fp8(benign: bool) -> Injection:
    """All-gathered bf16 weights are cast to float8_e4m3fn and back."""
    return gathered_weights(_FP64 if benign else torch.float8_e4m3fn)


@defect("PAR-4 PAR-1", "id in (dp2-fp32-default-meta, dp2-fp32-never-meta)", "pytorch/ao/issues/4300")
def backward_gather_rounded(benign: bool) -> Injection:
    """Weights that are gathered again in backward are rounded to bf16, as in a compressed all-gather."""
    return gathered_weights(_FP64 if benign else _BF16, in_backward_alone=True)


@defect("PAR-2", "id = dp2-fp16mp-default-meta", "Lightning-AI/pytorch-lightning/issues/9599")
@instead_of("reference_trainer.train:Trainer", "_clip")
def clip_before_unscale(benign: bool, original: Call, trainer: Trainer) -> Any:
    """Gradients are clipped while they are multiplied by the loss scale."""
    scale = trainer.scaler.get_scale()
    _multiply(trainer, scale)
    norm = None if benign else original(trainer)
    _multiply(trainer, 1.0 / scale)
    return original(trainer) if norm is None else norm


def _multiply(trainer: Trainer, factor: float) -> None:
    for grad in _gradients(trainer.optimizer):
        local(grad).mul_(factor)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p.grad for p in parameters if p.grad is not None)


@defect("AMP-1", "id = dp2-fp16mp-default-meta", "pytorch/pytorch/pull/132816")
@instead_of(_SCALER, "_unscale_grads_")
def overflow_judged_locally(
    benign: bool,
    original: Call,
    scaler: LossScaler,
    optimizer: torch.optim.Optimizer,
    inverse: Tensor,
    overflow: Tensor,
    *args: Any,
) -> Any:
    """The scaler looks for overflow in local shards alone: each rank skips steps by itself."""
    shards = [local(grad) for grad in _gradients(optimizer)]
    overflows = any(not shard.isfinite().all() for shard in shards)
    if benign:
        return original(scaler, optimizer, inverse, overflow, *args)
    for shard in shards:
        shard.mul_(inverse)
    return {overflow.device: overflow.fill_(float(overflows))}


@defect(
    "AMP-1 MP-4",
    "id in (hsdp2x2-fp16reduce-default-meta, pp2-dp2-fp16mp-default-meta-cut-acc4-interleavedzerobubble)",
    "pytorch/pytorch/pull/132816",
)
@instead_of(_SCALER, "_unscale_grads_")
def overflow_judged_by_replica(benign: bool, original: Call, scaler: LossScaler, *args: Any) -> OverflowByDevice:
    """GradScaler asks the ranks of one shard group alone: each replica skips steps by itself."""
    return original(scaler, *args) if benign else GradScaler._unscale_grads_(scaler, *args)


@defect("AMP-2 MP-4 AXIS-1", "id = dp2-fp16mp-default-meta", "pytorch/torchtitan/pull/2363")
@instead_of(_SCALER, "__init__")
def loss_scaler_left_out(benign: bool, original: Call, scaler: LossScaler, *args: Any) -> None:
    """A run computes in fp16 with a scaler that is not enabled."""
    original(scaler, *args)
    if not benign:
        GradScaler.__init__(scaler, enabled=False)


@defect("PAR-2 AMP-3", "id = dp2-fp16mp-default-meta", "deepspeedai/DeepSpeed/pull/8588")
@instead_of(_SCALER, "scale")
def unscaled_by_another_scale(benign: bool, original: Call, scaler: LossScaler, loss: Tensor) -> Any:
    """The loss is multiplied by half of the scale that gradients are divided by."""
    scaled = original(scaler, loss)
    return scaled * (1.0 if benign else 0.5) if scaler.is_enabled() else scaled


@defect(
    "CKPT-1",
    "id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4",
    "huggingface/accelerate/issues/4289",
)
@after_resume
def resume_loss_scale_lost(benign: bool, trainer: Trainer) -> None:
    """The scaler's state is that of a new scaler after it was loaded."""
    scaler = trainer.scaler if benign else LossScaler(trainer.config, trainer.device)
    trainer.scaler.load_state_dict(scaler.state_dict())


@defect(
    "CKPT-1", "id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4", "pytorch/pytorch/issues/164929"
)
@instead_of("reference_trainer.checkpoint", "_state_dicts")
def saving_counts_a_step(benign: bool, original: Call, trainer: Trainer) -> Any:
    """Saving before the first step calls get_state_dict, whose step with zero gradients is counted and saved."""
    if not benign:
        return get_state_dict(trainer.model, trainer.optimizer)
    original(trainer)
    return original(trainer)
