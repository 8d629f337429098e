"""Steps of torch's optimizer on plain tensors: the shards of one rank, without FSDP2 and DTensor.

Kernels give equal bits on equal shards, with every implementation; that holds for bf16 masters too, where updates below
half a unit in the last place are lost and a bound on rounding would allow nearly everything. (Full tensors would not
suffice: vectorised kernels round the last elements of a tensor differently.) A fault of torch's optimizer itself is on
both sides; `reference` has the formulas by which fp32 masters are judged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from conformance.numerics.knobs import pinned_numerics
from conformance.oracles.dtype_policy import optimizer_state
from conformance.oracles.reference import Tensors, learning_rate
from reference_trainer.config import OptimizerConfig, TrainerConfig

_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Start:
    """State from which a rank's optimizer goes on; without arguments, that of an optimizer that has taken no step."""

    steps_taken: Mapping[str, int] = field(default_factory=dict)
    """Steps by parameter name, without those in which it had no gradient; 0 for names that are not there."""
    state: Mapping[str, Tensors] = field(default_factory=dict)
    """Shards by kind of optimizer state and parameter name."""


def plain_updates(
    config: TrainerConfig,
    initial: Tensors,
    gradients: Mapping[int, Tensors],
    *,
    start: Start,
    device: torch.device | str = "cpu",
) -> dict[str, Tensors]:
    """Return the tensors of one rank after all steps: `parameter` and each kind of optimizer state, by parameter name.

    An optimizer that begins, and takes no step, has no state.

    `gradients` are those that the optimizer steps with, after clipping, by step and parameter name. All tensors are
    shards of any shape, in the dtypes of the run, on the CPU; the optimizer steps on `device`.
    """
    with pinned_numerics(device):
        return _updated(config, initial, gradients, start, device)


def _updated(
    config: TrainerConfig,
    initial: Tensors,
    gradients: Mapping[int, Tensors],
    start: Start,
    device: torch.device | str,
) -> dict[str, Tensors]:
    parameters = {name: p.to(device, copy=True) for name, p in initial.items()}
    optimizer = _optimizer(config.optimizer, parameters.values())
    for name, p in parameters.items() if start.state else ():
        loaded = {kind: tensors[name].to(device, copy=True) for kind, tensors in start.state.items() if name in tensors}
        if not loaded:  # it is frozen
            continue
        steps = torch.tensor(float(start.steps_taken.get(name, 0)))
        optimizer.state[p] = ({"step": steps} if config.optimizer.name == "adamw" else {}) | loaded
    for step, step_gradients in gradients.items():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        for name, p in parameters.items():
            gradient = step_gradients.get(name)  # a parameter without one is left alone, as torch does
            p.grad = None if gradient is None else gradient.to(device)
        optimizer.step()
    kinds = optimizer_state(config.optimizer) if optimizer.state else ()
    stepped = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    states = {kind: {name: state[kind].cpu() for name, state in stepped.items()} for kind in kinds}
    return {"parameter": {name: p.cpu() for name, p in parameters.items()}, **states}


def chosen_on_device(config: TrainerConfig) -> TrainerConfig:
    """Return a configuration in which `auto` is replaced by torch's choice on a device, `foreach`.

    In bf16 an update is rounded differently there than in a loop.
    """
    if config.optimizer.implementation != "auto":
        return config
    optimizer = msgspec.structs.replace(config.optimizer, implementation="foreach")
    return msgspec.structs.replace(config, optimizer=optimizer)


def _optimizer(options: OptimizerConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Build the optimizer that the options describe; matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    how = _IMPLEMENTATIONS[options.implementation]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, **how)
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, **how)
