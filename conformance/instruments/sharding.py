"""Facts about the sharded state of a model, from public attributes alone."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from reference_trainer.fsdp1 import FSDP1Model, own_name


def is_sharded_by_fsdp(parameter: Tensor) -> bool:
    """While its group is unsharded, FSDP2 registers a plain tensor (or one of the tensor-parallel mesh alone).

    Between forward and backward it may be sharded over fewer ranks, on a mesh without names.
    """
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    return names is None or "dp_shard" in names


def sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those that are sharded at this moment, by name.

    FSDP1 puts plain tensors in their place while they are whole.
    """
    if isinstance(model, FSDP1Model):
        return {name: p for name, p in model.named_parameters() if isinstance(p, nn.Parameter)}
    return {name: p for name, p in model.named_parameters() if is_sharded_by_fsdp(p)}


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; shares memory with the tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full(tensor: Tensor) -> Tensor:
    """The global tensor on every rank, detached; a collective call if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Names that belong to one and the same parameter, of those that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def fsdp_group_of(model: nn.Module) -> dict[str, str]:
    """For each parameter the name of the innermost module below which FSDP manages it ('' is the root)."""
    owners: dict[str, str] = {}
    kinds = FSDPModule | FullyShardedDataParallel
    group_modules = [own_name(name) for name, module in model.named_modules() if isinstance(module, kinds)]
    for name, _ in model.named_parameters():
        owners[name] = max((g for g in group_modules if not g or name.startswith(f"{g}.")), key=len)
    return owners
