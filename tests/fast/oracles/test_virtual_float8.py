"""Float8 in one process: its roundings and products by definition, and which weights it is about."""

from typing import get_args

import pytest
import torch
from msgspec.structs import replace

from conformance.oracles.float8 import FLOAT8, gathered_in_float8, multiplied_in_float8
from conformance.oracles.reference import initial_model
from conformance.oracles.schedule import gather_input
from conformance.oracles.virtual_float8 import multiply_in_float8
from conformance.plan.cells import Cell, cell_from_axes
from reference_trainer.config import TrainerConfig
from reference_trainer.float8 import Scaling
from reference_trainer.parallel_dims import resolve_mesh

SCALINGS = get_args(Scaling)


def config_of(scaling: str, **axes: str | bool) -> TrainerConfig:
    return cell_from_axes({"mesh": "dp2", "float8": scaling, **axes}).config


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_those_of_torchao_in_every_bit(scaling: str) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="pip install torchao", exc_type=ImportError)
    config = config_of(scaling)
    ours, theirs = initial_model(config), initial_model(config)
    multiply_in_float8(ours, {name: p.detach() for name, p in ours.named_parameters()}, config)
    recipe = float8.Float8LinearConfig.from_recipe_name(scaling)
    object.__setattr__(recipe, "emulate", True)
    float8.convert_to_float8_training(theirs.layers, config=recipe)
    tokens = torch.arange(32).view(2, 16)
    outputs = [model(tokens) for model in (ours, theirs)]
    assert torch.equal(*outputs)
    grads = [
        torch.autograd.grad(out.square().mean(), list(model.parameters()))
        for out, model in zip(outputs, (ours, theirs), strict=True)
    ]
    assert all(torch.equal(own, other) for own, other in zip(*grads, strict=True))
    assert not torch.equal(outputs[0], initial_model(config)(tokens))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_error_is_that_of_float8(scaling: str) -> None:
    config = config_of(scaling)
    model, exact = initial_model(config), initial_model(config)
    multiply_in_float8(model, {name: p.detach() for name, p in model.named_parameters()}, config)
    layer, x = (
        model.get_submodule("layers.0.attention.wq"),
        torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0)),
    )
    expected = exact.get_submodule("layers.0.attention.wq")(x)
    error = (layer(x) - expected).norm() / expected.norm()
    # Two operands are rounded to 1 + 3 bits each, so that a product errs by at most 2 / 16, and chance halves errors.
    assert 2.0**-8 < error < 2.0**-3


def test_weights_whose_sizes_kernels_take() -> None:
    tiny = multiplied_in_float8(config_of("rowwise"))
    assert tiny == {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "attention.wo",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    }
    large = multiplied_in_float8(config_of("rowwise", model="large"))
    assert {name.split(".")[-2] for name in large} == {"wq", "wo"}
    assert not multiplied_in_float8(Cell(mesh="dp2").config)
    assert not gathered_in_float8(config_of("rowwise"))


@pytest.mark.parametrize(
    ("scaling", "precision", "expected"),
    [
        ("none", "bf16-mp", (100, "bfloat16")),
        ("rowwise", "bf16-mp", (100, "bfloat16")),
        ("tensorwise", "bf16-mp", (4608 + 2 * 400, "uint8")),
        ("tensorwise", "fp32", (4608 + 4 * 400, "uint8")),
    ],
)
def test_shards_of_several_dtypes_are_gathered_as_bytes(
    scaling: str, precision: str, expected: tuple[int, str]
) -> None:
    config = config_of(scaling, precision=precision)
    dims = resolve_mesh(config.mesh, world_size=2)
    numel = 5008 if scaling == "tensorwise" else 100  # of which 9216 / 2 are of matrices
    assert gather_input("layers.0", numel, config, dims) == expected
    assert gather_input("output", 7, config, dims) == (7, "float32" if precision == "fp32" else "bfloat16")


def test_shards_of_float8_alone_are_gathered_in_it() -> None:
    config = config_of("tensorwise", precision="bf16-mixed")
    dims = resolve_mesh(replace(config.mesh), world_size=2)
    assert gather_input("layers.0", 4608, config, dims) == (4608, FLOAT8)
