"""Lives of a module: the calls of the grammar on a plain module, and on one that FSDP2 shards.

The plain module holds full parameters. In each training call it computes the gradients of every rank, one by one, with
the roundings that the policy documents, and adds their mean: all numbers are whole and small, and must be equal in
every bit.
"""

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim import Optimizer

from conformance.experiments.fsdp_net import fsdp_modules
from conformance.instruments.fsdp_state import partial_sums, unsharded_gradients
from conformance.instruments.sharding import local
from conformance.oracles.dtype_policy import FP32, unset_reduce_dtype
from conformance.sweeps.call_sequences import RULES, Call, Calls
from conformance.sweeps.layouts import placed_shard
from conformance.sweeps.options import SmallNet, samples_of

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_ABOUT_SHARDS = frozenset(
    {"fully_shard", "set_reshard_after_forward", "set_reshard_after_backward", "unshard", "reshard", "prefetch"}
)
"""Calls of sharded modules alone."""
_GATHERING = ("train", "forward", "evaluate", "unshard", "abort")
"""Calls that communicate."""
_MANY = range(6)
"""Indices of forwards before the first backward: more than buffers are in flight."""
WAYS: Mapping[str, Sequence[tuple[Literal["forward", "partial forward", "evaluate", "backward"], Sequence[int]]]] = {
    "": (("forward", [0]), ("backward", [0])),
    "twice": (("forward", [0, 1]), ("backward", [0, 1])),
    "losses": (("forward", [0, 1]), ("backward", [0]), ("backward", [1])),
    "retained": (("forward", [0]), ("backward", [0]), ("backward", [0])),
    "evaluated": (("forward", [0]), ("evaluate", [1]), ("backward", [0])),
    # As the micro-batches of a pipeline.
    "interleaved": (("forward", [0, 1]), ("backward", [0]), ("forward", [2]), ("backward", [1]), ("backward", [2])),
    "many": (("forward", _MANY), *(("backward", [index]) for index in _MANY)),
    "partly": (("partial forward", [0]), ("backward", [0])),
}
"""Ways of training: forwards on inputs of these indices, with or without gradients, and backwards of their sum.

A partial forward leaves out the second layer.
"""
_LARGEST = 256
"""Largest number up to which bf16 has all whole numbers."""


class NotComparable(Exception):
    """Sequence that plain torch refuses, or whose numbers a dtype would round."""


class Aborted(Exception):
    """Error of a user in an iteration."""


class SignSGD(Optimizer):
    """Optimizer that adds or subtracts 1 where a gradient is negative or positive, so that weights stay whole."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step with the signs of all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())


class LifeNet(SmallNet):
    """Net of which a forward may leave out the second layer."""

    def forward(self, x: Tensor, *, partly: bool = False) -> Tensor:  # type: ignore[override]
        """Compute outputs of shape (samples, width), or of the first layer's width."""
        return cast("Tensor", self.first(x).relu() + self.shift) if partly else super().forward(x)


class Shared(nn.Module):
    """Module that shares a layer with another one."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the shared layer."""
        return cast("Tensor", self.first(x).relu())


