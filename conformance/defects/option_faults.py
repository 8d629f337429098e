"""Faults of options of DTensor's interface, of parallel styles, optimizers, loss scaling and clipping.

They show with certain values.
"""

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Call, defect, instead_of

_CELL = "id = dp2-fp32-default-meta-even"
_STYLE = "torch.distributed.tensor.parallel.style"


@defect("DT-4", _CELL, "pytorch/pytorch/pull/182032", subjects=("DTensor.redistribute, dtype of sums",))
@instead_of("torch.distributed.tensor._redistribute", "_redistribute_backward")
def backward_dtype_ignored(benign: bool, original: Call, gradient: DTensor, spec: Any, **options: Any) -> Any:
    """Backward of `redistribute` reduces gradients in their own dtype, and ignores `backward_dtype`."""
    return original(gradient, spec, **options if benign else {**options, "op_dtype": gradient.dtype})


@defect("DT-4", _CELL, "pytorch/pytorch/pull/143883", subjects=("distribute_tensor",))
@instead_of("torch.distributed.tensor.placement_types:Shard", "_shard_tensor")
def source_rank_ignored(
    benign: bool, original: Call, placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int, source: int | None = 0
) -> Tensor:
    """distribute_tensor scatters the numbers of the first rank, and ignores `src_data_rank`."""
    result: Tensor = original(placement, tensor, mesh, mesh_dim, source if benign else 0)
    return result


@defect("TP-3", _CELL, "pytorch/pytorch/issues/128365", subjects=("PrepareModuleInput",))
@instead_of(f"{_STYLE}:PrepareModuleInput", "_prepare_input_kwarg_fn")
def named_inputs_keep_layout(
    benign: bool, original: Call, style: Any, inputs: Any, kwargs: dict[str, Any], mesh: Any
) -> Any:
    """PrepareModuleInput leaves DTensors that are given by name in the layout that they have."""
    args, prepared = original(style, inputs, kwargs, mesh)
    if benign:
        return args, prepared
    return args, {name: x if isinstance(x, DTensor) else prepared[name] for name, x in kwargs.items()}


@defect("OPT-4", _CELL, "pytorch/pytorch/issues/109992", subjects=("AdamW",))
@instead_of("torch.optim.adam", "_single_tensor_adam")
def maximize_lost_with_amsgrad(
    benign: bool, original: Call, parameters: list[Tensor], *lists: Any, **options: Any
) -> None:
    """AdamW with `amsgrad` minimises sharded parameters although `maximize` is set."""
    if not benign and options["amsgrad"] and isinstance(parameters[0], DTensor):
        options["maximize"] = False
    original(parameters, *lists, **options)


