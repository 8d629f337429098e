"""AC: activation checkpointing computes again what it has dropped, and nothing else."""

from torch import nn

from conformance.instruments.facts import RankFacts
from conformance.judge.law import law
from conformance.laws import compare
from conformance.laws.fixtures import Run
from conformance.oracles.outline import outline
from conformance.plan.cells import Cell

CHECKPOINT = "https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.checkpoint"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
_PRODUCTS_OF_A_GRADIENT = 2
"""A linear layer's backward has a product for the gradient of its input, and one for that of its weight."""


@law(
    "AC-1",
    where="(activation_checkpointing != none or features = 0) and compile = false and implementation = fsdp2",
    gaps=["large-models"],
    reference=CHECKPOINT,
)
def test_backward_recomputes_what_was_dropped(run: Run, cell: Cell) -> None:
    """Each rank MUST compute in backward, once more, the attention and the matrix products of a block under full
    activation checkpointing, up to the last result that a gradient needs, and none again under selective checkpointing,
    which keeps these results, or without any.

    The block's last product is needed if dropout follows, whose mask is drawn again.
    """
    for facts in run(cell).ranks:
        _compare_operators(facts, cell)


def _compare_operators(facts: RankFacts, cell: Cell) -> None:
    __tracebackhide__ = True
    detail = f"rank {facts.rank}"
    repeats = int(cell.activation_checkpointing == "full")
    forward, backward = (facts.operators[phase] for phase in ("forward", "backward"))
    blocks = _attentions(forward)
    if not blocks:
        raise RuntimeError(f"cell {cell.id}, {detail}: no attention was seen in forward")
    compare.count(_attentions(backward), name="attention", expected=blocks * repeats, detail=detail, unit="operators")
    needed = _linear_layers_of_a_block(cell) - (cell.dropout == 0.0)
    repeated = blocks * needed * repeats
    expected = _PRODUCTS_OF_A_GRADIENT * _products(forward) + repeated
    compare.count(_products(backward), name="matrix products", expected=expected, detail=detail, unit="operators")


def _attentions(operators: dict[str, int]) -> int:
    return sum(n for name, n in operators.items() if "scaled_dot_product" in name and "backward" not in name)


def _products(operators: dict[str, int]) -> int:
    return sum(operators.get(name, 0) for name in _PRODUCTS)


def _linear_layers_of_a_block(cell: Cell) -> int:
    block = outline(cell.config.model).layers["0"]
    return sum(isinstance(module, nn.Linear) for module in block.modules())