class Life:
    """Module with its optimizer, and the calls that are the same for plain and for sharded modules."""

    def __init__(self, calls: Calls, ranks: int) -> None:
        self.options = {call.name: call.value for call in calls}
        self.samples = samples_of(ranks)
        self.param_dtype = _DTYPES.get(self.options.get("param_dtype", ""))
        self.reduce_dtype = _DTYPES.get(self.options.get("reduce_dtype", ""))
        self.net: Any = LifeNet().to(_DTYPES.get(self.options.get("built_in", "")))
        self.optimizer = self._optimizer()
        self.output: Tensor | None = None
        self._kept: dict[str, Any] = {}
        self._trained = 0

    def call(self, call: Call) -> None:
        """Perform a call of the grammar."""
        self.output = None
        if not RULES[call.name].builds:
            getattr(self, call.name)(*filter(None, [call.value]))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which modules compute."""
        return self.param_dtype or cast("torch.dtype", self.net.first.weight.dtype)

    def inputs(self, rank: int, *, index: int = 0) -> Tensor:
        """Return inputs of 0 and 1, others for each training call; cast unless the policy does it."""
        x = self.samples[rank].roll(self._trained + index, -1)
        return x if self.param_dtype else x.to(self.compute_dtype)

    def step(self) -> None:
        """Step with the gradients that there are."""
        self.optimizer.step()

    def zero_grad(self, to: str) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad(set_to_none=to == "none")

    def freeze(self, name: str) -> None:
        """Let a parameter, or those of a layer, have no gradients."""
        for parameter in self._named(name):
            parameter.requires_grad_(False)

    def thaw(self, name: str) -> None:
        """Let a parameter, or those of a layer, have gradients."""
        for parameter in self._named(name):
            parameter.requires_grad_(True)

    def cast(self, dtype: str) -> None:
        """Cast all parameters."""
        with swapped_parameters():
            self.net.to(_DTYPES[dtype])

    def write(self, how: str) -> None:
        """Negate a weight in place, by its `data`, or by a new parameter."""
        layer = self.net.second
        match how:
            case "in place":
                with torch.no_grad():
                    layer.weight.neg_()
            case "data":
                layer.weight.data = -layer.weight.data
            case _:
                layer.weight = nn.Parameter(-layer.weight.detach(), requires_grad=layer.weight.requires_grad)

    def load(self, how: str) -> None:
        """Load a state dict of the negated parameters."""
        state = {name: -value.detach() for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(state, assign=how == "assigned")

    def keep(self) -> None:
        """Keep a copy of the state dict, as for a moving average."""
        self._kept = copy.deepcopy(self.net.state_dict())

    def restore(self) -> None:
        """Load the kept copy."""
        self.net.load_state_dict(self._kept)

    def to_empty(self, via: str = "cpu") -> None:
        """Allocate new memory for all parameters, and fill it with the first weights."""
        with swapped_parameters():
            if via == "meta":
                self.net.to("meta")
            self.net.to_empty(device="cpu")
        self.net.zero_grad()
        self.fill()

    def fill(self) -> None:
        """Write the first weights into the parameters."""
        source = LifeNet()
        for name, parameter in self.net.named_parameters():
            self._write(parameter, source.get_parameter(name))

    def _write(self, parameter: Tensor, value: Tensor) -> None:
        """Write into this rank's shard."""
        if isinstance(parameter, DTensor):
            value = placed_shard(value.detach(), parameter.device_mesh, parameter.placements)
        local(parameter).copy_(value)

    def hook(self, kind: str) -> None:
        """Register a hook that negates the output, the input, the gradient of the input, or that of the weight."""
        layer = self.net.second
        match kind:
            case "forward":
                layer.register_forward_hook(lambda _module, _args, out: -out)
            case "forward_pre":
                layer.register_forward_pre_hook(lambda _module, args: tuple(-arg for arg in args))
            case "backward":
                layer.register_full_backward_hook(lambda _module, grads, _out: tuple(-grad for grad in grads))
            case _:
                self.hook_on_gradient(layer.weight)

    def hook_on_gradient(self, parameter: nn.Parameter) -> None:
        """Register a hook that negates a parameter's gradient when it has been added up."""
        parameter.register_post_accumulate_grad_hook(_negate_gradient)  # type: ignore[no-untyped-call]

    def deepcopy(self) -> None:
        """Go on with a copy."""
        self.net = copy.deepcopy(self.net)
        self.optimizer = self._optimizer()

    def pickle(self) -> None:
        """Go on with a copy that was saved to a file, as a whole, and loaded."""
        file = io.BytesIO()
        torch.save(self.net, file)
        file.seek(0)
        self.net = torch.load(file, weights_only=False)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> Optimizer:
        return SignSGD(self.net.parameters())

    def _named(self, name: str) -> list[nn.Parameter]:
        match name:
            case "root":
                return [self.net.shift]
            case "first.weight":
                return [self.net.first.weight]
            case _:
                return list(getattr(self.net, name).parameters())


