"""Instruments on tensors: fingerprints, files, poison and sharded state."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.instruments.capture import fingerprint
from conformance.instruments.poison import INTEGER_POISON, Poison, poison_, poisoned_elements
from conformance.instruments.sharding import fsdp_group_of, full, is_sharded_by_fsdp
from conformance.instruments.tensor_file import write_tensors
from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer


def test_fingerprint() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    same = [tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor, tensor])[:2]]
    others = [
        tensor.reshape(3, 2),
        tensor.double(),
        tensor.view(torch.int32),
        tensor.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0)),
        tensor.nextafter(torch.full_like(tensor, 9.0)),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ]
    assert {fingerprint(other) for other in same} == {fingerprint(tensor)}
    assert len({fingerprint(other) for other in [tensor, *others]}) == len(others) + 1


# Files


REAL = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*REAL, torch.int8, torch.complex64]


def test_the_library_reads_the_same_tensors(tmp_path: Path) -> None:
    tensors = {f"of {dtype}": torch.arange(3).to(dtype) for dtype in DTYPES}
    tensors |= {"a scalar": torch.tensor(2.5), "nothing": torch.empty(0, 3), "é/matrix": torch.randn(3, 5)}
    write_tensors(tmp_path / "file", tensors)
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (read[key].dtype, read[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[key], tensor)
    write_tensors(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}


def test_bits_of_nan_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000], dtype=torch.int32)
    write_tensors(tmp_path / "file", {"x": bits.view(torch.float32)})
    assert torch.equal(load_file(tmp_path / "file")["x"].view(torch.int32), bits)


def test_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex128, not one of torch\.bool"):
        write_tensors(tmp_path / "file", {"x": torch.ones(2, dtype=torch.complex128)})


# Poison


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("distributed", [False, True])
def test_poison(mesh: DeviceMesh, dtype: torch.dtype, distributed: bool) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    if distributed:
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    assert poisoned_elements(tensor) == 0
    poison_(tensor)
    assert poisoned_elements(tensor) == (0 if dtype == torch.bool else 6)
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


# Sharded state


def test_groups_of_sharded_parameters(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not any(is_sharded_by_fsdp(p) for p in model.parameters())
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(is_sharded_by_fsdp(p) for p in model.parameters())
    assert dict(fsdp_group_of(model)) == {"0.weight": "", "0.bias": "", "1.0.weight": "1", "1.0.bias": "1"}
