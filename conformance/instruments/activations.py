"""What a model needs beside its parameters, marked where FSDP would gather, free and reduce them.

The model is not sharded by FSDP; tensor parallelism may have been applied. Marks, by name of the group: `forward G` and
`after-forward G`; `backward G` when the gradient of its output is there; `after-backward G` when that of its input is,
and with it those of its parameters; `freed G` when these are released.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from conformance.instruments.memory import mark

Groups = Mapping[str, Sequence[nn.Module]]
"""Modules of each group in the order in which forward enters them, by its name."""


def mark_groups(groups: Groups) -> None:
    """Register the hooks that set the marks; a group's first module begins it, its last one ends it."""
    for name, modules in groups.items():
        modules[0].register_forward_pre_hook(_Entry(name, modules))
        modules[-1].register_forward_hook(_Exit(name))


def finish_backward(groups: Groups) -> None:
    """To be called after backward: groups whose inputs have no gradient, such as the embedding, are reduced last."""
    for name, modules in groups.items():
        if any(p.grad is not None for module in modules for p in module.parameters()):
            _release(name, modules)


class _Entry:
    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self._name, self._modules = name, modules

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        mark(f"forward {self._name}")
        first, *others = inputs
        if not first.requires_grad:
            return inputs
        # A view, whose hook runs before those of the tensor: that is the output of the group before.
        own = first.view_as(first)
        own.register_hook(lambda _grad: _release(self._name, self._modules))
        return own, *others


class _Exit:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        mark(f"after-forward {self._name}")
        output.register_hook(lambda _grad: mark(f"backward {self._name}"))  # type: ignore[no-untyped-call]


def _release(name: str, modules: Sequence[nn.Module]) -> None:
    mark(f"after-backward {name}")
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None
    mark(f"freed {name}")
