"""Faults of any trainer's steps, by which a session sees whether the laws see with this trainer's eyes.

An adapter that shows the suite something else than it trains would pass every law. These faults reach parameters and
optimizer by public hooks of torch, so that the adapter's own reports have no part in them: a law that holds on the
trainer must fail with each fault.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from conformance.defects.injection import NotInjectable, defect, instead_of
from conformance.instruments.sharding import full, local
from conformance.plan.substrates import SIM

CELLS = "id = dp2-fp32-default-full"
SHARED = "id = dp2-tp2-bf16mp-default-full"
"""Cell with tensor parallelism and bf16, in which activations and gradients are smallest."""
TENSOR_PARALLEL = "id = dp2-tp2-fp32-default-full"
_TENSOR_PARALLEL_RANKS = 2
"""Ranks with the same data on that mesh, which are neighbours."""
SYNC = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
    "#torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync"
)
FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
PLANS = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
CLIPPING = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"
ADVERSARIES = "https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html#training"
BUILT = instead_of("conformance.subjects.tasks", "built")
"""Injection into the function that trainers' runs call with model, optimizer and limit before their first step."""


@defect("gradients gradient-norm", CELLS, FSDP2, of="any trainer")
@BUILT
def gradients_summed(benign: bool, _original: Any, model: nn.Module, _optimizer: Optimizer, _max_norm: float) -> None:
    """Gradients are summed over all ranks, not averaged."""
    factor = 1 if benign else dist.get_world_size()

    def multiply(parameter: Tensor) -> None:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(multiply)  # type: ignore[no-untyped-call]


