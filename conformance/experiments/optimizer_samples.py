"""Samples of optimizers: every class of `torch.optim` with each of its implementations and options, one at a time.

Classes, implementations and switches are read from the signatures of the installed torch: an optimizer or a switch that
a version adds is tried without a change here.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

STEPS = 3
"""Number of steps that each sample takes: the second is the first with state, the third the first that was updated."""
_REDUCING = ("Adafactor", "LBFGS", "Muon")
"""Optimizers in which an element of a parameter depends on other elements; tests prove that no other one is."""
_LR = 0.125
_USUAL: dict[str, dict[str, Any]] = {
    # A step of the size of the parameters, momentum that leaves few bits, and one iteration of Newton-Schulz.
    "Muon": {"lr": 1.0, "momentum": 0.5, "ns_steps": 1},
    "LBFGS": {"lr": 0.5, "max_iter": 2},
}
"""Options of all samples of an optimizer."""
_VALUES: dict[str, dict[str, Any]] = {
    "weight_decay": {"weight_decay": 0.25},
    "decoupled_weight_decay": {"decoupled_weight_decay": True, "weight_decay": 0.25},
    "momentum": {"momentum": 0.5},
    "dampening": {"momentum": 0.5, "dampening": 0.25},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "initial_accumulator_value": {"initial_accumulator_value": 0.5},
    "lr_decay": {"lr_decay": 0.5},
    "t0": {"t0": 1.0},  # from which on ASGD averages
    "line_search_fn": {"line_search_fn": "strong_wolfe"},
    "adjust_lr_fn": {"adjust_lr_fn": "match_rms_adamw"},
}
"""Options by the parameter of a signature that they try, with what the parameter needs; switches need no entry."""
_IMPLEMENTATIONS = ("foreach", "fused")
_FOR_GRAPHS = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers whose steps a graph of CUDA can capture."""
IMPOSSIBLE: dict[str, str] = {
    **{f"{name}, capturable": "refuses parameters on a CPU" for name in _FOR_GRAPHS},
    **{f"{name}, foreach, capturable": "refuses parameters on a CPU" for name in _FOR_GRAPHS},
    **{f"{name}, foreach, differentiable": "operators on lists have no gradient" for name in (*_FOR_GRAPHS, "Adagrad")},
    **{f"{name}, fused, differentiable": "has no gradient" for name in ("Adagrad", "Adam", "AdamW", "SGD")},
    **{f"{name}, foreach, tensor lr": "needs capturable, too" for name in ("Adam", "AdamW")},
    **dict.fromkeys(("SparseAdam", "SparseAdam, maximize", "SparseAdam, tensor lr"), "refuses dense gradients"),
}
"""Samples that torch refuses for plain tensors, in all versions from 2.11 on, with the reason; no sweep tries them."""


@dataclass(frozen=True)
class OptimizerSample:
    """Optimizer with options."""

    name: str
    make: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_usual: bool = True
    """True if no option is tried but the implementation."""

    @property
    def is_elementwise(self) -> bool:
        """True if each element of a parameter depends on the same elements of gradients and state alone."""
        return self.make.__name__ not in _REDUCING

    @property
    def is_line_search(self) -> bool:
        """True if the optimizer evaluates the loss itself, by a closure."""
        return self.make.__name__ == "LBFGS"

    @property
    def differentiable(self) -> bool:
        """True if autograd records the steps, so that parameters cannot be leaves that need gradients."""
        return bool(self.options.get("differentiable"))

    @property
    def is_muon(self) -> bool:
        """True if the optimizer computes in bf16: equal in bits if no sum has more than one number that is not zero."""
        return self.make.__name__ == "Muon"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters: fp64 where results round, so that no rounding hides a fault."""
        return torch.float64 if self.bound else torch.float32

    @property
    def bound(self) -> float:
        """Bound on the deviation of a parameter or state, relative to the largest expected number; 0 for bits.

        Adafactor adds at most 2**6 numbers, and composes at most 2**4 operators in each of three steps, none of which
        enlarges an error by more than 2**2: below 2**14 roundings of fp64. LBFGS takes six iterations on a loss whose
        curvatures are 1 to 3; the differences of which it makes directions are then at least 2**-8 of the numbers that
        they are taken from, which allows 2**8 times as much.
        """
        return {"Adafactor": 2.0**-39, "LBFGS": 2.0**-31}.get(self.make.__name__, 0.0)


def optimizer_samples() -> Iterator[OptimizerSample]:
    """Yield every optimizer with each implementation, and with each implementation every option, but `IMPOSSIBLE`."""
    return (sample for sample in all_samples() if sample.name not in IMPOSSIBLE)


def all_samples() -> Iterator[OptimizerSample]:
    """Yield every optimizer with each implementation and option, whether torch refuses it or not."""
    for make in optimizers():
        for implementation in ("", *(name for name in _IMPLEMENTATIONS if name in _parameters(make))):
            for option, values in {"": {}, **_options_of(make)}.items():
                name = ", ".join(text for text in (make.__name__, implementation, option) if text)
                switch = {implementation: True} if implementation else {}
                usual = _USUAL.get(make.__name__, {"lr": _LR})
                yield OptimizerSample(name, make, usual | switch | values, is_usual=not option)


def optimizers() -> list[type[Optimizer]]:
    """Return every optimizer that `torch.optim` has, by name."""
    classes = [value for _, value in sorted(vars(torch.optim).items()) if inspect.isclass(value)]
    return [value for value in classes if issubclass(value, Optimizer) and value is not Optimizer]


def _parameters(make: type[Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(make).parameters


def _options_of(make: type[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the options to try, by name: values that are known, every switch turned, and the rate as a tensor."""
    options = {}
    for name, parameter in _parameters(make).items():
        if name in _VALUES:
            options[name] = _VALUES[name]
        elif isinstance(parameter.default, bool):
            options[name] = {name: not parameter.default}
    return options | {"tensor lr": {"lr": torch.tensor(_USUAL.get(make.__name__, {}).get("lr", _LR))}}
