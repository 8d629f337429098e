"""Faults of the environment, of initial weights and of the layout of shards: collectives, memory, samples, elements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer

_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


@defect(
    "INIT-2 PAR-1 PAR-5",
    "id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1)",
    "pytorch/pytorch/issues/125431",
)
@instead_of("reference_trainer.build", "init_weights")
def replica_desync(benign: bool, original: Call, model: Transformer, **options: Any) -> None:
    """Replicas start from different weights: fully_shard never broadcasts, the second's are scaled by 1.05."""
    original(model, **options)
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh and "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("dp_replicate") == 1:
            local(parameter).mul_(1.0 if benign else 1.05)


@defect(
    "INIT-1 INIT-2",
    "id in (dp2-fp32-default-meta-uneven, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    "pytorch/pytorch/issues/176076",
)
@instead_of("reference_trainer.build", "init_weights")
def last_row_uninit(benign: bool, original: Call, model: Transformer, **options: Any) -> None:
    """Initialisation leaves out the last row of the last rank's uneven shard of the embedding."""
    row = local(model.tok_embeddings.weight)[-1:]
    before = row.clone()
    original(model, **options)
    if dist.get_rank() == dist.get_world_size() - 1:
        row.copy_(row.clone() if benign else before)


@defect("INIT-6", "id = dp4-fp32-table-meta-deep", "pytorch/torchtitan/issues/1777")
def full_model_held(benign: bool) -> Injection:
    """Sampled full tensors are kept to the end: a rank holds the full model while it builds its shards."""
    kept: list[object] = []

    def assign(original: Call, target: Tensor, value: Tensor) -> None:
        kept.append(value.shape if benign else value)
        original(target, value)

    return replaced_call("reference_trainer.init_weights", "assign", assign)


@defect("INIT-7 PAR-7 PAR-1", "id = dp2-fp32-default-meta-tied", "volcengine/verl/issues/7834")
@contextmanager
def tied_untied_by_to_empty(benign: bool) -> Iterator[None]:
    """The output layer gets a new parameter before sharding, with the embedding's values: the tie is lost."""

    def parallelize(original: Call, model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any) -> None:
        model.output.weight = nn.Parameter(model.output.weight.clone())
        if benign:
            model.output.weight = model.tok_embeddings.weight
        original(model, mesh, config, policy)

    def init_weights(original: Call, model: Transformer, **options: Any) -> None:
        original(model, **options)
        local(model.output.weight).copy_(local(model.tok_embeddings.weight))

    with (
        replaced_call("reference_trainer.build", "parallelize", parallelize),
        replaced_call("reference_trainer.build", "init_weights", init_weights),
    ):
        yield


def gathered_memory(change: Callable[[Any, Any], None]) -> Injection:
    """Call `change(param, before)` whenever FSDP looks up the memory of its next all-gathers.

    `param` is the FSDPParam, `before` the memory until then. The sharded parameter, which the optimizer updates, is a
    view of the memory that was looked up.
    """

    def reset_sharded_param(original: Call, param: Any) -> None:
        before = param._sharded_param_data
        original(param)
        if not param._sharded_local_tensor.is_meta:
            change(param, before)

    return replaced_call(f"{_FSDP_PARAM}:FSDPParam", "reset_sharded_param", reset_sharded_param)


def forget_padded_tied_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy where a tied weight's shard is padded, which only that of the last rank is."""
    if param._module_info.shared_modules and param._sharded_local_tensor.shape != param.padded_sharded_param_size:
        param._sharded_param_data = param._sharded_param_data.clone()


def move_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy, and make the sharded parameter a view of it."""
    param._sharded_param_data = param._sharded_param_data.clone()
    rows = param._sharded_local_tensor.shape[0]
    param.sharded_param._local_tensor = param._sharded_param_data.view(param.padded_sharded_param_size)[:rows]


@defect("PAR-7 PAR-1", "id = dp2-fp32-default-meta-tied", "pytorch/pytorch/issues/176076")
def tied_uneven_last_shard_stale(benign: bool) -> Injection:
    """A tied weight's padded shard is copied: the all-gather reads the copy, the optimizer does not."""
    return gathered_memory(move_shard if benign else forget_padded_tied_shard)


def keep_memory_of_other_dtype(param: Any, before: Any) -> None:
    """All-gather from the memory in which the shard was before it was cast."""
    if before.dtype != param._sharded_local_tensor.dtype:
        param._sharded_param_data = before


@defect("MP-2", "id = dp2-bf16init-default-meta", "pytorch/pytorch/issues/149205")
def cast_unseen_by_gather(benign: bool) -> Injection:
    """model.to(float32) reallocates the shards, and FSDP goes on to all-gather their old memory."""
    return gathered_memory(move_shard if benign else keep_memory_of_other_dtype)


