"""The memory ledger: allocations of torch, to the byte."""

import pytest
import torch

from conformance.instruments.memory import MemoryLedger, memory_ledger

KIB = 1024


def test_peak_and_what_is_kept() -> None:
    before = torch.empty(KIB, dtype=torch.uint8)
    with memory_ledger() as ledger:
        kept = torch.empty(2 * KIB, dtype=torch.uint8)
        temporary = torch.empty(8 * KIB, dtype=torch.uint8)
        del temporary, before  # the release of what was there before is not the ledger's business
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
    ledger.add_up([(1, 8 * KIB), (2, KIB), (1, -8 * KIB), (2, -KIB)], mapped_bytes=mapped)
    assert (ledger.peak_bytes, ledger.kept_bytes) == (peak, 0)


def test_an_address_can_be_used_again() -> None:
    ledger = MemoryLedger()
    ledger.add_up([(1, 8), (1, -8), (1, 4), (3, -5)], mapped_bytes=[])
    assert (ledger.peak_bytes, ledger.kept_bytes) == (8, 4)


def test_silence_is_an_error() -> None:
    """No report at all means that this torch does not tell, not that nothing was allocated."""
    with pytest.raises(RuntimeError, match="has reported no allocation"), memory_ledger():
        pass
