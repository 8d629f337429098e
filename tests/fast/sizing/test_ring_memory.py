"""Memory of attention in a ring: allocations of torch's own loop, whose operators here allocate their results alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.experiments.context import simulated_world
from conformance.instruments.fake_tensors import fake_memory_ledger, fake_tensors
from conformance.sizing.prediction import Request, prediction
from conformance.sizing.ring_memory import backward_peak_bytes, forward_peak_bytes

ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
LENGTH, WIDTH = 1024, 256


def attention(query: Tensor, key: Tensor, _value: Tensor, **_options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty(query.shape[:3])


def gradients(*, query: Tensor, key: Tensor, value: Tensor, **_options: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def peaks_bytes(cp: int, rank: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the peaks of forward and backward on a rank, for each element of the output."""
    with simulated_world(cp, rank=rank), fake_tensors(), torch.no_grad():
        query, key, value, output, gradient = (torch.empty(1, 1, LENGTH, WIDTH, dtype=dtype) for _ in range(5))
        sums, group = torch.empty(1, 1, LENGTH), dist.group.WORLD
        with fake_memory_ledger() as forward:
            ring._templated_ring_attention(group, 2, attention, query, key, value, is_causal=True)
        with fake_memory_ledger() as backward:
            ring._templated_ring_attention_backward(
                group, 2, gradients, gradient, "grad_out", query, key, value, output, sums, is_causal=True
            )
    highest = (max(each.peak_bytes for each in ledger.segments) for ledger in (forward, backward))
    first, second = (peak / query.numel() for peak in highest)
    return first, second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_peaks_of_the_ranks_that_need_most(cp: int, dtype: torch.dtype) -> None:
    """Ranks between the first and the last need less; sums of exponentials, a 256th of an output, are not counted."""
    measured = [peaks_bytes(cp, rank, dtype) for rank in (0, cp - 1)]
    forward, backward = (max(peaks) for peaks in zip(*measured, strict=True))
    itemsize_bytes = dtype.itemsize
    assert forward == pytest.approx(forward_peak_bytes(cp, itemsize_bytes=itemsize_bytes), rel=0.01)
    assert backward == pytest.approx(backward_peak_bytes(cp, itemsize_bytes=itemsize_bytes), rel=0.01)


def predicted(mesh: str, **options: Any) -> Any:
    return prediction(Request(model="qwen3-14b", mesh=mesh, seq_len=8192, **options))


def test_a_ring_passes_keys_and_values_of_all_heads() -> None:
    """Heads of Qwen3 14B are 128 wide, and 40 in number: as wide as the model, by chance, unlike those of Qwen3 32B."""
    for model, width in (("qwen3-14b", 40 * 128), ("qwen3-32b", 64 * 128)):
        rows = prediction(Request(model=model, mesh="dp8-cp4", seq_len=8192)).traffic
        layers = 40 if model == "qwen3-14b" else 64
        both = 2 * 8192 // 4 * width
        assert [(row.phase, row.kind, row.ranks, row.count, row.input_bytes) for row in rows if row.group == "cp"] == [
            ("forward", "all_gather", 4, layers, layers * both * 2),
            ("backward", "all_gather", 4, layers, layers * both * 2),
            ("backward", "all_to_all", 4, 4 * layers, 4 * layers * both * 4),
        ]


def test_a_rank_of_a_ring_has_its_share_of_tokens() -> None:
    """Activations are those of fewer tokens, and a copy of each block's output of attention."""
    alone, shared = predicted("dp8", batch=2), predicted("dp8-cp4", batch=2)
    copies = 40 * 2 * 8192 // 4 * 40 * 128 * 2
    assert shared.activation_bytes == pytest.approx(alone.activation_bytes / 4 + copies)
    assert shared.state_bytes == alone.state_bytes


def test_tensor_parallelism_cuts_heads() -> None:
    kept = predicted("dp4-cp4", batch=2).activation_bytes, predicted("dp4-tp2-cp4", batch=2).activation_bytes
    assert kept[0] / 2 < kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [("dp8-cp3", "cp3 does not divide 8 ranks"), ("pp2-dp2-cp2", "mesh.cp 2"), ("dp8-cp8", "seq_len 8 ")],
)
def test_refused_rings(mesh: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prediction(Request(model="llama3-8b", mesh=mesh, seq_len=8))
