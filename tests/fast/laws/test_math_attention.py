"""MP-1 and AC-1 where attention is products and a softmax, as on CUDA in fp32 for heads whose size is no multiple of 4.

`torch.backends.cuda.enable_flash_sdp(False)` lets the CPU do without its fused operator, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from conformance.instruments.facts import RankFacts
from conformance.laws.numerics import test_mp
from conformance.laws.schedule import test_ac
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from tests.support.one_rank import record_of, train, world_of_one_rank

UNEVEN = Cell(mesh="dp1", model="uneven", steps=1)
MODES = ("none", "full", "selective")


@pytest.fixture(scope="module", autouse=True)
def without_fused_attention() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    with world_of_one_rank():
        yield
    torch.backends.cuda.enable_flash_sdp(True)


def judge(law: Any, cell: Cell, directory: Path, facts: RankFacts) -> None:
    record = record_of(directory, cell, facts, {})
    law(run=lambda _: record, cell=cell)


def judge_dtypes(cell: Cell, directory: Path, facts: RankFacts) -> None:
    judge(test_mp.test_dtypes_are_those_of_the_mixed_precision_policy, cell, directory, facts)


def judge_recomputation(cell: Cell, directory: Path, facts: RankFacts) -> None:
    judge(test_ac.test_backward_recomputes_exactly_the_dropped_activations, cell, directory, facts)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
def test_dtypes_of_products_are_those_of_attention_too(tmp_path: Path, precision: str) -> None:
    cell = UNEVEN.but(precision=precision)
    facts, _ = train(cell)
    assert "attention/forward" not in facts.dtypes
    judge_dtypes(cell, tmp_path, facts)


def test_products_in_another_dtype_fail(tmp_path: Path) -> None:
    facts, _ = train(UNEVEN)
    for phase in ("forward", "backward"):
        dtypes = {**facts.dtypes, f"matmul/{phase}": ["bfloat16", "float32"]}
        with pytest.raises(
            ConformanceFailure, match=f"matmul/{phase}: measured bfloat16 and float32, expected float32"
        ):
            judge_dtypes(UNEVEN, tmp_path, msgspec.structs.replace(facts, dtypes=dtypes))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_recomputed_is_counted(tmp_path: Path, mode: str, dropout: float) -> None:
    cell = UNEVEN.but(activation_checkpointing=mode, dropout=dropout)
    facts, _ = train(cell)
    judge_recomputation(cell, tmp_path, facts)


@pytest.mark.parametrize(("mode", "computed_as"), [("full", "none"), ("full", "selective"), ("none", "full")])
def test_another_recomputation_fails(tmp_path: Path, mode: str, computed_as: str) -> None:
    facts, _ = train(UNEVEN.but(activation_checkpointing=computed_as))
    with pytest.raises(ConformanceFailure, match=r"attention: measured|matrix products: measured"):
        judge_recomputation(UNEVEN.but(activation_checkpointing=mode), tmp_path, facts)


def test_products_that_selective_checkpointing_has_not_kept_fail(tmp_path: Path) -> None:
    facts, _ = train(UNEVEN.but(activation_checkpointing="full"))
    with pytest.raises(ConformanceFailure, match="matrix products: measured"):
        judge_recomputation(UNEVEN.but(activation_checkpointing="selective"), tmp_path, facts)
