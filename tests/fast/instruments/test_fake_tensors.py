"""Fake tensors: nothing is computed, and the ledger has the allocations of real tensors."""

import sys

import pytest
import torch

from conformance.instruments.fake_tensors import fake_memory_ledger, fake_tensors
from conformance.instruments.memory import mark

GIB = 1024**3


def block(gib: int) -> torch.Tensor:
    return torch.empty(gib * GIB, dtype=torch.uint8)


def test_peak_and_kept_bytes() -> None:
    with fake_tensors():
        before = block(1000)
        with fake_memory_ledger() as ledger:
            kept = block(2)
            temporary = block(8)
            del temporary, before  # releases of earlier allocations do not count
            later = block(4)
    assert ledger.peak_bytes == 10 * GIB
    assert ledger.kept_bytes == kept.nbytes + later.nbytes == 6 * GIB


def test_views_and_changes_in_place_allocate_nothing() -> None:
    with fake_tensors():
        numbers = block(8)
        with fake_memory_ledger() as ledger:
            numbers.view(2, -1)[0].add_(1)
            result = numbers[:GIB] + 1
            result.reshape(4, -1).t().mul_(2)
    assert ledger.peak_bytes == ledger.kept_bytes == GIB


def test_resizing_a_storage_frees_and_allocates() -> None:
    with fake_tensors():
        old, empty = block(1), block(1)
        empty.untyped_storage().resize_(0)
        with fake_memory_ledger() as ledger:
            mark("of before")
            old.untyped_storage().resize_(0)
            mark("grown")
            empty.untyped_storage().resize_(3 * GIB)
            mark("freed")
            empty.untyped_storage().resize_(0)
    assert [(s.mark, s.peak_bytes, s.end_bytes) for s in ledger.segments[1:]] == [
        ("of before", 0, 0),
        ("grown", 3 * GIB, 3 * GIB),
        ("freed", 3 * GIB, 0),
    ]


def test_backward_releases_what_it_has_used() -> None:
    with fake_tensors():
        weight = torch.empty(GIB, requires_grad=True)
        with fake_memory_ledger() as ledger:
            mark("forward")
            loss = (weight * 2).exp().sum()
            mark("backward")
            torch.autograd.backward(loss)
    forward, backward = ledger.segments[1:]
    assert (forward.peak_bytes, forward.end_bytes) == (8 * GIB, 4 * GIB + 4)
    assert backward.end_bytes == 4 * GIB + 4, "the gradient and the loss"


def test_a_number_that_is_read_is_one() -> None:
    with fake_tensors():
        assert (float(torch.zeros(()).sum()), int(torch.zeros(3, dtype=torch.int64).sum())) == (1.0, 1)
        assert bool(torch.zeros(2).isfinite().all())


def test_a_ledger_that_sees_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no operator has allocated anything"), fake_tensors(), fake_memory_ledger():
        mark("nothing")


def test_a_torch_without_fake_tensors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    with pytest.raises(RuntimeError, match=r"torch \S+ has no FakeTensorMode"), fake_tensors():
        pass
