"""Steps of experiments: a backward in two halves, and steps that memory laws measure."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

from conformance.experiments import memory
from conformance.experiments.without_fsdp import backward_of_input, backward_of_parameters


class Saved:
    """Tensor that a graph has saved, to which there can be weak references."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4, bias=False))


def test_both_halves_compute_the_gradients_of_a_backward() -> None:
    model, x, output_gradient = network(), torch.randn(3, 8, requires_grad=True), torch.randn(3, 4)
    model(x).backward(output_gradient)
    whole = [parameter.grad for parameter in model.parameters()]
    for copies in (False, True):
        model.zero_grad()
        for times in (1, 2):
            input_gradient, branches = backward_of_input(model(x), output_gradient, x, model.parameters())
            assert [len(branch.parameters) for branch in branches] == [1, 2, 1]  # norm; weight and bias; weight
            backward_of_parameters(branches, copies=copies)
            torch.testing.assert_close(input_gradient, x.grad, rtol=0, atol=0)
            for parameter, expected in zip(model.parameters(), whole, strict=True):
                assert expected is not None
                torch.testing.assert_close(parameter.grad, times * expected, rtol=0, atol=0)
        assert not branches


def test_each_half_lets_go_of_the_graph_that_it_needs_last() -> None:
    model, x, saved = network(), torch.randn(3, 8, requires_grad=True), weakref.WeakSet[Saved]()

    def save(tensor: Tensor) -> Saved:
        saved.add(kept := Saved(tensor.detach()))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept.tensor):
        logits = model(x)
        below = len(saved)
        loss = F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    del logits
    assert len(saved) > below
    _, branches = backward_of_input(loss, None, x, model.parameters())
    assert len(saved) == below
    backward_of_parameters(branches, copies=False)
    assert not saved


def test_a_step_that_the_loss_scaler_skips_is_not_measured() -> None:
    """A skipped step needs other memory than one that is taken, and no memory law could tell."""
    trainer: Any = SimpleNamespace(train_step=lambda step: SimpleNamespace(skipped=True))
    with pytest.raises(RuntimeError, match="step 1 was skipped"):
        memory._marked_step(trainer, 1)
