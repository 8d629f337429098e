"""First weights that do not depend on the layout.

Each full tensor is drawn from its own counter-based generator (Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405)
keyed by seed and parameter name; each rank then keeps its shard, and never holds more than one full tensor at a time.
DTensor's own random init gives every shard of a CPU mesh the same numbers (torch 2.13), and a different draw for each
mesh on CUDA.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from reference_trainer.model import Transformer, rope_table


@torch.no_grad()
def init_weights(model: Transformer, *, seed: int, part: str = "") -> None:
    """Fill every parameter and buffer whose name begins with `part`, sharded or not, in place; they must have memory.

    Raises ValueError for a parameter or buffer of a module that has no rule here.
    """
    for name, parameter in model.named_parameters():  # a tied weight once, with what its first owner is given
        if name.startswith(part):
            assign(parameter, _initial_value(model, name, tuple(parameter.shape), seed=seed))
    init_buffers(model, part=part)


def _initial_value(model: Transformer, full_name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """The full tensor, fp32 on the CPU."""
    owner, _, name = full_name.rpartition(".")
    module, config = model.get_submodule(owner), model.config
    match module, name, config.arithmetic:
        case nn.Embedding() | nn.Linear(), "weight", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.init_std)
        case nn.Linear(), "bias", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.bias_std)
        case nn.RMSNorm(), "weight", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.norm_std).add_(1.0)
        case nn.Embedding() | nn.Linear(), "weight", "integer":
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=2)
        case nn.Linear(), "bias", "integer":
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=shape[-1] // 4)
        case nn.RMSNorm(), "weight", "integer":
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=shape[-1])
        case _:
            raise ValueError(_no_rule(full_name, module, "_initial_value"))


@torch.no_grad()
def init_buffers(model: Transformer, *, part: str = "") -> None:
    """Fill every buffer whose name begins with `part`. Raises ValueError for one that has no rule here."""
    for full_name, buffer in model.named_buffers():
        if not full_name.startswith(part):
            continue
        if full_name != "rope_table":
            raise ValueError(_no_rule(full_name, model.get_submodule(full_name.rpartition(".")[0]), "init_buffers"))
        assign(buffer, rope_table(model.config, device="cpu"))


def _no_rule(full_name: str, module: nn.Module, function: str) -> str:
    return f"no initialisation rule for {full_name} of {type(module).__name__}: add one to {__name__}.{function}"


def normal(shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """Standard normal numbers, fp32, that depend on (name, seed) alone."""
    drawn = torch.empty(shape)
    _generator(name, seed).standard_normal(out=drawn.numpy(), dtype=np.float32)
    return drawn


def signs(shape: tuple[int, ...], *, name: str, seed: int, nonzeros_per_row: int) -> Tensor:
    """-1 or 1 at so many random places along the last dimension, 0 elsewhere; fp32, depends on (name, seed) alone."""
    generator = _generator(name, seed)
    values = generator.choice((-1.0, 1.0), size=shape)
    values[generator.random(shape).argsort(axis=-1) >= nonzeros_per_row] = 0.0  # argsort: a random permutation
    return torch.from_numpy(values).float()


def _generator(name: str, seed: int) -> np.random.Generator:
    name_key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=np.array([seed, name_key], dtype=np.uint64)))


def assign(target: Tensor, value: Tensor) -> None:
    """Fill a tensor, or a rank's shard of it, from the full value, which every rank must have."""
    if isinstance(target, DTensor):
        target.to_local().copy_(_shard(value, target))
    else:
        target.copy_(value)


def _shard(value: Tensor, like: DTensor) -> Tensor:
    """The view of a full tensor that a rank holds of one laid out like the other; nothing is copied or communicated.

    Mesh dimensions cut from the last to the first: tensor parallelism, and then FSDP what that has left. Each cuts as
    `torch.chunk` does, so the last ranks may get less, or nothing. (`distribute_tensor` copies the tensor up to twice.)
    """
    mesh = like.device_mesh
    for mesh_dim in reversed(range(mesh.ndim)):
        dim = getattr(like.placements[mesh_dim], "dim", None)
        if dim is not None:
            parts, rank = value.chunk(mesh.size(mesh_dim), dim), mesh.get_local_rank(mesh_dim)
            value = parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)
    return value
