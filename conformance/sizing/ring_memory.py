"""Memory that attention in a ring needs while it goes around, of torch's `context_parallel` with its defaults.

Bytes are given for each element of the attention's output on a rank, whose queries, keys and values have as many. They
are counted from `_templated_ring_attention` and its backward in
torch/distributed/tensor/experimental/_context_parallel/_attention.py of torch 2.13, which gather the keys and values of
all ranks at once and add in fp32. Queries, keys, values, the output and its gradient are not counted.
Ranks differ, since a causal mask leaves each one other halves of its chunks: the figures are those of the rank that
needs most, the last one in forward and the first or the last one in backward.
"""

_FP32_BYTES = 4


def forward_peak_bytes(cp: int, *, itemsize_bytes: int) -> int:
    """Return the bytes while the output of one more rank's keys is merged into the sum.

    These are the keys and values of all ranks and an output in the dtype of computation; in fp32 the sum so far, its
    difference from that output, the weighted difference and, if computation has another dtype, the output once more.
    """
    gathered = itemsize_bytes * (2 * cp + 1)
    return gathered + _FP32_BYTES * (3 + (itemsize_bytes < _FP32_BYTES))


def backward_peak_bytes(cp: int, *, itemsize_bytes: int) -> int:
    """Return the bytes at the larger of two peaks.

    At both, the keys and values of all ranks are there and once more this rank's, which it sent, and the sum of the
    query's gradients in fp32. When the second rank's keys are used, the gradients of the first are there in the dtype
    of computation, and those of the second, of which the query's or the keys' and values' have half the length; sums of
    the keys' and values' gradients are there three times: at home, as they were sent, and as they arrived. When sums
    are sent on, they are there four times, and a rank's own gradients beside them.
    """
    kept = itemsize_bytes * (2 * cp + 2) + _FP32_BYTES
    second = 3 * 2 * _FP32_BYTES + 11 * itemsize_bytes // 2
    sent_on = 4 * 2 * _FP32_BYTES + 2 * itemsize_bytes
    return kept + max(second, sent_on)
