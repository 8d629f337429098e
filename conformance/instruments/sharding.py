"""Sharded state of a model, from public attributes alone, and its unsharded parameters over time."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from conformance.instruments.dispatch_tap import plain_tensors
from reference_trainer.fsdp1 import FSDP1Model, own_name
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


def is_sharded_by_fsdp(parameter: Tensor) -> bool:
    """Return whether FSDP2 has a parameter sharded at present; the parameter has any shape and dtype.

    While its group is unsharded, FSDP2 registers a plain tensor (or a DTensor of the tensor-parallel mesh alone).
    Between forward and backward the parameter may be sharded over fewer ranks, on a mesh without names.
    """
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    return names is None or not {"dp_shard", "expert_shard"}.isdisjoint(names)


def sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that FSDP has sharded at present, by name, in any shape and dtype.

    FSDP1 replaces unsharded parameters by plain tensors.
    """
    if isinstance(model, FSDP1Model):
        return {name: p for name, p in model.named_parameters() if isinstance(p, nn.Parameter)}
    return {name: p for name, p in model.named_parameters() if is_sharded_by_fsdp(p)}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or a plain tensor itself, detached; it shares memory with the tensor.

    Of a shard that is itself a wrapper, such as one that is gathered in float8, that is the wrapped tensor.
    """
    return next(plain_tensors((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()))


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank, detached, in the dtype of its shards. A collective if it is sharded."""
    return local(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def fsdp_group_of(model: nn.Module) -> dict[str, str]:
    """Return the innermost module below which FSDP manages a parameter, by parameter; '' is the root."""
    owners: dict[str, str] = {}
    kinds = FSDPModule | FullyShardedDataParallel
    group_modules = [own_name(name) for name, module in model.named_modules() if isinstance(module, kinds)]
    for name, _ in model.named_parameters():
        owners[name] = max((group for group in group_modules if not group or name.startswith(f"{group}.")), key=len)
    return owners


_POINT_AT_PHASE: dict[Phase, str] = {"backward": "after_forward", "optimizer": "at_optimizer", "idle": "after_step"}
"""Point in time by the phase that begins then."""


class Residency(Observer):
    """Record of the unsharded parameters after forward, before the optimizer steps and at the end of each step.

    Leaves `unsharded` of `facts.RankFacts`, whose keys are `STEP/POINT`; POINT is `after_forward`, `at_optimizer` or
    `after_step`.
    """

    def __init__(self) -> None:
        self.unsharded: dict[str, list[str]] = {}
        self._model: Transformer | None = None
        self._names: list[str] = []

    def sharded(self, model: Transformer) -> None:
        """Remember the model and the names of its parameters."""
        self._model, self._names = model, [name for name, _ in model.named_parameters()]

    def phase(self, name: Phase, *, step: int) -> None:
        """Write down the unsharded parameters at the points in time that count."""
        point = _POINT_AT_PHASE.get(name)
        if point is None or self._model is None:
            return
        sharded = sharded_parameters(self._model)
        self.unsharded[f"{step}/{point}"] = [name for name in self._names if name not in sharded]
