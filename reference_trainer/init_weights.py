"""Initial weights that do not depend on the layout.

Each full tensor is drawn from its own counter-based generator (Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405)
keyed by seed and parameter name; each rank then keeps its shard. DTensor's own random init gives every shard of a CPU
mesh the same numbers (torch 2.13), and a different draw for each mesh on CUDA.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer, rope_table


@torch.no_grad()
def init_weights(model: Transformer, *, seed: int) -> None:
    """Fill every parameter and buffer of a materialised model, sharded or not, in place.

    Raises ValueError for a module that has parameters or buffers of its own but no rule here.
    """
    done: set[int] = set()
    for module_name, module in model.named_modules():
        own_tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own_tensors:
            if id(tensor) in done:  # a tied weight keeps what its first owner was given
                continue
            done.add(id(tensor))
            full_name = f"{module_name}.{name}".lstrip(".")
            _assign(tensor, _initial_value(module, name, full_name, tuple(tensor.shape), model.config, seed))


def _initial_value(
    module: nn.Module, name: str, full_name: str, shape: tuple[int, ...], config: ModelConfig, seed: int
) -> Tensor:
    """The full tensor, fp32 on the CPU."""
    match module, name:
        case (nn.Embedding() | nn.Linear(), "weight"):
            return config.init_std * normal(shape, name=full_name, seed=seed)
        case nn.Linear(), "bias":
            return config.bias_std * normal(shape, name=full_name, seed=seed)
        case nn.RMSNorm(), "weight":
            return 1.0 + config.norm_std * normal(shape, name=full_name, seed=seed)
        case Transformer(), "rope_table":
            return rope_table(config, device="cpu")
        case _:
            kind = type(module).__name__
            raise ValueError(f"no initialisation rule for {full_name} of {kind}: add one to {__name__}._initial_value")


def normal(shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """Standard normal numbers, fp32, that depend on (name, seed) alone."""
    name_key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, name_key], dtype=np.uint64)))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def _assign(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        # Every rank has drawn the same full tensor, so each takes its shard without communication.
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)
