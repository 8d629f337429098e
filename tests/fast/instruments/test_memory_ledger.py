"""Memory ledger: allocations of torch, to the byte."""

import pytest
import torch

from conformance.instruments.memory import MemoryLedger, Report, mark, memory_ledger

KIB = 1024


def test_peak_and_kept_bytes() -> None:
    before = torch.empty(KIB, dtype=torch.uint8)
    with memory_ledger() as ledger:
        kept = torch.empty(2 * KIB, dtype=torch.uint8)
        temporary = torch.empty(8 * KIB, dtype=torch.uint8)
        del temporary, before  # releases of earlier allocations do not count
        later = torch.empty(4 * KIB, dtype=torch.uint8)
    assert ledger.peak_bytes == 10 * KIB
    assert ledger.kept_bytes == kept.nbytes + later.nbytes == 6 * KIB


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


def test_marks_are_seen_in_their_order() -> None:
    with memory_ledger() as ledger:
        mark("one")
        first = torch.empty(KIB, dtype=torch.uint8)
        mark("two")
        second = torch.empty(2 * KIB, dtype=torch.uint8)
        del first
    assert [(s.mark, s.start_bytes, s.peak_bytes, s.end_bytes) for s in ledger.segments[1:]] == [
        ("one", 0, KIB, KIB),
        ("two", KIB, 3 * KIB, second.nbytes),
    ]


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
    reports: list[Report] = [
        (0, 8),
        (8, 32, gather),
        (40, 4, gather),
        (8, -32, gather),
        (50, 5, scatter),
        (40, -4, scatter),
        (0, -8),
    ]
    ledger.add_up(reports, mapped_bytes=[])
    assert (ledger.peak_bytes, ledger.kept_bytes) == (8, 0)
    assert [(use.operator, use.peak_bytes) for use in ledger.backend] == [("c10d::gather", 36), ("c10d::scatter", 5)]


def test_silence_is_an_error() -> None:
    """Without any report this torch does not tell; that is not to say that nothing was allocated."""
    with pytest.raises(RuntimeError, match="has reported no allocation"), memory_ledger():
        pass