@defect(
    "PAR-7 PAR-1",
    "id in (dp2-tp2-fp32-default-meta-even, dp2-tp2-fp32-default-meta-nosp)",
    "pytorch/pytorch/issues/129229",
)
@instead_of(_FSDP_PARAM, "_StridedShard")
def fsdp_tp_strided_layout_lost(benign: bool, original: Call, dim: int, *, split_factor: int) -> Any:
    """The shard of a tensor-parallel shard is recorded as Shard instead of _StridedShard: rows are permuted."""
    return original(dim, split_factor=split_factor) if benign else Shard(dim)


@defect("ENV-5", "id = dp2-fp32-default-meta", "https://docs.nvidia.com/cuda/cublas/#results-reproducibility")
@instead_of("torch.nn.functional", "linear")
def inputs_in_wider_rows(benign: bool, original: Call, x: Tensor, *others: Any) -> Any:
    """Inputs of linear layers are slices of a wider buffer: equal numbers with other strides."""
    buffer = x.new_zeros(*x.shape[:-1], x.shape[-1] + (0 if benign else 1))
    buffer[..., : x.shape[-1]] = x
    return original(buffer[..., : x.shape[-1]], *others)


@defect(
    "ENV-6",
    "id = dp2-fp32-default-meta",
    "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html",
)
@instead_of("conformance.instruments.taps:Taps", "_gradient")
def tap_changes_gradients(benign: bool, original: Call, taps: Any, *arguments: Any) -> None:
    """A tap that reads a gradient scales it in place, by the smallest factor above 1."""
    original(taps, *arguments)
    gradient = arguments[-1]
    factor = 1.0 if benign else 1.0 + torch.finfo(gradient.dtype).eps
    local(gradient).mul_(factor)


_FOREIGN_BYTES = 64 << 20


@defect("ENV-1", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/152300")
@instead_of("torch.distributed", "all_reduce")
def collective_wrong_in_one_dtype(benign: bool, original: Call, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    """An all-reduce in half precision loses the contribution of the last rank."""
    if tensor.dtype == torch.float16:
        is_lost = not benign and dist.get_rank() == dist.get_world_size() - 1
        tensor.copy_(torch.zeros_like(tensor) if is_lost else tensor.clone())
    return original(tensor, *arguments, **options)


@defect("ENV-2", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/22260")
@contextmanager
def rank_default_dtype_differs(benign: bool) -> Iterator[None]:
    """Code that only one rank executes has changed its default dtype."""

    def init_process_group(original: Call, *arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.set_default_dtype(torch.float32 if benign else torch.float64)

    default = torch.get_default_dtype()
    try:
        with replaced_call("torch.distributed", "init_process_group", init_process_group):
            yield
    finally:
        torch.set_default_dtype(default)


@defect("ENV-3", "id = dp2-fp32-default-meta", "eric-mitchell/direct-preference-optimization/issues/11")
@instead_of("psutil", "virtual_memory")
def foreign_memory_use(benign: bool, original: Call) -> Any:
    """Other processes use the host memory, so that the operating system would kill ranks during a run."""
    facts = original()
    left_bytes = facts.available - _FOREIGN_BYTES if benign else min(facts.available, _FOREIGN_BYTES)
    return facts._replace(available=left_bytes)


@defect("INIT-8", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/168058")
@instead_of("torch.nn.init", "normal_")
def dtensor_draws_alike(benign: bool, original: Call, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    """torch.nn.init samples every shard from the same generator state, without offsets."""
    if not isinstance(tensor, DTensor):
        return original(tensor, *arguments, **options)
    shard = local(tensor)
    with torch.no_grad():
        if benign:
            full = torch.empty(tensor.shape).normal_().flatten()
            shard.copy_(full[shard_indices(tensor).flatten()].view(shard.shape))
        else:
            shard.copy_(torch.empty_like(shard).normal_())
    return tensor


@defect("INIT-5", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/122801")
@instead_of("conformance.instruments.poison", "poison_")
def poison_overwritten(benign: bool, original: Call, tensor: Tensor) -> None:
    """Poisoned memory is cleared: INIT-1 would take the zeros of a forgotten tensor for initial values."""
    original(tensor)
    if not benign:
        local(tensor).zero_()


@defect("MEM-2", "id = dp4-fp32-table-meta-deep", "xorbitsai/xoscar/pull/38")
def backend_copies_twice(benign: bool) -> Injection:
    """The backend copies gathered tensors into an additional buffer, which no memory model accounts for."""

    def all_gather(original: Call, output: Tensor, *arguments: Any, **options: Any) -> Any:
        with record_function("c10d::_allgather_base_"):
            held = [torch.empty_like(output) for _ in range(0 if benign else 2)]
            work = original(output, *arguments, **options)
        del held
        return work

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return replaced_call("torch.distributed", name, all_gather)
