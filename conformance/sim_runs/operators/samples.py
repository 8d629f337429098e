"""Copies of sample inputs on a device, with the strides, offsets and shared storages that they have on the CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, on one device."""

    args: tuple[Any, ...]
    """Positional arguments, the input of the operator first."""
    kwargs: dict[str, Any]
    finish: Any
    """Function that turns the operator's output into one that can be differentiated."""

    def leaves(self) -> list[Tensor]:
        """Return the tensors that need gradients."""
        return [tensor for tensor in tensors((self.args, self.kwargs)) if tensor.requires_grad]


def placed(sample: Any, device: torch.device) -> Sample:
    """Return a copy of a sample input of torch's database on a device; tensors that need gradients are leaves."""
    copier = _Copier(device)
    return Sample(
        copier.copied((sample.input, *sample.args)),
        copier.copied(sample.kwargs),
        sample.output_process_fn_grad or (lambda output: output),
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))


@dataclass
class _Copier:
    device: torch.device
    storages: dict[int, Tensor] = field(default_factory=dict)
    """Bytes on the device by the address on the CPU."""

    def copied(self, value: Any) -> Any:
        match value:
            case Tensor():
                return self._tensor(value)
            case torch.device(type="cpu") | "cpu":
                return self.device
            case torch.Generator():
                return torch.Generator(self.device if self.device.type == "cpu" else "cpu")
            case list():
                return [self.copied(each) for each in value]
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*(self.copied(each) for each in value))
            case tuple():
                return tuple(self.copied(each) for each in value)
            case dict():
                return {key: self.copied(each) for key, each in value.items()}
            case _:
                return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            plain = tensor.detach()
            if plain.layout != torch.strided or type(plain) not in (Tensor, torch.nn.Parameter):
                copy = plain.to(self.device, copy=True)
            else:
                copy = self._strided(plain)
        return copy.requires_grad_(tensor.requires_grad)

    def _strided(self, tensor: Tensor) -> Tensor:
        if tensor.is_conj() or tensor.is_neg():
            conjugate = tensor.is_conj()
            bare = tensor.conj() if conjugate else tensor.resolve_neg()
            return self._strided(bare).conj() if conjugate else self._strided(bare)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = content.to(self.device, copy=True)
        own = self.storages[storage.data_ptr()].untyped_storage()
        placed = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return placed.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
