"""Stages of a small pipeline whose numbers are exact, and one process that computes all stages of all ranks.

Weights are signed permutations, other numbers small integers, and activations are cut off at 8: gradients are integers,
and multiples of the number of micro-batches, so that every sum and quotient has one result, in any order.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.checkpoint import checkpoint

from conformance.sweeps.covering_sweep import Options
from conformance.sweeps.layouts import integers

WIDTH, LENGTH = 4, 2
ROWS = 2
"""Rows of a micro-batch."""
_LIMIT = 8
"""Largest activation."""
FREEZES: Mapping[str, Callable[[int, int], bool]] = {
    "none": lambda _index, _stages: False,
    "first": lambda index, _stages: index == 0,
    "second": lambda index, _stages: index == 1,
    "last": lambda index, stages: index == stages - 1,
    "all but last": lambda index, stages: index < stages - 1,
}
"""Functions that return whether a stage of so many is frozen, by value of `frozen`."""


class Layout(NamedTuple):
    """Numbers of a pipeline."""

    ranks: int
    stages: int
    micro_batches: int


def _ones(*shape: int, seed: int) -> Tensor:
    return integers(*shape, low=-1, high=1, seed=seed)


class Stage(nn.Module):
    """Stage of a pipeline: a signed permutation and a bias, with additions by its options."""

    counted: Tensor

    def __init__(self, index: int, layout: Layout, options: Options, *, placement: Placement | None = None) -> None:
        super().__init__()
        self._placement = placement
        self.index, self.is_last, self.options = index, index == layout.stages - 1, options
        order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(index))
        signs = 2.0 * (_ones(WIDTH, seed=index) > 0) - 1
        self.weight = nn.Parameter(torch.diag(signs)[order])
        self.bias = nn.Parameter(_ones(WIDTH, seed=100 + index))
        self.register_buffer("counted", torch.zeros(()))
        self.calls: Counter[str] = Counter()
        if FREEZES[options["frozen"]](index, layout.stages):
            self.requires_grad_(False)

    def forward(self, x: Tensor, *passed: Tensor, **given: Any) -> Any:
        """Compute the activations of the next stage, or the outputs of the last, of shape (rows, length, width)."""
        if self.options["stage"] == "buffer":
            self.counted += 1
        if self.options["stage"] == "hooks" and x.requires_grad:
            self._register(x)
        if self.options["stage"] == "checkpointed":
            out: Tensor = checkpoint(self._computed, x, passed, given, use_reentrant=False)
        else:
            out = self._computed(x, passed, given)
        return self._outputs(out, x, passed) if self.is_last else self._passed(out, x, passed)

    def _register(self, x: Tensor) -> None:
        """Register a hook on the gradient of an input, which tells if it is called again."""
        called: list[Tensor] = []

        def hook(grad: Tensor) -> None:
            if called:
                self.calls["hook called again"] += 1
            called.append(grad.detach())

        x.register_hook(hook)  # type: ignore[no-untyped-call]

    def _computed(self, x: Tensor, passed: Sequence[Tensor], given: Mapping[str, Any]) -> Tensor:
        out: Tensor = x.to(self.weight.dtype) @ self.weight.T + self.bias
        if self.options["stage"] == "shared weight":
            out = out.clamp(-_LIMIT, _LIMIT) @ self.weight.T
        offset = given.get("nested", given).get("offset")
        if offset is not None:
            out = out + offset
        if passed and self.options["passed"] in ("two tensors", "input"):
            out = out + passed[0]
        return out.clamp(-_LIMIT, _LIMIT)

    def _passed(self, out: Tensor, x: Tensor, passed: Sequence[Tensor]) -> Any:
        if isinstance(out, DTensor) and self._placement is not None:
            out = out.redistribute(placements=[self._placement])
        match self.options["passed"]:
            case "two tensors":
                return out, -out
            case "input":
                return out, x
            case "without gradient":
                return out, passed[0] if passed else torch.arange(len(x))
            case "unused":
                return out, 2 * out
            case "list":
                return [out]
            case "view":
                return out.view(out.shape)
            case "bf16":
                return out.bfloat16()
            case "transposed":
                return out.transpose(0, 1).contiguous().transpose(0, 1)
        return out

    def _outputs(self, out: Tensor, x: Tensor, passed: Sequence[Tensor]) -> Any:
        match self.options["outputs"]:
            case "tuple":
                return out, 2 * out
            case "dict":
                return {"out": out}
            case "view":
                return out.view(out.shape)
        return out


def loss_of(out: Any, target: Tensor, options: Options, layout: Layout, factor: float = 1.0) -> Tensor:
    """Return the loss of a micro-batch, a multiple of the number of micro-batches."""
    out = out["out"] if isinstance(out, dict) else out
    out = out[0] + out[1] if isinstance(out, tuple | list) else out
    out = out.full_tensor() if isinstance(out, DTensor) else out
    target = target.transpose(0, 1) if options["chunk_specs"] == "along dim 1" else target
    squares: Tensor = layout.micro_batches * factor * (out - target) ** 2
    return squares.sum() if options["loss_fn"] == "sum" else squares.mean()


@dataclass
class Batch:
    """Arguments of a call of a schedule."""

    x: Tensor
    kwargs: dict[str, Any]
    target: Tensor

    @classmethod
    def of(cls, call: int, replica: int, layout: Layout, options: Options) -> "Batch":
        """Return the arguments of a call on the stages of a data-parallel replica."""
        rows, seed = layout.micro_batches * ROWS, 1000 * replica + 10 * call
        x, offset = _ones(rows, LENGTH, WIDTH, seed=seed), _ones(rows, LENGTH, WIDTH, seed=seed + 1)
        target = _ones(rows, LENGTH, WIDTH, seed=seed + 2)
        if options["chunk_specs"] == "along dim 1":
            x, offset = x.transpose(0, 1).contiguous(), offset.transpose(0, 1).contiguous()
        choices: dict[str, dict[str, Any]] = {
            "none": {},
            "tensor": {"offset": offset},
            "number": {"offset": 1.0},
            "nested": {"nested": {"offset": offset}},
        }
        return cls(x.requires_grad_(options["input_requires_grad"]), choices[options["kwargs"]], target)

    def micro_batches(self, layout: Layout, options: Options) -> Iterator[tuple[Tensor, dict[str, Any], Tensor]]:
        """Yield inputs, keyword arguments and target of each micro-batch."""
        dim = 1 if options["chunk_specs"] == "along dim 1" else 0
        for index in range(layout.micro_batches):

            def chunk(value: Any, dim: int = dim, index: int = index) -> Any:
                if isinstance(value, dict):
                    return {key: chunk(each, dim, index) for key, each in value.items()}
                return value.narrow(dim, index * ROWS, ROWS) if isinstance(value, Tensor) else value

            yield chunk(self.x.detach()), chunk(self.kwargs), chunk(self.target, 0)


@dataclass
class Seen:
    """State after a call: of one process all stages, of a rank its own."""

    returned: Any
    losses: list[Tensor]
    input_gradient: Tensor | None
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    calls: dict[str, int]


class PlainPipeline:
    """All stages of the data-parallel replicas whose gradients are averaged, in one process, with their calls."""

    def __init__(
        self,
        layout: Layout,
        replicas: Collection[int],
        replica: int,
        options: Options,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._layout, self._options = layout, options
        self._replicas, self._replica = replicas, replica
        self._stages = [Stage(index, layout, options).to(dtype) for index in range(layout.stages)]
        self._outputs: list[Any] = []
        self._losses: list[Tensor] = []
        self._input_gradient: Tensor | None = None

    def call(self, name: str, number: int) -> Seen:
        """Perform a call; returns the state after it."""
        self._outputs, self._losses, self._input_gradient = [], [], None
        if name in ("step", "eval"):
            self._compute(number, trains=name == "step" and self._options["loss_fn"] != "none")
        else:
            change(self._stages, name)
        return self._seen()

    def _compute(self, number: int, *, trains: bool) -> None:
        sums: dict[nn.Parameter, Tensor] = {}
        for replica in self._replicas:
            batch = Batch.of(number, replica, self._layout, self._options)
            for grads in self._replica_gradients(batch, is_own=replica == self._replica, trains=trains):
                for parameter, grad in grads.items():
                    sums[parameter] = sums.get(parameter, torch.zeros(())) + grad
        divisor = len(self._replicas) * (self._layout.micro_batches if self._options["scale_grads"] else 1)
        for parameter, total in sums.items():
            grad = total / divisor
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _replica_gradients(self, batch: Batch, *, is_own: bool, trains: bool) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Yield the gradients of each micro-batch, if it trains; keep outputs and losses of the own replica."""
        parameters = [p for stage in self._stages for p in stage.parameters() if p.requires_grad]
        inputs = []
        calls = [(stage.counted.clone(), stage.calls.copy()) for stage in self._stages]
        for x, kwargs, target in batch.micro_batches(self._layout, self._options):
            leaf = x.requires_grad_(batch.x.requires_grad and trains)
            with torch.set_grad_enabled(trains):
                out = self._forward(leaf, kwargs)
            if is_own:
                self._outputs.append(out)
            if self._options["loss_fn"] == "none":
                continue
            factor = 2.0 if self._options["loss_fn"] == "keyword" and trains else 1.0
            loss = loss_of(out, target, self._options, self._layout, factor)
            if is_own:
                self._losses.append(loss.detach())
            if trains:
                leaves = [*parameters, *([leaf] if leaf.requires_grad else [])]
                grads = torch.autograd.grad(loss, leaves)
                inputs += [grads[-1]] if leaf.requires_grad else []
                if self._options["stage"] == "parameter hooks":
                    for stage in self._stages:
                        stage.calls["gradients of parameters"] += sum(p.requires_grad for p in stage.parameters())
                yield dict(zip(parameters, grads, strict=False))
        if is_own and inputs:
            self._input_gradient = torch.cat(inputs, 1 if self._options["chunk_specs"] == "along dim 1" else 0)
        if not is_own:  # counts of calls are those of one replica
            for stage, (counted, before) in zip(self._stages, calls, strict=True):
                stage.counted.copy_(counted)
                stage.calls = before

    def _forward(self, x: Tensor, kwargs: dict[str, Any]) -> Any:
        out: Any = x
        for stage in self._stages:
            out = stage(*(out if isinstance(out, tuple | list) else (out,)), **kwargs)
        return out

    def _seen(self) -> Seen:
        returned = None
        if self._outputs and self._options["return_outputs"]:
            returned = _merged(self._outputs, 1 if self._options["chunk_specs"] == "along dim 1" else 0)
        return seen_of({stage.index: stage for stage in self._stages}, returned, self._losses, self._input_gradient)


