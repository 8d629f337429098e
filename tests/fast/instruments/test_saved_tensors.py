"""Ledger of saved tensors: activations count while autograd holds them, parameters and other phases never."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.instruments.saved_tensors import SavedTensors


def test_activations_count_until_backward_and_parameters_never() -> None:
    saved, weight, x = SavedTensors(), torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
    saved.leave_out([weight])
    with saved.installed():
        loss = (x @ weight).exp().sum()
        assert saved.held_bytes == x.nbytes + 2 * 4 * 4
        torch.autograd.backward(loss)
        del loss
    assert saved.held_bytes == x.nbytes


def test_nothing_counts_while_the_ledger_is_off_or_another_hook_packs() -> None:
    saved, x = SavedTensors(), torch.ones(8, requires_grad=True)
    saved.leave_out([x])

    def squared(tensor: Tensor) -> Tensor:
        return tensor.exp() ** 2

    with saved.installed():
        kept = checkpoint(squared, x, use_reentrant=False)
        assert saved.held_bytes == 0
        saved.is_on = False
        kept = kept + squared(x)
        assert saved.held_bytes == 0
