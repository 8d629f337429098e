"""Sharded state of a model: groups of parameters, before and after `fully_shard`."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.instruments.sharding import fsdp_group_of, is_sharded_by_fsdp


def test_groups_of_sharded_parameters(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not any(is_sharded_by_fsdp(p) for p in model.parameters())
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(is_sharded_by_fsdp(p) for p in model.parameters())
    assert set(fsdp_group_of(model).items()) == {
        ("0.weight", ""),
        ("0.bias", ""),
        ("1.0.weight", "1"),
        ("1.0.bias", "1"),
    }
