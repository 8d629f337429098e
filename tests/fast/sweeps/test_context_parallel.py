"""Bounds of ring attention against plain attention, and the CPU's stand-ins of the operators of devices."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conformance.sweeps.context_parallel import OPTIONS, Numbers, expected
from reference_trainer.device_attention import KERNELS, attention, attention_by, attention_gradients

DEFAULTS = {option: values[0] for option, values in OPTIONS.items()}


def numbers(**options: Any) -> Numbers:
    return Numbers.of({**DEFAULTS, **options}, 8, seed=0)


def computed(given: Numbers, dtype: torch.dtype, *, scale: float | None = None) -> dict[str, Tensor]:
    """Return output and gradients of attention in a dtype, by torch's own formulas."""
    leaves = [each.to(dtype).requires_grad_() for each in (given.query, given.key, given.value)]
    shared = given.query.shape[1] // given.key.shape[1]
    key, value = (each.repeat_interleave(shared, 1) for each in leaves[1:])
    scale = given.scale if scale is None else scale
    output = scaled_dot_product_attention(leaves[0], key, value, is_causal=given.is_causal, scale=scale)
    gradients = torch.autograd.grad(output, leaves, given.grad.to(dtype))
    return dict(zip(expected(given, ranks=2), (output.detach(), *gradients), strict=True))


CASES: list[dict[str, Any]] = [{}, {"is_causal": False}, {"heads": "grouped"}, {"scale": 0.25, "batch": 1}]


@pytest.mark.parametrize("options", CASES)
def test_expected_numbers_are_those_of_torch(options: dict[str, Any]) -> None:
    given = numbers(**options)
    for name, measured in computed(given, torch.float64).items():
        torch.testing.assert_close(expected(given, ranks=2)[name].value, measured, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bounds_hold_for_attention_in_one_process_and_not_for_another_scale(
    options: dict[str, Any], dtype: str
) -> None:
    given = numbers(dtype=dtype, **options)
    right, wrong = (computed(given, given.query.dtype, scale=scale) for scale in (None, 0.3))
    for name, wanted in expected(given, ranks=2).items():
        assert ((right[name].double() - wanted.value).abs() <= wanted.bound).all(), name
        assert ((wrong[name].double() - wanted.value).abs() > wanted.bound).any(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_stand_ins_have_the_numbers_of_attention(kernel: str) -> None:
    given = numbers()
    leaves = [each.clone().requires_grad_() for each in (given.query, given.key, given.value)]
    with attention_by(kernel):
        query, key, value = leaves
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradients = torch.autograd.grad(output, leaves, given.grad)
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
    for (name, wanted), measured in zip(expected(given, ranks=1).items(), (output, *gradients), strict=True):
        assert ((measured.double() - wanted.value).abs() <= wanted.bound).all(), name


def test_gradients_of_shares_of_the_keys_add_up() -> None:
    """The output and the log-sum-exp of all keys make the gradients of a call the share of the keys that it gets."""
    given = numbers(is_causal=False)
    tensors = [each.double() for each in (given.query, given.key, given.value, given.grad)]
    query, key, value, grad = tensors
    output, sums = attention(query, key, value, is_causal=False, scale=None)
    whole = attention_gradients(grad, query, key, value, output, sums, is_causal=False, scale=None)
    shares = [
        attention_gradients(grad, query, *halves, output, sums, is_causal=False, scale=None)
        for halves in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)
    ]
    added = (sum(share[0] for share in shares), *(torch.cat([share[i] for share in shares], 2) for i in (1, 2)))
    for measured, wanted in zip(added, whole, strict=True):
        torch.testing.assert_close(measured, wanted)
