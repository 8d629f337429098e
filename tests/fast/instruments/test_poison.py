"""Poison: it is seen in every dtype that can show it, and where initialisation has forgotten a tensor."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.instruments.poison import INTEGER_POISON, Poison, poison_, poisoned_elements
from conformance.instruments.sharding import full
from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [
        (torch.float32, 6),
        (torch.bfloat16, 6),
        (torch.complex64, 6),
        (torch.int64, 6),
        (torch.int8, 6),
        (torch.uint8, 6),
        (torch.bool, 0),
    ],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_poison(mesh: DeviceMesh, dtype: torch.dtype, counted: int, distributed: bool) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    if distributed:
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    assert poisoned_elements(tensor) == 0
    poison_(tensor)
    assert poisoned_elements(tensor) == counted
    if not dtype.is_floating_point and not dtype.is_complex:
        assert set(full(tensor).flatten().tolist()) == {True if dtype == torch.bool else INTEGER_POISON}


def test_poison_finds_what_initialisation_forgets() -> None:
    model = Transformer(ModelConfig(n_layers=1, dim=8, n_heads=2, n_kv_heads=1, ffn_dim=8))
    poison = Poison()
    poison.materialized(model)
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert poison.poisoned.keys() == names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "norm.weight":
                parameter.zero_()
    model.rope_table[0].zero_()
    poison.initialized(model)
    forgotten = {name: number for name, number in poison.surviving.items() if number}
    assert forgotten == {"norm.weight": 8, "rope_table": model.rope_table.numel() // 2}