def _merged(outputs: list[Any], dim: int) -> Any:
    first = outputs[0]
    if isinstance(first, dict):
        return {key: _merged([each[key] for each in outputs], dim) for key in first}
    if isinstance(first, tuple):
        return tuple(_merged(list(each), dim) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim).detach()


def change(stages: Sequence[nn.Module], name: str) -> None:
    """Perform a call that is no computation on the stages of a process."""
    for stage in stages:
        first = cast("Stage", stage).index == 0
        for parameter in stage.parameters():
            match name:
                case "clear":
                    parameter.grad = None
                case "update":
                    if parameter.grad is not None:
                        with torch.no_grad():
                            parameter.mul_(1 - 2 * (parameter.grad > 0).to(parameter.dtype))
                    parameter.grad = None
                case "freeze first" | "thaw first":
                    if first:
                        parameter.requires_grad_(name == "thaw first")


def seen_of(
    stages: Mapping[int, nn.Module], returned: Any, losses: list[Tensor], input_gradient: Tensor | None
) -> Seen:
    """Return the state of stages by index."""
    named = {f"{index}.{name}": p for index, stage in stages.items() for name, p in stage.named_parameters()}
    bare = {index: cast("Stage", stage) for index, stage in stages.items()}
    return Seen(
        returned,
        losses,
        input_gradient,
        {name: p.detach().clone() for name, p in named.items()},
        {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()},
        {f"{index}.counted": stage.counted.clone() for index, stage in bare.items()},
        {f"{index}, {what}": count for index, stage in bare.items() for what, count in stage.calls.items() if count},
    )
