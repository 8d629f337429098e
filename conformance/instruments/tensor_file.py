"""Tensor files in the format of safetensors, for the hundreds of small tensors of a run.

`safetensors.torch.save_file` takes about 25 us for each tensor, a tenth of a warm run; readers use the library.
https://github.com/huggingface/safetensors#format
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_LENGTH_BYTES = 8
"""Bytes of the header's length, which come first; the header is padded to a multiple of them."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors on the CPU, of any shape. Raises ValueError for a dtype without a name in the format."""
    header, contents, end = {}, [], 0
    # Wide dtypes first: then each tensor is aligned to the size of its elements, as readers expect.
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].element_size(), reverse=True):
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": _name(key, tensor.dtype), "shape": tuple(tensor.shape), "data_offsets": (begin, end)}
        contents.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    with file.open("wb") as output:
        output.write(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        output.write(encoded)
        output.writelines(contents)


def _name(key: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"{key} has dtype {dtype}, not one of {', '.join(map(str, _NAMES))}: add it to {__name__}")
    return _NAMES[dtype]
