"""Subjects of the tests: a function that is right, and functions that are wrong in one thing each."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.nn.functional import dropout as dropout_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import FunctionSubject, clip_with_torch, sgd

WIDTH = 16


def angles() -> Tensor:
    return torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / WIDTH)


class Model(nn.Module):
    """Two layers and a table of complex numbers, as of RoPE, that is computed, not loaded."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, 8)
        self.register_buffer("table", angles(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(self.norm(x) + self.table.real.to(x.dtype))))  # type: ignore[no-any-return]


class Tied(Model):
    """A layer more, which shares the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 2 * WIDTH)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.table.real.to(x.dtype)
        return self.down(gelu(self.up(x)) + self.again(x))  # type: ignore[no-any-return]


class Random(Model):
    def forward(self, x: Tensor) -> Tensor:
        return dropout_of(super().forward(x))


class OnlyFp32(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(8, (6,), generator=generator)
    ignored = torch.rand(6, generator=generator) < 0.4
    return torch.randn(6, WIDTH, generator=generator), labels.masked_fill(ignored, -100)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def initialize(model: nn.Module) -> None:
    forget_table(model)
    model.table = angles().to(device_of(model))


def forget_table(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()


def shard(model: Any, mesh: DeviceMesh, config: ParallelConfig, **options: Any) -> nn.Module:
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp_shard"]
    options = {**config.policies, **options}
    for layer in (model.down,) if isinstance(model, Tied) else (model.up, model.down):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model  # type: ignore[no-any-return]


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], directory / str(dist.get_rank()))


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    weights, moments = torch.load(directory / str(dist.get_rank()), weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)


declare = partial(subject, model=Model, loss=loss, batch=batch)
in_fp32, in_both = declare(), declare(precisions=["fp32", "bf16"])
declared = declare(
    tied_model=Tied,
    initialize=initialize,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
    save=save,
    load=load,
)


right = declared(shard)
without_fp64 = declare(model=OnlyFp32)(shard)
only_in_bf16 = declare(precisions=["bf16"])(shard)


class SkippingOnOneRank(torch.optim.SGD):
    """Optimizer that leaves out its second step on the second rank."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        if self.taken != 2 or not dist.is_initialized() or dist.get_rank() != 1:
            super().step()


optimizer_skips_a_rank = declare(
    optimizer=lambda parameters: SkippingOnOneRank(parameters, lr=0.1), precisions=["bf16"]
)(shard)


own_mesh_names = declare(mesh_names={"dp_shard": "fsdp"})(
    lambda model, mesh, config: shard(model, mesh["fsdp"], config)
)


def untouched(model: Any) -> None:
    """Leave a model as it is."""