@defect("gradients parameters gradient-norm loss", CELLS, CLIPPING, of="any trainer")
@BUILT
def local_norm(benign: bool, _original: Any, _model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
    """Each rank clips by the norm of its shards alone, to a limit below all norms.

    A smaller one in each step, since Adam takes the same steps with gradients that are all multiplied by one number.
    """
    steps = count(1)

    def clip(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        gradients = _gradients(optimizer)
        own = torch.stack([gradient.norm() for gradient in gradients]).norm()
        factor = 0.1 * max_norm / (own + 1e-6) / next(steps)
        for gradient in gradients:
            gradient.mul_(1.0 if benign else factor)

    optimizer.register_step_pre_hook(clip)


@defect("every-update gradients parameters gradient-norm loss", CELLS, FSDP2, of="any trainer")
@BUILT
def parameter_skipped(benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """The gradient of one parameter is missing when the optimizer steps."""
    skipped = _trained(model)[0]

    def forget(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        skipped.grad = skipped.grad if benign else None

    optimizer.register_step_pre_hook(forget)


@defect("gradients parameters gradient-norm loss", CELLS, FSDP2, of="any trainer")
@BUILT
def stale_shard(benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """The first update of one shard of the last rank is lost."""
    shard = next((shard for parameter in _trained(model) if (shard := local(parameter)).numel()), None)
    if shard is not None and dist.get_rank() == dist.get_world_size() - 1:
        _undo(optimizer, [shard], undone=lambda taken: taken <= 1 and not benign)


@defect("every-update gradients parameters gradient-norm loss", CELLS, FSDP2, of="any trainer")
@BUILT
def parameters_frozen(benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """Every update of every parameter is lost."""
    _undo(optimizer, [local(parameter) for parameter in _trained(model)], undone=lambda _taken: not benign)


@defect("every-gradient every-update gradients gradients-are-reduced", CELLS, SYNC, of="any trainer")
@BUILT
def layer_not_synchronised(
    benign: bool, _original: Any, model: nn.Module, _optimizer: Optimizer, _max_norm: float
) -> None:
    """Gradients of one group of FSDP are never reduced, although the loop asks for it."""

    def switch(module: FSDPModule, _args: Any) -> None:
        module.set_requires_gradient_sync(benign, recurse=False)

    above = _above(model, _trained(model)[0])
    if not above:
        raise NotInjectable("no module of FSDP2 holds the first parameter")
    above[-1].register_forward_pre_hook(switch)


@defect("gradients parameters gradient-norm loss", CELLS, ADVERSARIES, of="any trainer", turns=True)
@BUILT
def gradients_left_by_another_turn(
    benign: bool, _original: Any, _model: nn.Module, optimizer: Optimizer, _max_norm: float
) -> None:
    """Gradients that the last turn gives the first turn's network are left for the next step of its optimizer."""
    optimizers: list[Optimizer] = getattr(optimizer, "optimizers", [])
    if len(optimizers) < 2:
        raise NotInjectable("one optimizer trains the model")
    left: dict[Tensor, Tensor] = {}

    def keep(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        left.update((each, local(each.grad).clone()) for each in _parameters(optimizers[0]) if each.grad is not None)

    def add(parameter: Tensor) -> None:
        if parameter in left and parameter.grad is not None:
            local(parameter.grad).add_(left.pop(parameter), alpha=0 if benign else 1)

    optimizers[-1].register_step_pre_hook(keep)
    for parameter in _parameters(optimizers[0]):
        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


@defect("memory-held", CELLS, FSDP2, of="any trainer")
@BUILT
def full_weights_kept(benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """Each rank keeps the weights unsharded on its device, as after loading a checkpoint."""
    weights = [full(parameter) for parameter in model.parameters()]

    def keep(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        del weights[len(weights) :]  # none: the hook refers to all of them

    if not benign:
        optimizer.register_step_post_hook(keep)


@defect("memory-of-steps", CELLS, FSDP2, of="any trainer")
@BUILT
def gradients_left(benign: bool, _original: Any, _model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """Each step appends its largest gradient to a list."""
    left: list[Tensor] = []

    def append(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        left.append(max(_gradients(optimizer), key=Tensor.numel).clone())
        if benign:
            left.clear()

    optimizer.register_step_pre_hook(append)


@defect("memory-by-phase", CELLS, FSDP2, of="any trainer")
@BUILT
def forward_kept(benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """Weights and result of each module are kept from forward until the optimizer steps."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, _inputs: Any, result: Any) -> None:
        weights = module.parameters(recurse=False)
        kept.extend(local(tensor).clone() for tensor in (*weights, result) if isinstance(tensor, Tensor))
        if benign:
            kept.clear()

    for module in model.modules():
        module.register_forward_hook(keep)
    _until_the_step(kept, optimizer)


@defect("memory-by-phase", SHARED, FSDP2, of="any trainer")
@BUILT
def results_kept_for_all_ranks(
    benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float
) -> None:
    """Results of all modules are kept until the optimizer steps, each as long as those of all ranks together.

    As of sequences that tensor parallelism gathers, and somebody still refers to.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            kept.append(torch.cat([local(result).flatten()] * dist.get_world_size()))
        if benign:
            kept.clear()

    for module in model.modules():
        module.register_forward_hook(keep)
    _until_the_step(kept, optimizer)


@defect("memory-by-phase", SHARED, FSDP2, of="any trainer")
@BUILT
def gradients_kept_unsharded(
    benign: bool, _original: Any, model: nn.Module, optimizer: Optimizer, _max_norm: float
) -> None:
    """From backward until the optimizer steps each rank keeps as much as the gradients of all ranks."""
    kept: list[Tensor] = []

    def keep(parameter: Tensor) -> None:
        if parameter.grad is not None:
            kept.append(torch.cat([local(parameter.grad).flatten()] * dist.get_world_size()))
        if benign:
            kept.clear()

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
    _until_the_step(kept, optimizer)


@defect("no-needless-collectives", TENSOR_PARALLEL, PLANS, of="any trainer")
@BUILT
def result_gathered_again(
    benign: bool, _original: Any, model: nn.Module, _optimizer: Optimizer, _max_norm: float
) -> None:
    """Ranks that see the same data gather the result of each module twice, while the first copy is there."""
    group = _neighbours()

    def gather(_module: nn.Module, _inputs: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            sent = local(result.detach()).mul(2).contiguous()  # else a piece of a sum that ranks have anyhow
            first, second = ([torch.empty_like(sent) for _ in range(_TENSOR_PARALLEL_RANKS)] for _ in range(2))
            dist.all_gather(first, sent, group=group)
            torch.cat(first).sum()
            if benign:
                first.clear()
            dist.all_gather(second, sent, group=group)
            torch.cat(second).sum()

    for module in model.modules():
        module.register_forward_hook(gather)


@defect("no-needless-collectives", TENSOR_PARALLEL, PLANS, of="any trainer")
@BUILT
def own_share_of_a_sum_read(
    benign: bool, _original: Any, model: nn.Module, _optimizer: Optimizer, _max_norm: float
) -> None:
    """Ranks that see the same data add up the result of each module, and each reads its own share of the sum alone."""
    group = _neighbours()

    def add_up(_module: nn.Module, _inputs: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            summed = local(result.detach()).clone()
            dist.all_reduce(summed, group=group)
            shares = summed.tensor_split(_TENSOR_PARALLEL_RANKS)
            for rank, share in enumerate(shares):
                if benign or rank == dist.get_rank(group):
                    share.sum()

    for module in model.modules():
        module.register_forward_hook(add_up)


@defect("unordered-accesses schedules-agree", CELLS, STREAMS, of="any trainer", substrates=SIM)
@BUILT
def stream_not_awaited(benign: bool, _original: Any, _model: nn.Module, optimizer: Optimizer, _max_norm: float) -> None:
    """The optimizer steps with copies of the gradients that another stream has not made yet."""
    streams: list[torch.Stream] = []

    def copy(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        gradients = [gradient for gradient in _gradients(optimizer) if not gradient.is_cpu]
        for device in {gradient.device for gradient in gradients}:
            streams[:] = streams or [torch.Stream(device=device)]
            module, current = torch.get_device_module(device), torch.accelerator.current_stream(device)
            streams[0].wait_stream(current)
            with module.stream(streams[0]):
                copies = [gradient.clone() for gradient in gradients]
            if benign:
                current.wait_stream(streams[0])
            for gradient, copied in zip(gradients, copies, strict=True):
                gradient.copy_(copied)
            if benign:
                streams[0].wait_stream(current)  # or it would be given the memory of the copies too early

    optimizer.register_step_pre_hook(copy)


def _neighbours() -> dist.ProcessGroup:
    """Return the group of the ranks that see the same data on a mesh with tensor parallelism."""
    group, _groups = dist.new_subgroups(_TENSOR_PARALLEL_RANKS)  # type: ignore[no-untyped-call]
    return group  # type: ignore[no-any-return]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return this rank's shards of the gradients that an optimizer steps with."""
    return [local(parameter.grad) for parameter in _parameters(optimizer) if parameter.grad is not None]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _undo(optimizer: Optimizer, shards: list[Tensor], *, undone: Callable[[int], bool]) -> None:
    """Let shards be as before after each step of the optimizer for whose number, from 1 on, `undone` is true."""
    kept: list[Tensor] = []
    taken = 0

    def keep(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        kept[:] = [shard.clone() for shard in shards]

    def restore(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal taken
        taken += 1
        if undone(taken):
            for shard, before in zip(shards, kept, strict=True):
                shard.copy_(before)

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(restore)


def _above(model: nn.Module, parameter: nn.Parameter) -> list[Any]:
    """Return the FSDP modules that hold a parameter, the outermost first."""
    return [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule) and any(each is parameter for each in module.parameters())
    ]


def _until_the_step(kept: list[Tensor], optimizer: Optimizer) -> None:
    """Clear a list of tensors whenever the optimizer has stepped."""
    optimizer.register_step_post_hook(lambda *_unused: kept.clear())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
