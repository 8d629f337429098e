"""Faults of models whose parameters lie on several meshes, and of calls that differ on one rank."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.instruments.sharding import full

_CELL = "id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1"
_FSDP = "torch.distributed.fsdp._fully_shard"
_SWEEP = "conformance.sweeps.several_meshes"
_CLIP_GRAD = "torch.nn.utils.clip_grad"


@defect("MESH-1", _CELL, "NVIDIA/Megatron-LM/pull/5956")
@instead_of(f"{_FSDP}._fully_shard:FSDPModule", "set_gradient_divide_factor")
def divide_factor_of_own_mesh(benign: bool, original: Call, module: Any, factor: float) -> None:
    """Gradients of experts are divided by the size of the experts' mesh, and not by the number of ranks with tokens."""
    own = next(module.parameters()).device_mesh.size(0)
    original(module, factor if benign else float(own))


@defect("MESH-1", _CELL, "NVIDIA-NeMo/Automodel/pull/3135")
@instead_of(f"{_FSDP}._fsdp_param_group", "foreach_reduce")
def replicas_of_block_not_reduced(benign: bool, original: Call, params: Any, *args: Any) -> Any:
    """The mesh of a block loses its replicas when it is cut out of the root's: gradients are not reduced over them."""
    *before, group, stream, reduces, waiting, hook, force_sum = args
    return original(params, *before, group if benign else None, stream, reduces, waiting, hook, force_sum)


def _meshes(tensors: Iterable[Tensor]) -> list[DeviceMesh | None]:
    """Return the distinct meshes of tensors in their order; None for plain ones."""
    return list(dict.fromkeys(each.device_mesh if isinstance(each, DTensor) else None for each in tensors))


@defect("MESH-2", _CELL, "NVIDIA-NeMo/RL/pull/3788")
@instead_of(_SWEEP, "get_total_norm")
def norm_counts_copies_of_a_mesh(
    benign: bool, original: Call, tensors: Sequence[Tensor], order: float, **options: Any
) -> Any:
    """The norm of one mesh counts the copies on a dimension over which its parameters are replicated."""
    norm = original(tensors, order, **options)
    first = tensors[0]
    if isinstance(first, DTensor) and not benign:
        placements = enumerate(first.placements)
        copies = [first.device_mesh.size(dim) for dim, at in placements if at.is_replicate()]
        norm = norm * float(torch.tensor(copies).prod()) ** (1 / order) if copies else norm
    return norm


@defect("MESH-2", _CELL, "huggingface/accelerate/pull/4219")
@instead_of(_SWEEP, "clip_grads_with_norm_")
def plain_gradients_not_scaled(
    benign: bool, original: Call, parameters: Sequence[nn.Parameter], *arguments: Any, **options: Any
) -> None:
    """Plain gradients are separated from DTensors for the norm, and are not scaled with them."""
    if benign or any(isinstance(each.grad, DTensor) for each in parameters):
        original(parameters, *arguments, **options)


@defect("MESH-2", _CELL, "NVIDIA/Megatron-LM/pull/6489")
def meshes_clipped_by_own_norms(benign: bool) -> Injection:
    """Where gradients lie on several meshes, each is scaled by the norm of those on the same mesh.

    torch refuses them; the twin lets clip_grad_norm_ scale all by the one norm.
    """

    def clip(
        _original: Call,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        order: float,
        *,
        foreach: bool | None = None,
    ) -> Tensor:
        groups: dict[DeviceMesh | None, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                groups.setdefault(_meshes([parameter.grad])[0], []).append(parameter.grad)
        norms = [full(torch.nn.utils.get_total_norm(each, order, foreach=foreach)) for each in groups.values()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        for own, gradients in zip(norms, groups.values(), strict=True):
            factor = (max_norm / ((norm if benign else own) + 1e-6)).clamp(max=1.0)
            for grad in gradients:
                grad.mul_(factor)
        return norm

    return replaced_call(_SWEEP, "clip_grad_norm_", clip)


@defect("MESH-3", _CELL, "pytorch/pytorch/pull/157682")
@instead_of("torch.optim.optimizer:Optimizer", "_group_tensors_by_device_and_dtype")
def optimizer_groups_one_mesh(
    benign: bool, original: Call, tensorlists: list[list[Tensor]], *options: Any, **named: Any
) -> Any:
    """Foreach optimizers group parameters by mesh, too, and step those of the first group alone."""
    if not benign and tensorlists and tensorlists[0]:
        first = _meshes(tensorlists[0])[0]
        kept = [index for index, each in enumerate(tensorlists[0]) if _meshes([each])[0] == first]
        tensorlists = [[each[index] for index in kept] if each else each for each in tensorlists]
    return original(tensorlists, *options, **named)


@defect("MESH-4", _CELL, "KempnerInstitute/KempnerForge/issues/202")
@instead_of("torch.distributed.checkpoint.planner_helpers", "create_read_items_for_chunk_list")
def experts_of_first_rank_loaded(benign: bool, original: Call, fqn: str, metadata: Any, chunks: list[Any]) -> Any:
    """Every rank that has a slice of the experts loads the slice of the first of them."""
    if not benign and fqn.endswith("blocks.1.weight"):  # the block that becomes one of experts
        chunks = [replace(chunk, offsets=torch.Size((0, *chunk.offsets[1:]))) for chunk in chunks]
    return original(fqn, metadata, chunks)


@defect("MESH-4", _CELL, "modelscope/twinkle/pull/116")
@instead_of("torch.optim.optimizer:Optimizer", "load_state_dict")
def state_of_second_mesh_not_loaded(benign: bool, original: Call, optimizer: Any, state_dict: Any) -> None:
    """An optimizer loads the state of the parameters of its first mesh alone, and has none for the others."""
    original(optimizer, state_dict)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in () if benign else parameters:
        if _meshes([parameter]) != _meshes(parameters[:1]):
            optimizer.state.pop(parameter, None)


@defect(
    "LOUD-1",
    "id = dp2-fp32-default-meta",
    "pytorch/pytorch/pull/77091",
    subjects=("load: a key that was not saved",),
)
def checkpoint_error_stays_on_its_rank(benign: bool) -> Injection:
    """A rank whose plan of a checkpoint fails raises at once, instead of telling the others, which wait for it."""

    def wrap(original: Call, error: BaseException) -> Any:
        if benign:
            return original(error)
        raise error

    return replaced_call("torch.distributed.checkpoint.utils", "_wrap_exception", wrap)