@contextmanager
def swapped_parameters() -> Iterator[None]:
    """Open a context in which a module that is moved or cast keeps its parameters, as it always does with DTensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _abort(*_: Any) -> None:
    raise Aborted


def _negate_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.neg_()


@dataclass(frozen=True)
class Seen:
    """State of the plain module after a call."""

    parameters: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    requires_grad: dict[str, bool]
    output: Tensor | None
    """Output of this rank's samples."""
    dtypes: dict[str, torch.dtype]
    """Dtypes in which the call may communicate, by the kind of collective."""


class PlainLife(Life):
    """Plain module with the calls of all ranks."""

    def __init__(self, calls: Calls, ranks: int, rank: int, *, has_replicas: bool = False) -> None:
        super().__init__(calls, ranks)
        self._rank, self._ranks = rank, ranks
        self._has_replicas = has_replicas
        self._synchronises = True
        self._first_dtype: torch.dtype | None = None
        """Dtype of the parameters when FSDP2 first gathers them."""
        self._pending: dict[str, Tensor] = {}
        self._hooked: list[nn.Parameter] = []

    def hook_on_gradient(self, parameter: nn.Parameter) -> None:
        """Remember the hook for the gradients that this class makes itself."""
        if not parameter.requires_grad:
            raise NotComparable("torch registers no hook on the gradient of a frozen parameter")
        self._hooked.append(parameter)

    def synchronise(self, value: str) -> None:
        """Reduce gradients, over shards alone or over replicas as well, or let them wait."""
        self._synchronises = value == "on" or (value == "shards" and not self._has_replicas)

    def call(self, call: Call) -> None:
        """Perform a call of the grammar, unless it is about shards."""
        if call.name in _GATHERING and self._first_dtype is None:
            self._first_dtype = self.net.first.weight.dtype
        if call.name not in _ABOUT_SHARDS:
            super().call(call)

    def forward(self) -> None:
        """Compute an output without a backward."""
        self.evaluate()

    def evaluate(self, how: str = "") -> None:
        """Compute an output without gradients."""
        x = self._cast(self._rank)
        if how == "shared":
            self.output = functional_call(self.net.first, self._leaves("first."), x).relu().detach()
        else:
            self.output = functional_call(self.net, self._leaves(), x, {"partly": how == "partly"}).detach()

    def abort(self, where: str) -> None:
        """Lose all gradients, also those that wait for a reduction; raises NotComparable if there is no backward."""
        if where == "backward" and not any(parameter.requires_grad for parameter in self.net.parameters()):
            raise NotComparable("no parameter has a gradient")
        self._pending.clear()
        self.net.zero_grad()

    def train(self, how: str = "") -> None:
        """Add the mean of the gradients of all ranks for each backward of the call."""
        ranks = [self._backwards(rank, how) for rank in range(self._ranks)]
        for grads in zip(*ranks, strict=True):
            self._reduce(grads)
        self._trained += 1

    def _backwards(self, rank: int, how: str) -> list[dict[str, Tensor | None]]:
        """Return the gradients of a rank after each backward of a call."""
        leaves = self._leaves()
        outputs: dict[int, Tensor] = {}
        found = []
        for act, indices in WAYS[how]:
            if act == "backward":
                torch.autograd.backward([outputs[each].sum() for each in indices], retain_graph=True)
                found.append({name: leaf.grad for name, leaf in leaves.items()})
                for leaf in leaves.values():
                    leaf.grad = None
            elif act != "evaluate":
                options = {"partly": act == "partial forward"}
                for each in indices:
                    outputs[each] = functional_call(self.net, leaves, self._cast(rank, index=each), options)
        if rank == self._rank:
            self.output = outputs[0].detach()
        return found

    def _reduce(self, ranks: Sequence[dict[str, Tensor | None]]) -> None:
        """Add the mean over ranks to the gradients, or keep the sum for a later reduction."""
        for name, parameter in self.net.named_parameters():
            terms = [grad.double() for grads in ranks if (grad := grads[name]) is not None]
            terms += [self._pending.pop(name)] if name in self._pending else []
            if not terms:
                continue
            total = torch.stack(terms).sum(0)
            if total.abs().max() > _LARGEST:
                raise NotComparable(f"the gradient of {name} is above {_LARGEST}")
            if not self._synchronises:
                self._pending[name] = total
                continue
            mean = (total / len(ranks)).to(parameter.dtype)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            for hooked in self._hooked:
                if hooked is parameter:
                    _negate_gradient(parameter)

    def seen(self, call: Call) -> Seen:
        """Return copies of the state after a call."""
        named = dict(self.net.named_parameters())
        return Seen(
            {name: parameter.detach().clone() for name, parameter in named.items()},
            {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()},
            {name: parameter.requires_grad for name, parameter in named.items()},
            self.output,
            self._dtypes(call),
        )

    def _dtypes(self, call: Call) -> dict[str, torch.dtype]:
        if call.name not in _GATHERING:
            return {}
        gathers = {"all_gather": self.compute_dtype}
        reduced = self.reduce_dtype or self._unset_reduce_dtype()
        return gathers | ({"reduce_scatter": reduced, "all_reduce": reduced} if call.name in ("train", "abort") else {})

    def _unset_reduce_dtype(self) -> torch.dtype:
        """Return the dtype of reductions without `reduce_dtype`: as of computation, or of the shards in newer torch.

        A later cast changes none: it is that of the first forward, as documented by `MixedPrecisionPolicy`.
        """
        is_that_of_shards = unset_reduce_dtype(str(torch.__version__)) == FP32
        return self._first_dtype if is_that_of_shards and self._first_dtype else self.compute_dtype

    def _leaves(self, prefix: str = "") -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): p.detach().to(self.compute_dtype, copy=True).requires_grad_(p.requires_grad)
            for name, p in self.net.named_parameters()
            if name.startswith(prefix)
        }

    def _cast(self, rank: int, *, index: int = 0) -> Tensor:
        return self.inputs(rank, index=index).to(self.compute_dtype)


