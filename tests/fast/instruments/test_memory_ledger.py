"""Memory ledgers: allocations of torch and of fake tensors, to the byte."""

import sys

import pytest
import torch

from conformance.instruments.fake_tensors import fake_memory_ledger, fake_tensors
from conformance.instruments.memory import MemoryLedger, Report, mark, memory_ledger

KIB = 1024


def test_peak_and_kept_bytes() -> None:
    before = torch.empty(KIB, dtype=torch.uint8)
    with memory_ledger() as ledger:
        mark("one")
        kept = torch.empty(2 * KIB, dtype=torch.uint8)
        temporary = torch.empty(8 * KIB, dtype=torch.uint8)
        mark("two")
        del temporary, before  # releases of earlier allocations do not count
        later = torch.empty(4 * KIB, dtype=torch.uint8)
    assert ledger.peak_bytes == 10 * KIB
    assert ledger.kept_bytes == kept.nbytes + later.nbytes == 6 * KIB
    assert [(s.mark, s.start_bytes, s.peak_bytes, s.end_bytes) for s in ledger.segments[1:]] == [
        ("one", 0, 10 * KIB, 10 * KIB),
        ("two", 10 * KIB, 10 * KIB, 6 * KIB),
    ]


def test_temporaries_of_operators_count() -> None:
    numbers = torch.ones(KIB, dtype=torch.float64)
    with memory_ledger() as ledger:
        total = float((numbers * 2 + 1).sum())
    assert total == 3 * KIB
    assert 0 <= ledger.peak_bytes - 2 * 8 * KIB < 64, "and some scalars"
    assert ledger.kept_bytes == 0


@pytest.mark.parametrize(("mapped", "peak"), [([], 9 * KIB), ([8 * KIB], KIB)])
def test_a_mapped_file_is_left_out(mapped: list[int], peak: int) -> None:
    ledger = MemoryLedger()
    ledger.add_up([(0, 8 * KIB), (9 * KIB, KIB), (0, -8 * KIB), (9 * KIB, -KIB)], mapped_bytes=mapped)
    assert (ledger.peak_bytes, ledger.kept_bytes) == (peak, 0)


def test_an_address_can_be_used_again() -> None:
    ledger = MemoryLedger()
    ledger.add_up([(1, 8), (1, -8), (1, 4), (3, -5)], mapped_bytes=[])
    assert (ledger.peak_bytes, ledger.kept_bytes) == (8, 4)


def test_segments_lie_between_marks() -> None:
    ledger = MemoryLedger()
    ledger.add_up([(0, 8), "forward", (8, 16), (8, -16), (8, 4), "backward", (0, -8)], mapped_bytes=[])
    assert [(s.mark, s.start_bytes, s.peak_bytes, s.end_bytes) for s in ledger.segments] == [
        ("", 0, 8, 8),
        ("forward", 8, 24, 12),
        ("backward", 12, 12, 4),
    ]
    assert ledger.peak_bytes == 24


@pytest.mark.parametrize("block", [(0, 4), (12, 8), (-4, 40), (15, 1)])
def test_a_block_under_a_new_block_was_released_unseen(block: tuple[int, int]) -> None:
    ledger = MemoryLedger()
    ledger.add_up([(0, 16), (16, 16), block], mapped_bytes=[])
    address, size = block
    left = sum(16 for start in (0, 16) if start + 16 <= address or address + size <= start)
    assert ledger.kept_bytes == left + size


def test_a_backend_has_an_account_of_its_own() -> None:
    ledger = MemoryLedger()
    gather, scatter = "c10d::gather#1", "c10d::scatter#7"
    reports: list[Report] = [(0, 8), (8, 32, gather), (40, 4, gather), (8, -32, gather)]
    reports += [(50, 5, scatter), (40, -4, scatter), (0, -8)]
    ledger.add_up(reports, mapped_bytes=[])
    assert (ledger.peak_bytes, ledger.kept_bytes) == (8, 0)
    assert [(use.operator, use.peak_bytes) for use in ledger.backend] == [("c10d::gather", 36), ("c10d::scatter", 5)]


def test_silence_is_an_error() -> None:
    """Without any report this torch does not tell; that is not to say that nothing was allocated."""
    with pytest.raises(RuntimeError, match="has reported no allocation"), memory_ledger():
        pass


# Fake tensors


GIB = 1024**3


def block(gib: int) -> torch.Tensor:
    return torch.empty(gib * GIB, dtype=torch.uint8)


def test_peak_and_kept_bytes_of_fake_tensors() -> None:
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
