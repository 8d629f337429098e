"""Activation checkpointing: the operators that each mode recomputes, and bitwise equal results of all modes."""

from collections import Counter
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.assertions import compare
from conformance.instruments.dispatch_tap import DispatchTap, Handler
from conformance.plan.cells import AxisValue, Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.store import RecordStore
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import summed_cross_entropy
from reference_trainer.model import Transformer
from reference_trainer.parallelize import apply_ac

Mode = Literal["none", "full", "selective"]
MODEL = ModelConfig(
    vocab_size=13, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=8, bias=True,
    init_std=0.3, bias_std=0.1, norm_std=0.2, dropout=0.5,
)  # fmt: skip
TOKENS = torch.tensor([[1, 5, 12, 0, 7, 3], [2, 2, 9, 11, 4, 6]])


def model_with(mode: Mode) -> Transformer:
    model = Transformer(MODEL)
    init_weights(model, seed=0)
    if mode != "none":
        for block in model.blocks.values():
            apply_ac(block, mode=mode)
    return model


def backward(model: Transformer) -> tuple[Counter[str], list[Tensor]]:
    """Return the number of calls of each operator in backward, recomputation included, and the gradients."""
    torch.manual_seed(0)
    loss = summed_cross_entropy(model(TOKENS), TOKENS.roll(-1, dims=1))
    counts: Counter[str] = Counter()

    def count(func: Any) -> Handler:
        name = func._schema.name.removeprefix("aten::")
        return lambda _args: counts.update([name])

    with DispatchTap([count]):
        torch.autograd.backward(loss)
    return counts, [p.grad for p in model.parameters() if p.grad is not None]


def matrix_products(counts: Counter[str]) -> int:
    return sum(counts[name] for name in ("mm", "addmm", "bmm"))


def attentions(counts: Counter[str]) -> int:
    return sum(n for name, n in counts.items() if "scaled_dot_product" in name and "backward" not in name)


def test_selective_recomputes_less_than_full_and_more_than_nothing() -> None:
    none, full, selective = (backward(model_with(mode))[0] for mode in ("none", "full", "selective"))
    # Recomputation stops at the last tensor that backward needs: the mask of the dropout that follows w2.
    assert matrix_products(full) == matrix_products(none) + 7 * MODEL.n_layers
    assert matrix_products(selective) == matrix_products(none)
    assert (attentions(none), attentions(full), attentions(selective)) == (0, MODEL.n_layers, 0)
    assert (none["silu"], full["silu"], selective["silu"]) == (0, MODEL.n_layers, MODEL.n_layers)
    assert none.total() < selective.total() < full.total()


def test_recomputation_changes_no_bit() -> None:
    """Dropout samples its mask again in recomputation; another mask would change the gradients."""
    none, full, selective = (backward(model_with(mode))[1] for mode in ("none", "full", "selective"))
    assert len(none) == len(list(Transformer(MODEL).parameters()))
    assert all(map(torch.equal, full, none))
    assert all(map(torch.equal, selective, none))
    forgetful = model_with("full")
    for block in forgetful.blocks.values():
        block.recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    assert not all(map(torch.equal, backward(forgetful)[1], none))


def test_inductor_cannot_be_selective() -> None:
    TrainerConfig(activation_checkpointing="selective", compile="aot_eager")
    with pytest.raises(ValueError, match="cannot be kept; use activation_checkpointing full"):
        TrainerConfig(activation_checkpointing="selective", compile="inductor")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
@pytest.mark.parametrize(
    "axes",
    [{"mesh": "dp2"}, {"mesh": "tp2"}, {"mesh": "tp2", "sequence_parallel": False}],
    ids=["dp", "tp-sequence-parallel", "tp"],
)
def test_selective_recomputation_on_ranks_changes_no_bit(
    store: RecordStore, axes: dict[str, AxisValue], precision: str
) -> None:
    """The dispatch mode of the instruments must not come between checkpointing and the operators."""
    cell = Cell(steps=2, dropout=0.1).but(**axes, precision=precision)
    runs = CaseRuns(store)
    expected, recomputed = (runs.run(cell.but(activation_checkpointing=mode)) for mode in ("none", "selective"))
    for kind in ("step0/gradient/", "final/parameter/"):
        compare.bits(recomputed.select(kind), expected.select(kind), name=kind)