class ShardedLife(Life):
    """Module that FSDP2 shards, with the calls of this rank."""

    def __init__(self, calls: Calls, mesh: DeviceMesh, rank: int) -> None:
        super().__init__(calls, mesh.size())
        self._mesh, self._rank = mesh, rank
        self._shared: nn.Module | None = None
        on_meta = self.options.get("built_on") == "meta"
        if on_meta:
            self.net.to("meta")
        layers = [] if self.options.get("groups") == "root alone" else [self.net.first, self.net.second]
        reshard = {"True": True, "False": False}.get(self.options.get("reshard_after_forward", ""))
        for module in (*layers, self.net):
            self._shard(module, reshard_after_forward=reshard)
        if on_meta:
            self.net.to_empty(device="cpu")
            self.fill()
        self.optimizer = self._optimizer()

    def _shard(self, module: nn.Module, **options: Any) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        fully_shard(module, mesh=self._mesh, mp_policy=policy, **options)

    def synchronise(self, value: str) -> None:
        """Reduce gradients, over shards alone or over replicas as well, or let them wait."""
        self.net.set_requires_gradient_sync(value != "off")
        if value == "shards":
            self.net.set_requires_all_reduce(False)

    def prefetch(self, direction: str) -> None:
        """Let one of the two layers gather the other one ahead, in forward or backward, or neither."""
        first, second = self.net.first, self.net.second
        first.set_modules_to_forward_prefetch([second] if direction == "forward" else [])
        second.set_modules_to_backward_prefetch([first] if direction == "backward" else [])

    def forward(self) -> None:
        """Compute an output without a backward."""
        self.output = self.net(self.inputs(self._rank)).detach()

    def evaluate(self, how: str = "") -> None:
        """Compute an output without gradients, also by another module that shares a layer."""
        x = self.inputs(self._rank)
        with torch.no_grad():
            self.output = self._sharing()(x) if how == "shared" else self.net(x, partly=how == "partly")

    def _sharing(self) -> nn.Module:
        """Return another sharded module with the first layer, which is made when it is first needed."""
        if self._shared is None:
            self._shared = Shared(self.net.first)
            self._shard(self._shared)
        return self._shared

    def abort(self, where: str) -> None:
        """Raise an error in an iteration, and go on as documented; the micro-batches start again, without gradients."""
        with suppress(Aborted):
            match where:
                case "forward":
                    self._abort_forward(self.net.second)
                case "evaluation":
                    with torch.no_grad():
                        self._abort_forward(self.net.first)
                case _:
                    self._abort_after_forward(in_backward=where == "backward")
        self.net.reset_iter_state()
        self.net.zero_grad()

    def _abort_forward(self, layer: nn.Module) -> None:
        """Raise Aborted in a layer, which is unsharded then."""
        hook = layer.register_forward_pre_hook(_abort)
        try:
            self.net(self.inputs(self._rank))
        finally:
            hook.remove()

    def _abort_after_forward(self, *, in_backward: bool) -> None:
        """Raise Aborted instead of a backward, or in one as late as there is a gradient."""
        outputs: list[Tensor] = []
        modules = (self.net.first, self.net.second, self.net)
        hooks = [each.register_forward_hook(lambda _module, _args, output: outputs.append(output)) for each in modules]
        output = self.net(self.inputs(self._rank))
        for hook in hooks:
            hook.remove()
        if in_backward:
            next(each for each in outputs if each.requires_grad).register_hook(_abort)  # type: ignore[no-untyped-call]
            output.sum().backward()
        raise Aborted

    def train(self, how: str = "") -> None:
        """Run forward and backward, or several of them, on this rank's samples."""
        outputs: dict[int, Tensor] = {}
        for number, (act, indices) in enumerate(WAYS[how]):
            if act == "backward":
                keeps_graph = how == "retained" and number + 1 < len(WAYS[how])
                torch.autograd.backward([outputs[each].sum() for each in indices], retain_graph=keeps_graph)
                continue
            with torch.set_grad_enabled(act != "evaluate"):
                for each in indices:
                    outputs[each] = self.net(self.inputs(self._rank, index=each), partly=act == "partial forward")
        self.output = outputs[0].detach()
        self._trained += 1

    def fully_shard(self) -> None:
        """Shard a layer that is sharded."""
        self._shard(self.net.second)

    def set_reshard_after_forward(self, value: str) -> None:
        """Reshard after forward from now on, or not."""
        self.net.set_reshard_after_forward(value == "True")

    def set_reshard_after_backward(self, value: str) -> None:
        """Reshard after backward from now on, or not."""
        self.net.set_reshard_after_backward(value == "True")

    def unshard(self, name: str) -> None:
        """Unshard a group ahead of time."""
        module = self.net if name == "root" else self.net.first
        if isinstance(module, FSDPModule):
            module.unshard()

    def reshard(self) -> None:
        """Reshard all groups."""
        for module in fsdp_modules(self.net):
            module.reshard()

    def held_bytes(self) -> int:
        """Return the bytes of the shards of parameters, with padding, of gradients, state and kept copies."""
        tensors: list[Any] = [*self.net.parameters(), *(parameter.grad for parameter in self.net.parameters())]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        tensors += [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        tensors += [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        tensors += [*self._kept.values(), self.samples, *(grad for _, grad in unsharded_gradients(self.net))]
        tensors += partial_sums(self.net)
        storages = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
