"""Samples of optimizers: every class of `torch.optim` with each of its implementations and options, one at a time.

Classes, implementations and switches are read from the signatures of the installed torch: an optimizer or a switch that
a version adds is tried without a change here.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    "etas": {"etas": (0.25, 1.5)},  # on either side of 1
    "step_sizes": {"step_sizes": (1e-6, 0.25)},  # the largest one is reached
    "history_size": {"history_size": 1},
    "max_eval": {"max_eval": 1},
    # No rounding makes a gradient, a change, or the square of a gradient's norm greater; the last one is minus the
    # slope along LBFGS's first direction, which it compares with `tolerance_change` (`gtd` in torch/optim/lbfgs.py).
    "tolerance_grad": {"tolerance_grad": 2.0**10},
    "tolerance_change": {"tolerance_change": 2.0**20},
}
"""Options by the parameter of a signature that they try, with its prerequisites.

Switches need no entry, nor do numbers that may be halved."""
_VALUES_OF: dict[str, dict[str, dict[str, Any]]] = {
    "Adafactor": {
        "beta2_decay": {"beta2_decay": -0.5},
        "eps": {"eps": (0.25, 0.75)},  # more than the root of some variances, and than some parameters
        "d": {"d": 1.25},
    },
    "Muon": {
        "nesterov": {"nesterov": False},
        "ns_coefficients": {"ns_coefficients": (1.875, -1.25, 0.375)},  # which leave a singular value of 1 as it is
        "eps": {"eps": 64.0},  # more than the norm of a gradient
    },
}
"""Options of one optimizer, in place of those above.

The bounds hold for them, too: Adafactor's are factors and exponents of the same operators, or larger denominators. With
these coefficients Muon's terms are 1.3, -0.4 and 0.1; with this `eps` the matrix has a norm of at most 2**-3, so that
the first term alone counts, with an error of 2**-7 of a step. Both are below those of the defaults."""
_LEARNED_ADAM: dict[str, dict[str, Any]] = {
    "learned": {
        "differentiable": True,
        "weight_decay": torch.tensor(0.25, requires_grad=True),
        "betas": (torch.tensor(0.5, requires_grad=True), torch.tensor(0.75, requires_grad=True)),
    },
    "learned rate": {
        "differentiable": True,
        "lr": torch.tensor(_LR, requires_grad=True),
        "weight_decay": torch.tensor(0.25),
        "betas": (torch.tensor(0.5), torch.tensor(0.75)),
    },
}
_TOGETHER: dict[str, dict[str, dict[str, Any]]] = {
    # A first step that goes too far, from where the search goes back.
    "LBFGS": {"long search": {"line_search_fn": "strong_wolfe", "lr": 64.0}},
    "Adam": _LEARNED_ADAM,
    "AdamW": _LEARNED_ADAM,
    "SGD": {
        "learned": {
            "differentiable": True,
            "weight_decay": torch.tensor(0.25, requires_grad=True),
            "lr": torch.tensor(_LR, requires_grad=True),
        },
        "learned rate": {
            "differentiable": True,
            "weight_decay": torch.tensor(0.25),
            "lr": torch.tensor(_LR, requires_grad=True),
        },
    },
}
"""Options of one optimizer that take effect together, by a name; those that are learned are tensors with gradients."""
LEARNED = ("learned", "learned rate")
IMPLEMENTATIONS = ("foreach", "fused")
_FOR_GRAPHS = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers whose steps a graph of CUDA can capture."""
_OF_SPARSE = ("", ", betas", ", eps", ", maximize", ", tensor lr")
IMPOSSIBLE: dict[str, str] = {
    **{f"{name}, capturable": "refuses parameters on a CPU" for name in _FOR_GRAPHS},
    **{f"{name}, foreach, capturable": "refuses parameters on a CPU" for name in _FOR_GRAPHS},
    **{f"{name}, foreach, differentiable": "operators on lists have no gradient" for name in (*_FOR_GRAPHS, "Adagrad")},
    **{f"{name}, fused, differentiable": "has no gradient" for name in ("Adagrad", "Adam", "AdamW", "SGD")},
    **{f"{name}, foreach, tensor lr": "needs capturable, too" for name in ("Adam", "AdamW")},
    **{f"SparseAdam{option}": "refuses dense gradients" for option in _OF_SPARSE},
}
"""Samples that torch refuses for plain tensors, in all versions from 2.11 on, with the reason; no sweep tries them."""
_BOUND_OF_IMPLEMENTATIONS = 2.0**-36
"""Bound on the relative deviation of fp64 numbers between two implementations of an optimizer.

In each of eight steps at most 2**4 operators round, by 2**-53 each; none enlarges an error by more than 2**10, as
differences between 1 and the powers of a smoothing constant of 0.999 do.
"""
_BOUND_OF_FP32_RATE = 2.0**-20
"""Bound where rates are tensors of fp32: each of eight steps is at most a quarter, and rounds five times in fp32.

NAdam keeps the product of its coefficients in fp32 in any case.
"""
_BOUND_OF_FP32_CORRECTION = 2.0**-16
"""Bound where counters of steps are tensors of fp32 in the arithmetic, as autograd needs them.

1 - 0.999**t is t 2**-10 and rounds by 2**-24: 2**-14 / t of it, halved by the root, in steps of at most an eighth. The
sum of 1 / t over eight steps is below 4.
"""
_BOUND_OF_BF16_MATRIX = 2.0**-4
"""Bound on the relative deviation of Muon's parameters from the algorithm without rounding.

A step of rate r adds r (a s + b s**3 + c s**5), of terms 2.4, -1.7 and 0.4 as in `BOUND_OF_REPLICAS`. Rounding s to
bf16, by 2**-9, changes the terms by once, three and five times that; each is rounded twice more, and their sum once: in
all 2**-9 (2.4 + 5.1 + 1.8 + 2 * 4.5 + 1.1), below 2**-4.7. All steps of 1.1 r have one direction, so that their sum
errs by 2**-4.8 of itself; the initial number takes at most a third from it, for a rate of 0.4.
"""


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
    def bound_of_implementations(self) -> float:
        """Bound on the relative deviation of fp64 numbers from those of another implementation; ASGD's rate is fp32."""
        has_fp32 = self.make.__name__ == "ASGD" or any(isinstance(value, Tensor) for value in self.options.values())
        return _BOUND_OF_FP32_RATE if has_fp32 else _BOUND_OF_IMPLEMENTATIONS

    @property
    def bound_of_algorithm(self) -> float:
        """Bound on the relative deviation of fp64 parameters from those of the documented algorithm."""
        if self.is_muon:
            return _BOUND_OF_BF16_MATRIX
        if self.differentiable:
            return _BOUND_OF_FP32_CORRECTION
        return _BOUND_OF_FP32_RATE if self.make.__name__ == "NAdam" else self.bound_of_implementations

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
    """Yield every optimizer with each implementation and option, whether torch refuses it or not.

    Options that are learned have the default implementation alone: those of lists have no gradient.
    """
    for make in optimizers():
        for implementation in ("", *(name for name in IMPLEMENTATIONS if name in _parameters(make))):
            for option, values in {"": {}, **options_of(make)}.items():
                if implementation and option in LEARNED:
                    continue
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