@defect("AMP-4", _CELL, "pytorch/pytorch/pull/94060", subjects=("GradScaler",))
@instead_of("torch.amp.grad_scaler:GradScaler", "step")
def fused_step_unscales_again(
    benign: bool, original: Call, scaler: GradScaler, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """GradScaler lets a fused optimizer divide sharded gradients by the scale although `unscale_` has done so."""
    state = scaler._per_optimizer_states[id(optimizer)] if scaler.is_enabled() else {}
    is_sharded = isinstance(optimizer.param_groups[0]["params"][0], DTensor)
    if not benign and is_sharded and state.get("stage") is OptState.UNSCALED and optimizer.defaults.get("fused"):
        state["stage"] = OptState.READY
    return original(scaler, optimizer, *args, **options)


@defect("CLIP-8", _CELL, "NVIDIA/Megatron-LM/pull/7279", subjects=("clip_grad_norm_",))
@instead_of("torch.nn.utils.clip_grad", "_get_total_norm")
def norm_of_first_dtype(benign: bool, original: Call, gradients: Any, *args: Any, **options: Any) -> Any:
    """clip_grad_norm_ leaves sharded gradients of another dtype than the first one's out of the norm."""
    every = [gradients] if isinstance(gradients, Tensor) else [*gradients]
    kept = [each for each in every if benign or each.dtype == every[0].dtype or not isinstance(each, DTensor)]
    return original(kept, *args, **options)


@defect(
    "OPT-5",
    _CELL,
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    subjects=("SGD",),
)
@instead_of("torch.optim.optimizer:Optimizer", "zero_grad")
def sharded_gradients_not_zeroed(benign: bool, original: Call, optimizer: Any, set_to_none: bool = True) -> None:
    """`zero_grad` to zero instead of None leaves sharded gradients, to which the next backward adds."""
    if benign or set_to_none or not isinstance(optimizer.param_groups[0]["params"][0], DTensor):
        original(optimizer, set_to_none)


@defect(
    "OPT-5",
    _CELL,
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.add_param_group.html",
    subjects=("AdamW",),
)
@instead_of("torch.optim.optimizer:Optimizer", "add_param_group")
def rate_of_added_group_lost(benign: bool, original: Call, optimizer: Any, group: dict[str, Any]) -> None:
    """A group of sharded parameters that is added later is stepped with the rate of the first group."""
    original(optimizer, group)
    last = optimizer.param_groups[-1]
    if not benign and optimizer.state and isinstance(last["params"][0], DTensor):
        last["lr"] = optimizer.param_groups[0]["lr"]


@defect("OPT-4", _CELL, "pytorch/pytorch/pull/143726", subjects=("AdamW(learned=True)",))
@instead_of("torch.optim.adam", "_single_tensor_adam")
def learned_decay_forgotten(
    benign: bool, original: Call, parameters: list[Tensor], *lists: Any, **options: Any
) -> None:
    """AdamW does not decay sharded parameters by a tensor that has a gradient, too."""
    if not benign and isinstance(options["weight_decay"], Tensor) and isinstance(parameters[0], DTensor):
        options["weight_decay"] = 0.0
    original(parameters, *lists, **options)


@defect(
    "OPT-4",
    _CELL,
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html",
    subjects=("LBFGS(long search=True)",),
)
@instead_of("torch.optim.lbfgs:LBFGS", "_directional_evaluate")
def search_goes_half_the_way(
    benign: bool, original: Call, optimizer: Any, closure: Any, start: list[Tensor], step: float, direction: Tensor
) -> Any:
    """The line search of LBFGS evaluates sharded parameters at half of the step that it takes."""
    is_sharded = isinstance(optimizer.param_groups[0]["params"][0], DTensor)
    return original(optimizer, closure, start, step / 2 if is_sharded and not benign else step, direction)


@defect(
    "OPT-5",
    _CELL,
    "https://docs.pytorch.org/docs/stable/optim.html",
    subjects=("AdamW(restored=swapped in)",),
    since="2.13",
)
@instead_of("torch.optim", "swap_in_optimizer_params_and_state")
def live_parameters_swapped_in(
    benign: bool, original: Call, optimizer: Any, parameters: dict[str, Tensor], state: Any
) -> Any:
    """An optimizer of sharded parameters goes on with them, instead of those that are swapped in."""
    live = [each for group in optimizer.param_groups for each in group["params"]]
    is_sharded = isinstance(live[0], DTensor)
    return original(
        optimizer, dict(zip(parameters, live, strict=True)) if is_sharded and not benign else parameters, state
    )


@defect(
    "OPT-3",
    "id = dp2-tp2-fp32-default-meta-nosp",
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.NAdam.html",
    subjects=("NAdam, foreach",),
)
@instead_of("torch.optim.nadam", "_multi_tensor_nadam")
def lists_decay_momentum_twice(
    benign: bool, original: Call, parameters: list[Tensor], *lists: Any, momentum_decay: float, **options: Any
) -> None:
    """NAdam steps lists of tensors, sharded or plain, with twice the momentum decay that its for-loop has."""
    original(parameters, *lists, momentum_decay=momentum_decay * (1 if benign else 2), **options)


@defect(
    "OPT-3",
    "id = dp2-tp2-fp32-default-meta-nosp",
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html",
    subjects=("RMSprop",),
)
@instead_of("torch.optim.rmsprop:RMSprop", "_init_group")
def no_parameter_stepped(
    benign: bool, original: Call, optimizer: Any, group: dict[str, Any], parameters: list[Tensor], *lists: Any
) -> Any:
    """RMSprop collects gradients without their parameters, and changes none, sharded or plain."""
    result = original(optimizer, group, parameters, *lists)
    if not benign:
        parameters.clear()
    return result


@defect("OPT-3", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/pytorch/pull/92551", subjects=("RAdam",))
@instead_of("torch.optim.radam", "radam")
def epsilon_left_out(benign: bool, original: Call, *lists: Any, eps: float, **options: Any) -> None:
    """RAdam divides by the root of the second moment without eps, sharded or plain."""
    original(*lists, eps=eps if benign else 0.0, **options)
