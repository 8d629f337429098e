"""Tensors and fingerprints of a run: initial state, each step's gradients before and after clipping, final state.

Each rank keeps its own shards, and their indices in the full tensor. Nothing is communicated, so capturing is cheap and
does not depend on the collectives that laws judge. Of the initial parameters, one of each layout is also gathered by
DTensor's redistribution, the product's own way, which INIT-2 compares with the reference.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.instruments.sharding import full, local
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


def fingerprint(tensor: Tensor) -> str:
    """Return a digest of shape, dtype and every bit of a tensor of any shape and dtype: 16 hexadecimal digits."""
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def shard_indices(parameter: DTensor) -> Tensor:
    """Return the indices into the flattened full tensor of the elements in this rank's shard.

    They are int64, of the shard's shape, and on the CPU.

    Each mesh dimension cuts the remaining shard as `torch.chunk` does. FSDP2 cuts the shard of tensor parallelism,
    although its mesh dimension comes first, and its placement then has a `split_factor`. (`distribute_tensor` cuts
    uneven dimensions elsewhere than `fully_shard` up to torch 2.8: https://github.com/pytorch/pytorch/pull/163843.)
    """
    indices = torch.arange(parameter.numel(), device="cpu").view(parameter.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    for index in sorted(range(mesh.ndim), key=lambda index: hasattr(placements[index], "split_factor")):
        if not placements[index].is_replicate():
            indices = _chunk(indices, placements[index].dim, mesh.size(index), mesh.get_local_rank(index))  # type: ignore[attr-defined]
    return indices.contiguous()


def _chunk(tensor: Tensor, dim: int, count: int, index: int) -> Tensor:
    """Chunk number `index` of exactly `count` chunks as of `torch.chunk`, of which the last may be empty."""
    size = -(-tensor.shape[dim] // count)
    start = min(index * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def one_of_each_layout(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield one parameter of each shape, dtype, mesh and placement: DTensor gathers equal layouts in the same way.

    Gathering all of them takes a tenth of a run with tensor parallelism.
    """
    seen = set()
    for name, parameter in parameters:
        placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
        layout = (parameter.shape, parameter.dtype, *placed)
        if layout not in seen:
            seen.add(layout)
            yield name, parameter


class Capture(Observer):
    """This rank's shards of all tensors by the key `WHEN/KIND/NAME`, on the CPU, and their fingerprints.

    WHEN is `initial`, `resumed`, `stepN` (after backward) or `final`; KIND is `parameter`, `buffer`, `gradient`,
    `clipped` for gradients after clipping, a key of the optimizer state such as `exp_avg`, or `gathered` for one
    parameter of each layout, gathered by torch. `layout/NAME` holds a parameter's `shard_indices`. `named` gives NAME
    from a name in the model.

    Leaves `fingerprints`, `layouts` and `batches` of `facts.RankFacts`.
    """

    def __init__(
        self, *, named: Callable[[str], str] = str, is_trained: Callable[[str, int], bool] = lambda _name, _step: True
    ) -> None:
        """Keep the gradients of parameters of which `is_trained` says, by name and step, that they are trained."""
        self._named, self._is_trained = named, is_trained
        self.tensors: dict[str, Tensor] = {}
        self.fingerprints: dict[str, str] = {}
        self.layouts: dict[str, str] = {}
        self.batches: list[dict[str, str]] = []

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """Digest the step's inputs and labels, each of all micro-batches together."""
        inputs, labels = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        self.batches.append({"inputs": fingerprint(inputs), "labels": fingerprint(labels)})

    def initialized(self, model: nn.Module) -> None:
        """Keep layouts, parameters that are gathered, and the initial parameters and buffers."""
        for name, parameter in self._parameters(model):
            if isinstance(parameter, DTensor):
                self.tensors[f"layout/{name}"] = shard_indices(parameter)
                self.layouts[name] = fingerprint(self.tensors[f"layout/{name}"])
        # One at a time: several redistributions in flight crash gloo, see findings/async_redistribution_on_gloo.py.
        for name, parameter in one_of_each_layout(self._parameters(model)):
            self._add(f"initial/gathered/{name}", full(parameter))
        self._state("initial", model, self._parameters(model))

    def gradients(self, model: nn.Module, *, step: int, sharded: Mapping[str, Tensor] | None = None) -> None:
        """Keep the gradients of a step, and its parameters.

        `sharded` are parameters by their names in the model, which may show unsharded ones of networks that another
        turn trains.
        """
        shards = {self._named(name): parameter for name, parameter in (sharded or {}).items()}
        for name, parameter in self._parameters(model):
            is_shown = self._is_trained(name, step) or name not in shards
            self._add(f"step{step}/parameter/{name}", parameter if is_shown else shards[name])
            if parameter.grad is not None and self._is_trained(name, step):
                self._add(f"step{step}/gradient/{name}", parameter.grad)

    def clipped(self, model: nn.Module, *, norm: Tensor, step: int) -> None:
        """Keep the gradients after clipping."""
        for name, parameter in self._parameters(model):
            if parameter.grad is not None and self._is_trained(name, step):
                self._add(f"step{step}/clipped/{name}", parameter.grad)

    def after_step(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, step: int) -> None:
        """Keep sharded parameters, by their names in the model, and the optimizer's state after a step.

        Keys are `afterN/KIND/NAME`. The model may show unsharded parameters meanwhile.
        """
        named = [(self._named(name), parameter) for name, parameter in parameters.items()]
        for name, parameter in named:
            self._add(f"after{step}/parameter/{name}", parameter)
        self._optimizer_state(f"after{step}", named, optimizer)

    def resumed(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state that a checkpoint has restored."""
        self._state("resumed", model, self._parameters(model))
        self._optimizer_state("resumed", self._parameters(model), optimizer)

    def final(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep the final state. Call it after the last step.

        `parameters` are the sharded ones by their names in the model, which may show unsharded ones meanwhile.
        """
        named = [(self._named(name), each) for name, each in (parameters or dict(model.named_parameters())).items()]
        self._state("final", model, named)
        self._optimizer_state("final", named, optimizer)

    def _optimizer_state(
        self, when: str, named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer
    ) -> None:
        for name, parameter in named:
            for key, value in optimizer.state.get(parameter, {}).items():
                # Other shapes: a step counter, or a flat shard of FSDP1.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._add(f"{when}/{key}/{name}", value)

    def _state(self, when: str, model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            self._add(f"{when}/parameter/{name}", parameter)
        for name, buffer in model.named_buffers():
            self._add(f"{when}/buffer/{self._named(name)}", buffer)

    def _parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        return ((self._named(name), parameter) for name, parameter in model.named_parameters())

    def _add(self, key: str, tensor: Tensor) -> None:
        # A copy: the run goes on to overwrite its parameters, of which a tensor "gathered" from one rank is a view.
        self.tensors[key] = local(tensor).cpu().clone(memory_format=torch.contiguous_format)
        self.fingerprints[key] = fingerprint(self.tensors[key])


class ModelInputs(Observer):
    """Collector of the tokens with which the model is called in the forward phase.

    Leaves `model_inputs` of `facts.RankFacts`.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._tokens: list[Tensor] = []
        self._phase: Phase = "build"

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase; when the optimizer is about to step, digest the tokens of the step."""
        self._phase = name
        if name == "optimizer" and self._tokens:  # only the first stage of a pipeline has tokens
            self.digests.append(fingerprint(torch.cat(self._tokens)))
            self._tokens.clear()

    def initialized(self, model: Transformer) -> None:
        """Hook the forward of the model, or of the first stage of a pipeline."""
        if model.is_first:
            (model.stages[0] if model.stages else model).register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._phase == "forward":
            self._tokens.append(inputs[0])
