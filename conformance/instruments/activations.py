"""Marks in the memory of a model without FSDP, at the points where FSDP would gather, free and reduce.

The segments between marks hold activations and gradients. Tensor parallelism may have been applied. Marks, by name G of
the group: `forward G` and `after-forward G`; `backward G` when the gradient of the group's output is there;
`after-backward G` when the gradient of its input is, and with it the gradients of its parameters, which are then summed
over tensor-parallel ranks. Gradients are released, first those in the parameters' dtype, after `gradients G`, then the
others, after `wide-gradients G`; then comes `freed G`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.instruments.memory import mark

Groups = Mapping[str, Sequence[nn.Module]]
"""Modules by name of their group, in the order in which forward enters them: an outer group before its inner groups."""


class GroupMarks:
    """Hooks on modules that set the marks; a group's first module begins the group, its last module ends it."""

    def __init__(self, groups: Groups) -> None:
        self.reduces = True
        """True if gradients are reduced, and therefore first summed over tensor-parallel ranks."""
        self.releases = True
        """True if gradients are released; otherwise they stay with the parameters for a later micro-batch."""
        self._groups = groups
        group_of = {p: name for name, modules in groups.items() for module in modules for p in module.parameters()}
        self._parameters = {name: [p for p, group in group_of.items() if group == name] for name in groups}
        """Parameters of each group, without those of its inner groups."""
        self._waiting = set(groups)
        """Groups whose backward is not over yet."""
        for name, modules in groups.items():
            modules[0].register_forward_pre_hook(_Entry(name, self._release))
            modules[-1].register_forward_hook(_Exit(name))

    def finish_backward(self) -> None:
        """Set the marks of groups whose inputs have no gradient, such as the embedding. Call it after backward."""
        for name in self._groups:
            if name in self._waiting:
                self._release(name)
        self._waiting = set(self._groups)

    def release_all(self, *, backward: bool) -> None:
        """Set the marks at the end of backward for all groups, in the order of forward, or of `backward`."""
        names = list(self._groups)
        for name in reversed(names) if backward else names:
            self._release(name)
        self._waiting = set(self._groups)

    def _release(self, name: str) -> None:
        self._waiting.discard(name)
        parameters = self._parameters[name]
        mark(f"after-backward {name}")
        if self.reduces:
            for parameter in parameters:
                _sum_as_placed(parameter)
        for kind, wide in (("gradients", False), ("wide-gradients", True)):
            mark(f"{kind} {name}")
            for parameter in parameters if self.releases else ():
                if parameter.grad is not None and (parameter.grad.dtype != parameter.dtype) == wide:
                    parameter.grad = None
        mark(f"freed {name}")


def _sum_as_placed(parameter: nn.Parameter) -> None:
    """Redistribute the gradient, of which a rank may hold a partial sum, to the placements of its parameter."""
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


class _Entry:
    def __init__(self, name: str, release: Callable[[str], None]) -> None:
        self._name, self._release = name, release

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        mark(f"forward {self._name}")
        activation, *others = inputs
        if not activation.requires_grad:
            return inputs
        # A view, whose hook runs before those of the tensor: that is the output of the group before.
        view = activation.view_as(activation)
        view.register_hook(lambda _grad: self._release(self._name))
        return view, *others


class _Exit:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        mark(f"after-forward {self._name}")
        if output.requires_grad:  # not in an evaluation
            output.register_hook(lambda _grad: mark(f"backward {self._name}"))  # type: ignore[no-untyped-call]
