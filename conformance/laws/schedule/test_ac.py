"""AC: activation checkpointing computes exactly the dropped activations again."""

from torch import nn

from conformance.assertions import compare
from conformance.assertions.attention import Attention, attention_of, products
from conformance.assertions.fixtures import Run
from conformance.instruments.facts import RankFacts
from conformance.judge.law import law
from conformance.oracles.float8 import multiplied_in_float8
from conformance.oracles.frozen import is_trained
from conformance.oracles.outline import outline
from conformance.plan.cells import Cell

CHECKPOINT = "https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.checkpoint"
_PRODUCTS_OF_A_GRADIENT = 2
"""A linear layer's backward has a product for the gradient of its input, and one for that of its weight."""
_PRODUCTS_OF_AN_EXPERT = 3
"""Up, gate and down; the router has one for all experts."""


@law(
    "AC-1",
    where="(activation_checkpointing != none or features = 0) and compile = false and implementation = fsdp2",
    gaps=["large-models"],
    reference=CHECKPOINT,
)
def test_backward_recomputes_exactly_the_dropped_activations(run: Run, cell: Cell) -> None:
    """In backward each rank MUST recompute, under full activation checkpointing, each attention and matrix product of a
    block once, up to the last result that a gradient needs; under selective checkpointing, which keeps these results,
    or without checkpointing, none.

    The block's last product is needed if dropout follows, whose mask is drawn again, or if it is of float8 numbers,
    whose operands are saved after it. Where a device has no operator for
    attention, it is two products, which count as such, and a softmax, which no checkpointing keeps.
    """
    record = run(cell)
    attention = attention_of(record)
    for facts in record.ranks:
        _compare_operators(facts, cell, attention, steps=len(record.steps))


def _compare_operators(facts: RankFacts, cell: Cell, attention: Attention, *, steps: int) -> None:
    __tracebackhide__ = True
    detail, unit = f"rank {facts.rank}", "operators"
    repeats = int(cell.activation_checkpointing == "full")
    forward, backward = (facts.operators[phase] for phase in ("forward", "backward"))
    calls = attention.calls(forward)
    if not calls:
        raise RuntimeError(f"cell {cell.id}, {detail}: no attention was seen in forward")
    is_dropped = cell.activation_checkpointing != "none" if not attention.is_fused else bool(repeats)
    compare.count(attention.calls(backward), name="attention", expected=calls * is_dropped, detail=detail, unit=unit)
    blocks = calls // cell.config.mesh.cp  # in a ring the keys and values of each rank are a call
    linear = products(forward) - blocks * attention.products("forward")
    is_last_left_out = cell.dropout == 0.0 and cell.float8 == "none"
    needed = _linear_layers_of_a_block(cell) - is_last_left_out + attention.products("forward")
    gradient_products = _PRODUCTS_OF_A_GRADIENT * linear + blocks * attention.products("backward")
    gradient_products -= _frozen_layers(cell) * steps * cell.accumulation
    expected = gradient_products + blocks * needed * repeats
    compare.count(products(backward), name="matrix products", expected=expected, detail=detail, unit=unit)


def _frozen_layers(cell: Cell) -> int:
    """Number of linear layers whose weight has no gradient; a tied one has the name of the embedding's.

    In float8 that gradient is computed all the same.
    """
    config = cell.config
    in_float8 = multiplied_in_float8(config)
    layers = [name for name, module in outline(config.model).named_modules() if isinstance(module, nn.Linear)]
    names = {"output": "tok_embeddings"} if config.model.tied_embeddings else {}
    weights = [f"{names.get(layer, layer)}.weight" for layer in layers]
    return sum(not is_trained(weight, config) and weight not in in_float8 for weight in weights)


def _linear_layers_of_a_block(cell: Cell) -> int:
    """Number of a rank's products in forward; each of the experts that it holds has those of a feed-forward network."""
    model = cell.config.model
    block = outline(model).layers["0"]
    expert_products = 1 + _PRODUCTS_OF_AN_EXPERT * (model.n_experts // cell.config.mesh.ep) if model.n_experts else 0
    return sum(isinstance(module, nn.Linear) for module in block.modules()) + expert_products
