"""Results of collectives are compared with those that the inputs of all ranks imply."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from conformance.instruments.facts import Collective
from conformance.localisation.collectives import wrong_collectives
from conformance.localisation.ranks import Ranks
from conformance.localisation.traces import Trace
from tests.support.taps import tap_of


def wrong_ranks(kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[int]:
    """Return the ranks whose result of one collective over all of them is wrong."""
    ranks = Ranks([{"tp": rank} for rank in range(len(inputs))], [0] * len(inputs))
    traces = [
        Trace(
            [
                tap_of(given, kind="collective input", collectives=1),
                tap_of(taken, kind="collective output", collectives=1),
            ],
            [given, taken],
        )
        for given, taken in zip(inputs, outputs, strict=True)
    ]
    op = None if kind == "all_gather" else "SUM"
    log = Collective(step=0, phase="forward", kind=kind, group="tp", numel=2, nbytes=8, dtype="float32", reduce_op=op)
    return [each.rank for each in wrong_collectives(0, ranks, traces, [[log]] * len(inputs))]


A, B, C = torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.3]), torch.tensor([1e-3, 7.0])


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("all_reduce", [A + B, A + B]),
        ("reduce_scatter", [(A + B)[:1], (A + B)[1:]]),
        ("all_gather", [torch.cat((A, B)), torch.cat((A, B))]),
    ],
)
def test_the_smallest_error_of_two_ranks_is_seen(kind: str, outputs: list[Tensor]) -> None:
    assert wrong_ranks(kind, [A, B], outputs) == []
    changed = outputs[1].clone()
    changed[0] = torch.nextafter(changed[0], torch.tensor(9.0))
    assert wrong_ranks(kind, [A, B], [outputs[0], changed]) == [1]


def test_sums_of_three_ranks_may_have_any_order_and_lack_none() -> None:
    assert wrong_ranks("all_reduce", [A, B, C], [(A + B) + C, A + (B + C), (C + A) + B]) == []
    assert wrong_ranks("all_reduce", [A, B, C], [A + B + C, A + B, A + B + C]) == [1]
