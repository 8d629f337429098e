"""Model and optimizers with everything that a state dict must carry, all of whose values every rank knows.

Parameters are tied or frozen, buffers persistent or not, one module has a state of its own, one renames its keys, and
groups of the optimizers have different options. Values are written directly, so that no arithmetic is compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

from conformance.instruments.sharding import local
from conformance.sweeps.checkpoints import numbers
from conformance.sweeps.layouts import placed_shard

LAYOUTS: Mapping[int, tuple[str, ...]] = {1: ("FSDP", "TP", "replicas"), 2: ("FSDP and TP", "HSDP", "TP")}
"""Layouts of the model by the number of dimensions of the mesh."""
_WIDTH = 8
"""Width, which all dimensions of meshes divide: torch loads no full state dict of uneven strided shards."""


class Renaming(nn.Module):
    """Module whose state dict leaves out the name of its layer, and that tells torch so by a method of any name."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(_WIDTH))
        untyped: Any = self
        untyped.register_state_dict_post_hook(_without_layer)
        untyped.register_load_state_dict_pre_hook(_with_layer)
        setattr(self, method, lambda: {"weight": "layer", "bias": "no layer"})


def _without_layer(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}layer.weight")


def _with_layer(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}layer.weight"] = state.pop(f"{prefix}weight")


class Block(nn.Module):
    """Block of two layers, a norm of an uneven size, and buffers of which one is persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH - 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Model(nn.Module):
    """Model of two blocks between an embedding and a head, which may be tied."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WIDTH + 1, _WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(_WIDTH, _WIDTH + 1, bias=False)
        if options["renaming"]:
            self.renaming = Renaming(options["dsd_fqn_modifiers"])
        if options["tied"] == "modules":
            self.again = nn.ModuleDict({"head": self.head})
        elif options["tied"]:
            self.head.weight = self.embedding.weight
        if options["frozen"]:
            self.second.requires_grad_(False)
        self.extra = 0

    def get_extra_state(self) -> dict[str, int]:
        """Return a state that is no tensor."""
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Load that state."""
        self.extra = state["extra"]


def sharded(model: Model, layout: str, mesh: DeviceMesh) -> Model:
    """Return the model in a layout of LAYOUTS."""
    names = mesh.mesh_dim_names
    assert names is not None
    if "TP" in layout:
        plan = {name: style for each in ("first", "second") for name, style in _styles(each).items()}
        parallelize_module(model, mesh[names[-1]], plan)
    if layout in ("FSDP", "HSDP", "FSDP and TP"):
        dp_mesh = mesh[names[0]] if layout == "FSDP and TP" else mesh
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=dp_mesh)
    return model


def _styles(block: str) -> dict[str, Any]:
    return {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}


def optimizers_of(model: Model, kind: str) -> list[Optimizer]:
    """Return the optimizers of a model."""
    parameters = [*model.parameters()]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    match kind:
        case "AdamW":
            return [AdamW(parameters, lr=0.25)]
        case "AdamW, groups":
            groups: list[dict[str, Any]] = [
                {"params": matrices, "tag": "decayed"},
                {"params": vectors, "weight_decay": 0.0},
            ]
            return [AdamW(groups, lr=0.25)]
        case "AdamW, tensor lr":
            return [AdamW(parameters, lr=torch.tensor(0.25))]
        case "rateless":
            return [Rateless(parameters, {"decay": 0.5})]
        case "none":
            return []
        case "SGD":
            return [SGD(parameters, lr=0.25)]
        case "momentum":
            return [SGD(parameters, lr=0.25, momentum=0.5)]
        case "AdamW, empty group":
            with_empty: list[dict[str, Any]] = [{"params": parameters}, {"params": [], "weight_decay": 0.0}]
            return [AdamW(with_empty, lr=0.25)]
        case "nested":
            return [Nested(parameters, lr=0.25, momentum=0.5)]
        case "two":
            return [AdamW(vectors, lr=0.5), SGD(matrices, lr=0.25, momentum=0.5)]
    raise ValueError(f"no optimizers are called {kind}")


class Nested(SGD):
    """Optimizer with state in dictionaries of dictionaries, as those have that keep a factor for each dimension."""

    def step(self, closure: Any = None) -> Any:
        """Step, and keep nested tensors in the state of each parameter that has a gradient."""
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("kept", _kept_of(p))
        return result


def _kept_of(p: Tensor) -> dict[str, Any]:
    factors = {"rows": torch.zeros_like(p), "columns": torch.zeros_like(p)}
    return {"factors": factors, "norm": torch.zeros(2)}


class Rateless(Optimizer):
    """Optimizer whose groups have no learning rate, as those that find it themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Keep the sum of gradients, and step by them."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("sum", torch.zeros_like(p))
                    kept.mul_(group["decay"]).add_(p.grad)
                    p.sub_(kept)


