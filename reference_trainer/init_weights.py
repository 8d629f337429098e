"""Initial weights that do not depend on the layout.

Each full tensor is sampled from a separate counter-based generator (Philox, Salmon et al. 2011,
doi:10.1145/2063384.2063405), keyed by seed and parameter name; each rank then keeps its shard, and never holds more
than one full tensor at a time. DTensor's own random init gives every shard of a CPU mesh the same numbers (torch 2.13),
and other numbers for each mesh on CUDA.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from reference_trainer.experts import Experts, Router
from reference_trainer.model import Transformer, rope_table


@torch.no_grad()
def init_weights(model: Transformer, *, seed: int, prefix: str = "") -> None:
    """Fill parameters and buffers whose names begin with `prefix` in place, sharded or not; they are materialised.

    Raises ValueError for a parameter or buffer of a module that has no rule here.
    """
    for name, parameter in model.named_parameters():  # a tied weight once, under the name of its first owner
        if name.startswith(prefix):
            assign(parameter, _initial_value(model, name, tuple(parameter.shape), seed=seed))
    init_buffers(model, prefix=prefix)


def _initial_value(model: Transformer, full_name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Full tensor of a parameter, fp32 on the CPU."""
    owner, _, name = full_name.rpartition(".")
    module, config = model.get_submodule(owner), model.config
    match module, name, config.arithmetic:
        case nn.Embedding() | nn.Linear() | Router() | Experts(), "weight" | "w1" | "w2" | "w3", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.init_std)
        case nn.Linear(), "bias", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.bias_std)
        case nn.RMSNorm(), "weight", "float":
            return normal(shape, name=full_name, seed=seed).mul_(config.norm_std).add_(1.0)
        case nn.Embedding() | nn.Linear(), "weight", "integer":
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=2)
        case nn.Linear(), "bias", "integer":
            # More nonzeros, and sums of the conformance suite's workload exceed 2**24 with some seeds.
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=shape[-1] // 8)
        case nn.RMSNorm(), "weight", "integer":
            return signs(shape, name=full_name, seed=seed, nonzeros_per_row=shape[-1])
        case _:
            raise ValueError(_no_rule(full_name, module, "_initial_value"))


@torch.no_grad()
def init_buffers(model: Transformer, *, prefix: str = "") -> None:
    """Fill every buffer whose name begins with `prefix`. Raises ValueError for a buffer that has no rule here."""
    for full_name, buffer in model.named_buffers():
        if not full_name.startswith(prefix):
            continue
        if full_name != "rope_table":
            raise ValueError(_no_rule(full_name, model.get_submodule(full_name.rpartition(".")[0]), "init_buffers"))
        assign(buffer, rope_table(model.config, device="cpu"))


def _no_rule(full_name: str, module: nn.Module, function: str) -> str:
    return f"no initialisation rule for {full_name} of {type(module).__name__}: add one to {__name__}.{function}"


def normal(shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """Sample standard normal numbers, fp32, that depend on (name, seed) alone."""
    sampled = torch.empty(shape)
    _generator(name, seed).standard_normal(out=sampled.numpy(), dtype=np.float32)
    return sampled


def signs(shape: tuple[int, ...], *, name: str, seed: int, nonzeros_per_row: int) -> Tensor:
    """Sample -1 or 1 at `nonzeros_per_row` random positions of each row (last dimension), 0 elsewhere.

    The numbers are fp32 and depend on (name, seed) alone.
    """
    generator = _generator(name, seed)
    values = generator.choice((-1.0, 1.0), size=shape)
    values[generator.random(shape).argsort(axis=-1) >= nonzeros_per_row] = 0.0  # argsort: a random permutation
    return torch.from_numpy(values).float()


def _generator(name: str, seed: int) -> np.random.Generator:
    name_key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=np.array([seed, name_key], dtype=np.uint64)))


def assign(target: Tensor, value: Tensor) -> None:
    """Fill a tensor, or a rank's shard of a DTensor, from the full value, which every rank must have."""
    if isinstance(target, DTensor):
        target.to_local().copy_(_shard(value, target))
    else:
        target.copy_(value)


def _shard(value: Tensor, like: DTensor) -> Tensor:
    """View of the shard of a full tensor that this rank would hold in the layout of `like`.

    Nothing is copied or communicated. (`distribute_tensor` copies the tensor up to twice.) Mesh dimensions shard from
    the last to the first: tensor parallelism the full tensor, then FSDP the shards. Each does so as `torch.chunk`, so
    that the last ranks may get less, or nothing.
    """
    mesh = like.device_mesh
    for mesh_dim in reversed(range(mesh.ndim)):
        dim = getattr(like.placements[mesh_dim], "dim", None)
        if dim is not None:
            shards, rank = value.chunk(mesh.size(mesh_dim), dim), mesh.get_local_rank(mesh_dim)
            value = shards[rank] if rank < len(shards) else value.narrow(dim, 0, 0)
    return value
