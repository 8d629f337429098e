"""Operands of operators that add up, as kernels see them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

from conformance.instruments.operators import Operands, operands_of

if TYPE_CHECKING:
    from reference_trainer.observer import Phase


def of(*tensors: Tensor, function: Callable[..., Tensor] = torch.mm) -> set[str]:
    return operands_of(lambda: function(*tensors))


def test_dtypes_shapes_and_strides_are_told() -> None:
    left, right = torch.ones(3, 2), torch.ones(4, 2)
    assert of(left, right.T) == {"aten::mm float32[3, 2](2, 1) float32[2, 4](1, 2)"}
    assert of(left.bfloat16(), right.T.bfloat16()) == {"aten::mm bfloat16[3, 2](2, 1) bfloat16[2, 4](1, 2)"}


def test_cuts_of_a_wider_tensor_are_told_from_copies() -> None:
    wide, other = torch.ones(2, 8), torch.ones(5, 1)
    cut = wide[:, 3:]
    assert of(cut, other) == {"aten::mm float32[2, 5](8, 1)+12 float32[5, 1](1, 1)"}
    assert of(cut.contiguous(), other) == {"aten::mm float32[2, 5](5, 1) float32[5, 1](1, 1)"}


def test_operators_that_add_nothing_up_and_integers_are_left_out() -> None:
    x = torch.ones(4, 4)
    assert of(x, function=lambda x: x * x + x.exp()) == set()
    assert of(x > 0, function=torch.sum) == set()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), id="attention"),
        pytest.param(lambda x: F.log_softmax(x, -1), id="log-softmax"),
        pytest.param(lambda x: x.mean(-1), id="mean"),
        pytest.param(lambda x: x @ x.mT, id="product"),
    ],
)
def test_what_adds_up_is_seen(function: Callable[[Tensor], Tensor]) -> None:
    assert of(torch.ones(2, 2, 4, 8), function=function)


def test_backward_is_seen_as_well() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    x = torch.ones(3, 4)
    seen = operands_of(lambda: torch.autograd.grad((x @ weight).sum(), weight))
    assert "aten::mm float32[4, 3](1, 4) float32[3, 2](0, 0)" in seen


def test_only_forward_and_backward_of_the_first_step_count() -> None:
    operands = Operands()
    add_up = operands.listen(torch.ops.aten.sum.default)
    assert add_up is not None
    phases: list[tuple[Phase, int]] = [("build", -1), ("data", 3), ("forward", 3), ("backward", 3), ("clip", 3)]
    phases += [("forward", 4), ("backward", 4)]
    for size, (phase, step) in enumerate(phases):
        operands.phase(phase, step=step)
        add_up([torch.ones(size)])
    assert operands.noted == {"aten::sum float32[2](1,)", "aten::sum float32[3](1,)"}
