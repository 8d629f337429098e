"""Tensor files: the safetensors library reads the tensors that were written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.instruments.tensor_file import write_tensors

REAL = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*REAL, torch.complex64]


def test_the_library_reads_the_same_tensors(tmp_path: Path) -> None:
    tensors = {f"of {dtype}": torch.arange(3).to(dtype) for dtype in DTYPES}
    tensors |= {"a scalar": torch.tensor(2.5), "nothing": torch.empty(0, 3), "é/matrix": torch.randn(3, 5)}
    write_tensors(tmp_path / "file", tensors)
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
        assert read[key].shape == tensor.shape
        assert torch.equal(read[key], tensor)


def test_no_tensors_make_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {})
    assert load_file(tmp_path / "file") == {}


def test_bits_of_nan_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000], dtype=torch.int32)
    write_tensors(tmp_path / "file", {"x": bits.view(torch.float32)})
    assert torch.equal(load_file(tmp_path / "file")["x"].view(torch.int32), bits)


def test_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex128, not one of torch\.bool"):
        write_tensors(tmp_path / "file", {"x": torch.ones(2, dtype=torch.complex128)})
