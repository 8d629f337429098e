"""Orders in which rings add."""

import pytest
import torch
from torch import Tensor

from conformance.numerics.arithmetic import SUMS_VARIABLE
from conformance.numerics.rings import GLOO_RING, NCCL_RING, Ring, is_ring_sum, ring_of, ring_sum

RINGS = [pytest.param(GLOO_RING, id="gloo"), pytest.param(NCCL_RING, id="nccl")]
TINY = 2.0**-8
"""Half a unit in the last place of 1 in bf16."""


def one_and_tiny(numel: int) -> list[Tensor]:
    """Return terms of four ranks, whose sum 1 + tiny + tiny + tiny depends on who begins."""
    return [torch.full((numel,), 1.0 if rank == 0 else TINY, dtype=torch.bfloat16) for rank in range(4)]


KEPT = float(torch.tensor(1 + 3 * TINY, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("ring", "expected"),
    [
        # A tiny that is added to 1 is lost, two that were added up before are not. Chunk 0 ends with rank 0 in both
        # rings. Chunk 1 passes the ranks 0, 3, 2, 1 in gloo's, and 2, 3, 0, 1 in NCCL's.
        pytest.param(GLOO_RING, [KEPT, 1.0, 1.0, KEPT], id="gloo"),
        pytest.param(NCCL_RING, [KEPT, KEPT, 1.0, 1.0], id="nccl"),
    ],
)
def test_a_chunk_passes_the_ranks_in_the_order_of_its_ring(ring: Ring, expected: list[float]) -> None:
    assert ring_sum(one_and_tiny(4), dim=0, ring=ring).tolist() == expected
    assert ring_sum(one_and_tiny(32), dim=None, ring=ring).tolist() == [x for x in expected for _ in range(8)]


def test_chunks_of_an_all_reduce_are_aligned() -> None:
    """36 numbers of 2 bytes: the first chunk of gloo's four has 10, and the last of NCCL's three 4."""
    by_gloo, by_nccl = (ring_sum(one_and_tiny(36), dim=None, ring=ring).tolist() for ring in (GLOO_RING, NCCL_RING))
    assert by_gloo == [KEPT] * 10 + [1.0] * 20 + [KEPT] * 6
    assert by_nccl == [KEPT] * 32 + [1.0] * 4


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("ring", RINGS)
def test_it_is_a_sum_along_any_dimension(count: int, ring: Ring) -> None:
    terms = [torch.randn(5, 12, 3, dtype=torch.float64) for _ in range(count)]
    for dim in (0, 1, None):
        torch.testing.assert_close(ring_sum(terms, dim=dim, ring=ring), torch.stack(terms).sum(0))


@pytest.mark.parametrize("ring", RINGS)
def test_the_order_of_a_backend_is_recognised(ring: Ring) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(256, generator=generator).bfloat16() for _ in range(4)]

    def is_in_order(total: Tensor) -> bool:
        return is_ring_sum([numbers.tolist() for numbers in terms], [total.tolist()] * len(terms), ring)

    other = NCCL_RING if ring is GLOO_RING else GLOO_RING
    assert is_in_order(ring_sum(terms, dim=None, ring=ring))
    assert not is_in_order(ring_sum(terms, dim=None, ring=other))
    assert not is_in_order(terms[0] + terms[1] + terms[2] + terms[3])
    assert not is_in_order(torch.stack(terms).float().sum(0).bfloat16())


def test_devices_add_by_the_ring_of_nccl_and_processors_as_the_session_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ring_of("cpu"), ring_of("cuda")) == (GLOO_RING, NCCL_RING)
    monkeypatch.setenv(SUMS_VARIABLE, "ring")
    assert ring_of("cpu") == NCCL_RING
