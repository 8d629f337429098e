"""Explicit prefetching: the groups that the trainer lets FSDP prefetch, and how the suite sees them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import backward_prefetch_of
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import backward_order, each_with_next, forward_order, reshard_policy

TIED = ModelConfig(tied_embeddings=True)


def parallel_model(mesh: DeviceMesh, **fields: Any) -> Transformer:
    config = TrainerConfig(**fields)
    with torch.device("meta"):
        model = Transformer(config.model)
    parallelize(model, mesh, config, reshard_policy(config, ParallelDims(1, 1, 1), torch.device("cpu")))
    return model


def test_the_next_groups() -> None:
    pairs = {name: list(ahead) for name, ahead in each_with_next(["a", "b", "c", "d"], 2)}
    assert pairs == {"a": ["b", "c"], "b": ["c", "d"], "c": ["d"], "d": []}
    assert [list(ahead) for _, ahead in each_with_next(["a", "b"], 0)] == [[], []]


@pytest.mark.parametrize(
    ("config", "forward", "backward"),
    [
        (TrainerConfig(), "tok_embeddings layers.0 layers.1 output", "output layers.1 layers.0 tok_embeddings"),
        (TrainerConfig(model=TIED), "output layers.0 layers.1", "output layers.1 layers.0"),
        (
            TrainerConfig(model=ModelConfig(n_layers=1), precision="bf16-mixed"),
            "tok_embeddings layers.0 layers.0.attention_norm layers.0.ffn_norm norm output",
            "output norm layers.0 layers.0.ffn_norm layers.0.attention_norm tok_embeddings",
        ),
    ],
)
def test_orders(config: TrainerConfig, forward: str, backward: str) -> None:
    assert forward_order(config) == forward.split()
    assert backward_order(config) == backward.split()


def test_the_order_of_ten_blocks_is_not_that_of_the_alphabet() -> None:
    order = backward_order(TrainerConfig(model=ModelConfig(n_layers=11)))
    assert order[1:4] == ["layers.10", "layers.9", "layers.8"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"forward_prefetch": 2}, {}),
        (
            {"backward_prefetch": 2},
            {"norm": ["layers.1", "layers.0"], "layers.1": ["layers.0", "tok_embeddings"]}
            | {"layers.0": ["tok_embeddings"]},
        ),
        (
            {"backward_prefetch": 9, "model": TIED},
            {"tok_embeddings": ["layers.1", "layers.0"], "layers.1": ["layers.0"]},
        ),
    ],
)
def test_what_fsdp_is_told(mesh: DeviceMesh, fields: dict[str, Any], expected: dict[str, list[str]]) -> None:
    """A group of several modules has the name of its first: norm, of norm and output, or the tied embedding."""
    assert backward_prefetch_of(parallel_model(mesh, **fields)) == expected


def test_another_torch_is_an_error() -> None:
    class Managed(FSDPModule, nn.Linear):
        def _get_fsdp_state(self) -> Any:
            return self

    managed = nn.Module.__new__(Managed)
    nn.Module.__init__(managed)
    with pytest.raises(RuntimeError, match=r"_states_to_backward_prefetch.*; adapt .*\.fsdp_state"):
        backward_prefetch_of(managed)