def options_of(make: type[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the options to try, by name: values that are known, every switch turned, and the rate as a tensor.

    Where each element depends on itself alone, also half of every other number, such as `betas` and `eps`: bits are
    equal with any. The bounds of the other optimizers are derived for the numbers that they have.
    """
    options = {}
    known = _VALUES | _VALUES_OF.get(make.__name__, {})
    for name, parameter in _parameters(make).items():
        if name in known:
            options[name] = known[name]
        elif isinstance(parameter.default, bool):
            options[name] = {name: not parameter.default}
        elif name != "lr" and make.__name__ not in _REDUCING and (half := _half(parameter.default)) is not None:
            options[name] = {name: half}
    rate = {"tensor lr": {"lr": torch.tensor(_USUAL.get(make.__name__, {}).get("lr", _LR))}}
    return options | rate | _TOGETHER.get(make.__name__, {})


def _half(default: Any) -> Any:
    """Return half of a number other than 0, or of each in a tuple; None for anything else."""
    if isinstance(default, tuple):
        halves = tuple(map(_half, default))
        return None if None in halves else halves
    return default / 2 if isinstance(default, float) and default else None


def implementations(make: type[Optimizer]) -> tuple[str, ...]:
    """Return the implementations of an optimizer, by the names of their switches, after `default`."""
    return ("default", *(name for name in IMPLEMENTATIONS if name in _parameters(make)))


def sample_of(make: type[Optimizer], implementation: str, chosen: Mapping[str, Any]) -> OptimizerSample:
    """Return an optimizer with an implementation and options."""
    switch = {} if implementation == "default" else {implementation: True}
    options = {**_USUAL.get(make.__name__, {"lr": _LR}), **switch, **chosen}
    return OptimizerSample(make.__name__, make, options, is_usual=False)