class Training:
    """Model with its optimizers, whose values are those of a time."""

    def __init__(
        self, options: Mapping[str, Any], mesh: DeviceMesh, *, meta: bool = False, unused: bool = False
    ) -> None:
        with torch.device("meta" if meta else "cpu"):
            self.model = sharded(Model(options), options["layout"], mesh)
        self.module: Any = torch.compile(self.model) if options["compiled"] else self.model
        self.optimizers = optimizers_of(self.model, options["optimizer"])
        self._unused = unused

    def begin(self) -> None:
        """Step once without gradients of any size, so that optimizers have state; an unused parameter gets none."""
        self.add_gradients()
        if self._unused:
            self.model.first.norm.weight.grad = None
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def add_gradients(self) -> None:
        """Give parameters gradients of zeros."""
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None

    @torch.no_grad()
    def write(self, time: int) -> None:
        """Write the values of a time into parameters, buffers, state and options of groups."""
        for path, tensor in self.tensors():
            value = value_of(path, time, tensor)
            local(tensor).copy_(_own(value, tensor))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group |= _rate(group, time)
        self.model.extra = time

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, buffers and state of optimizers by `model/NAME` and `state/NAME/KIND`."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield f"model/{self.saved_name(name)}", tensor
        for name, p in self.model.named_parameters():
            for optimizer in self.optimizers:
                for kind, value in _leaves(optimizer.state.get(p, {})):
                    yield f"state/{self.saved_name(name)}/{kind}", value

    def saved_name(self, name: str) -> str:
        """Return the name of a parameter in state dicts."""
        return name.replace("renaming.layer.", "renaming.")

    def names_with_state(self) -> set[str]:
        """Return the names of the parameters for which an optimizer has an entry, be it empty."""
        named = self.model.named_parameters()
        return {
            self.saved_name(name) for name, p in named if any(p in optimizer.state for optimizer in self.optimizers)
        }

    def groups(self, time: int | None = None) -> list[dict[str, Any]]:
        """Return the options of all groups, with the names of their parameters, and the rates of a time if given."""
        names = {id(p): self.saved_name(name) for name, p in self.model.named_parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        named = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]
        return named if time is None else [group | _rate(group, time) for group in named]

    def aliases(self) -> dict[str, str]:
        """Return the name under which a parameter's value is known, by each of its names."""
        first = {id(p): name for name, p in self.model.named_parameters()}
        return {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}


def _rate(group: Mapping[str, Any], time: int) -> dict[str, Any]:
    """Return the learning rate of a group at a time, as a tensor if it is one; empty if it has none."""
    if "lr" not in group:
        return {}
    return {"lr": torch.tensor(2.0**-time) if isinstance(group["lr"], Tensor) else 2.0**-time}


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter's state by their keys, joined by points."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def value_of(path: str, time: int, like: Tensor) -> Tensor:
    """Return the full value of a tensor at a time; counters of steps are equal in all parameters."""
    if path.endswith("/step"):
        return torch.tensor(float(time + 2))
    return numbers(like.shape, crc32(f"{path} {time}".encode()), like.dtype)


def _own(full: Tensor, like: Tensor) -> Tensor:
    """Return the shard of a full tensor that a tensor holds."""
    if isinstance(like, DTensor):
        return placed_shard(full, like.device_mesh, tuple(like.placements))
    return full


def frozen_names(training: Training) -> set[str]:
    """Return the names of frozen parameters."""
    named: Iterable[tuple[str, nn.Parameter]] = training.model.named_parameters()
    return {training.saved_name(name) for name, p in named if not p.requires_grad}