def variant(
    declaration: Any,
    *,
    before: Callable[[Any], object] = untouched,
    after: Callable[[Any], object] = untouched,
    shard: Callable[..., Any] = shard,
    **options: Any,
) -> Any:
    """Return a subject that changes the model before, shards it with these options, and changes it afterwards."""

    def parallelize(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> Any:
        before(model)
        sharded = shard(model, mesh, config, **options)
        after(sharded)
        return sharded

    return declaration(parallelize)


plain_ddp = in_fp32(lambda model, mesh, config: DistributedDataParallel(model))


def sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


gradients_not_divided = variant(in_fp32, after=sum_gradients)


not_divided_in_bf16 = in_both(
    lambda model, mesh, config: (gradients_not_divided if config.precision == "bf16" else shard)(model, mesh, config)
)


without_gradient = variant(in_fp32, before=lambda model: model.up.requires_grad_(False))


sum_declared = variant(declare(reduction="sum"), after=sum_gradients)


def clip_locally(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    gradients = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    norm: Tensor = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


local_clip = declare(clip=clip_locally)(shard)


no_clip = declare(clip=lambda parameters, max_norm: clip_with_torch(parameters, float("inf")))(shard)
buffer_not_initialised = declare(initialize=forget_table)(shard)


@in_fp32
def optimizer_first(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> tuple[nn.Module, Optimizer]:
    optimizer = sgd(model.parameters())
    return shard(model, mesh, config), optimizer


precision_forgotten = variant(in_both, mp_policy=ParallelConfig("dp2", "fp32", on_meta=False).mixed_precision)


def with_policy_of_down(model: Any, mesh: DeviceMesh, config: ParallelConfig, **policy: Any) -> nn.Module:
    """Shard with another policy for the last layer, or with none."""
    fully_shard(model.down, mesh=mesh, **policy)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh, mp_policy=config.mixed_precision)
    return model  # type: ignore[no-any-return]


layer_kept_in_fp32 = in_both(partial(with_policy_of_down, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)))


class Routed(Model):
    """Model of which each sample is scaled by a router that computes in fp32, as its code says."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.router(x.float()).sigmoid()  # type: ignore[no-any-return]


class Shifted(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + torch.ones(WIDTH, device=x.device)
        return self.down(gelu(self.up(x)))  # type: ignore[no-any-return]


inputs_cast_by_groups = declare(model=Shifted, precisions=["fp32", "bf16"])(shard)


class Recurrent(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        state = x.to(self.weight.dtype)
        for _ in range(12):
            state = (state * self.weight + self.bias).sin()
        return x + state.to(x.dtype)


class WithRecurrence(Model):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence = Recurrent(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.recurrence(x))


@declare(model=WithRecurrence, precisions=["fp32", "bf16"])
def recurrence_in_fp32(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    fully_shard(model.recurrence, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    return shard(model, mesh, config)


class Following(Routed):
    """Model whose router takes the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return Model.forward(self, x) * self.router(x.to(self.router.weight.dtype)).sigmoid()  # type: ignore[no-any-return]


@declare(model=Routed, precisions=["fp32", "bf16"])
def router_in_fp32(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    fully_shard(model.router, mesh=mesh)
    return shard(model, mesh, config)


@declare(model=Following, precisions=["fp32", "bf16"])
def ignored_router(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    for parameter in model.router.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    return shard(model, mesh, config, ignored_params={*model.router.parameters()})


def _average(parameter: Tensor) -> None:
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


@declare(model=Routed, precisions=["fp32", "bf16"])
def layer_without_policy_beside_a_router(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    fully_shard(model.router, mesh=mesh)
    return without_policy(model, mesh, config)


def without_policy(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    model.down.register_forward_pre_hook(lambda module, inputs: inputs[0].to(module.weight.dtype))
    return with_policy_of_down(model, mesh, config)


layer_without_policy = in_both(without_policy)


masters_in_bf16 = in_both(
    lambda model, mesh, config: shard(model.bfloat16() if config.precision == "bf16" else model, mesh, config)
)


@in_fp32
def other_weights_on_each_rank(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    forget_table(model)
    return shard(model, mesh, config)


not_replicated = declare(meshes=["dp2", "hsdp2x2"])(lambda model, mesh, config: shard(model, mesh["dp_shard"], config))


@in_fp32
def frozen_layer(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> tuple[nn.Module, Optimizer]:
    sharded = shard(model, mesh, config)
    return sharded, sgd([p for name, p in sharded.named_parameters() if not name.startswith("norm")])


def untie(model: Any) -> None:
    if isinstance(model, Tied):
        model.again.weight = nn.Parameter(model.up.weight.detach().clone())


untied = variant(declare(tied_model=Tied), before=untie)


def load_weights_alone(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    model.load_state_dict(torch.load(directory / str(dist.get_rank()), weights_only=False)[0])


optimizer_not_loaded = declare(save=save, load=load_weights_alone)(shard)
nothing_loaded = declare(save=save, load=lambda model, optimizer, directory: None)(shard)


class NotResumable(FunctionSubject):
    """Adapter that claims to resume runs and cannot."""

    def unsupported(self, cell: SubjectCell) -> str | None:
        return None


@in_fp32
def raises(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    if dist.get_rank() == 1:
        raise RuntimeError("no such layer")
    return shard(model, mesh, config)


returns_a_number = in_fp32(lambda model, mesh, config: 3)


@declared
def hangs(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    if config.precision == "bf16" and dist.get_rank() == 1:
        time.sleep(1000)
    return shard(model, mesh, config)


def hang_if_norm_is_large(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Hang at norms that only a fault brings about: the limit is half of the first norm."""
    norm = clip_with_torch(parameters, max_norm)
    if float(norm.full_tensor() if isinstance(norm, DTensor) else norm) > 3 * max_norm:
        time.sleep(1000)
    return norm


hangs_with_a_fault = declare(clip=hang_if_norm_is_large)(shard)
dropout = declare(model=Random)(shard)
vector_loss = declare(loss=lambda model, batch: model(batch[0]))(shard)
wrong_batch = declare(batch=lambda generator: (torch.ones(2), torch.ones(3)))(shard)
no_module = declare(model=lambda: 3)(shard)  # type: ignore[arg-type,return-value]


def changed(function: FunctionSubject, change: Callable[[Any], Any]) -> FunctionSubject:
    """Return the subject with runs that a function has changed after `build`."""

    class Changed(FunctionSubject):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            return change(super().build(*args, **kwargs))

    return Changed(**fields_of(function))


class Shown:
    """Optimizer that steps another, hidden one, whose hooks do not show."""

    def __init__(self, hidden: Optimizer) -> None:
        self._hidden, self.param_groups, self.state = hidden, hidden.param_groups, hidden.state

    def register_step_pre_hook(self, _hook: object) -> None:
        pass

    register_step_post_hook = register_step_pre_hook

    def step(self) -> None:
        self._hidden.step()

    def zero_grad(self) -> None:
        self._hidden.zero_grad()


def fields_of(function: FunctionSubject) -> dict[str, Any]:
    return {name: getattr(function, name) for name in function.__dataclass_fields__}


def hide_optimizer(run: Any) -> Any:
    run.optimizer = Shown(run.optimizer)
    return run


hidden_optimizer = changed(right, hide_optimizer)
not_resumable = NotResumable(**fields_of(own_mesh_names))
not_decorated = shard


class LateLoop:
    """Run that shards its model when it begins to train, as some trainers do."""

    shards_in_train = True

    def __init__(self, loop: Any, *, tells: bool = True) -> None:
        self._loop, self._tells = loop, tells
        self.model, self.optimizer, self.data_rank = loop.model, loop.optimizer, loop.data_rank

    def train(self, steps: Any, observer: Any) -> list[float]:
        if self._tells:
            observer.built()
        return [self._loop.step(step, batches, observer) for step, batches in enumerate(steps)]


class UnsavedSubject(NotResumable):
    """Adapter whose runs have no methods to save and load."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return LateLoop(super().build(*args, **kwargs))


without_save = UnsavedSubject(**fields_of(own_mesh_names))
late, late_and_uninitialised = changed(own_mesh_names, LateLoop), changed(buffer_not_initialised, LateLoop)
late_and_silent = changed(own_mesh_names, partial(LateLoop, tells=False))


# Values that look uninitialised: by design, or since they were forgotten


def slots() -> Tensor:
    return torch.tensor([0, torch.iinfo(torch.int64).max, 1])


class WithSlots(Model):
    """A table of integers more, of which the largest one says that there is no entry, and a number that is none yet."""

    slots: Tensor
    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", slots(), persistent=False)
        self.register_buffer("best", torch.tensor(torch.nan), persistent=False)


def initialize_all(model: nn.Module) -> None:
    initialize(model)
    model.slots = slots().to(device_of(model))
    model.best = torch.tensor(torch.nan, device=device_of(model))


meant = declare(model=WithSlots, initialize=initialize_all)(shard)
forgotten = declare(model=WithSlots, initialize=initialize)(shard)


# Communication that is wrong, or right and unusual


class Repeated(Model):
    """A layer that computes twice in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.table.real.to(x.dtype)
        out: Tensor = self.down(gelu(self.up(x)) + gelu(self.up(-x)))
        return out


layer_that_computes_twice = declare(model=Repeated)(shard)


class Unused(Model):
    """A layer that no forward pass computes."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


@declare(model=Unused)
def unused_layer_in_a_group_of_its_own(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    fully_shard(model.unused, mesh=mesh)
    return shard(model, mesh, config)


layer_gathered_twice = variant(
    in_fp32, after=lambda model: model.up.register_forward_hook(lambda module, *_: module.unshard())
)


kept_after_backward = variant(in_fp32, after=lambda model: model.set_reshard_after_backward(False))


layer_not_reduced_over_replicas = variant(
    declare(meshes=["dp2", "hsdp2x2"]),
    after=lambda model: model.up.register_forward_pre_hook(lambda module, _: module.set_requires_all_reduce(False)),
)


# Synchronisation that the owner has switched off: by mistake, or on purpose


layer_not_synchronised = variant(declared, after=lambda model: model.up.set_requires_gradient_sync(False))


nothing_synchronised = variant(declared, after=lambda model: model.set_requires_gradient_sync(False))


nothing_reduced_over_replicas = variant(declared, after=lambda model: model.set_requires_all_reduce(False))


def switch_off_and_on(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model.up.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)


switched_off_and_on = variant(declared, after=switch_off_and_on)


def reducing_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Loss that lets FSDP reduce gradients after each micro-batch, although the loop postpones it."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    return loss(model, batch)


reduced_by_the_loss = declare(loss=reducing_loss)(shard)


reduced_in_bf16 = variant(in_fp32, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def clip_full_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    held = list(parameters)
    norm: Tensor = torch.stack([p.grad.full_tensor().norm() for p in held if isinstance(p.grad, DTensor)]).norm()
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    return norm


gradients_gathered_to_clip = declare(clip=clip_full_gradients)(shard)


def clip_after_other_sums(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip as torch does, after an all-reduce whose operation depends on the rank; gloo does not notice."""
    dist.all_reduce(torch.ones(1), op=(dist.ReduceOp.MAX, dist.ReduceOp.SUM)[dist.get_rank()])
    return clip_with_torch(parameters, max_norm)


ranks_reduce_differently = declare(clip=clip_after_other_sums)(shard)


class PhaselessLoop(LateLoop):
    """Run that tells nothing of its phases."""

    def train(self, steps: Any, observer: Any) -> list[float]:
        observer.phase = lambda _name, *, step: None
        return super().train(steps, observer)


without_phases = changed(own_mesh_names, PhaselessLoop)
