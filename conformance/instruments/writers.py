"""Writers: the lines of a trainer that last wrote each tensor of a model that it builds, and that sharded it."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.instruments.dispatch_tap import OutcomeHandler
from conformance.instruments.taps import Line, is_plain, line_of, owner
from reference_trainer.observer import Observer, Phase


class Writers(Observer):
    """Lines that executed operators while a model is built, that is, before the first phase of a step.

    A shard that `fully_shard` copies from a full tensor has the line that wrote the full tensor.
    """

    def __init__(self) -> None:
        self.sharding: list[Line] = []
        """Lines that called `fully_shard`, each once."""
        self._by_storage: dict[int, Line] = {}
        self._is_building = True

    def phase(self, name: Phase, *, step: int) -> None:
        """Listen no more when a step has begun."""
        self._is_building = name == "build"

    def listen_to_outcomes(self, func: Any) -> OutcomeHandler | None:
        """Return the handler that notes the line; to be a listener of the outcomes of a `DispatchTap`."""
        return self._execute if func.namespace == "aten" else None

    def written(self, tensors: Mapping[str, Tensor]) -> dict[str, Line]:
        """Return the line that last wrote each of some tensors, DTensors too, by the same names, where one is known."""
        found = {name: self._by_storage.get(_storage(tensor)) for name, tensor in tensors.items()}
        return {name: line for name, line in found.items() if line is not None}

    def _execute(self, args: Sequence[Any], _kwargs: Any, result: Any) -> None:
        if not self._is_building:
            return
        line = line_of(owner(sys._getframe(1)))
        is_sharding, sources = _is_in_fully_shard(), [each for each in args if is_plain(each) and not each.is_meta]
        wrote = self._by_storage.get(_storage(sources[-1]), line) if is_sharding and sources else line
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if is_plain(tensor) and not tensor.is_meta:
                self._by_storage[_storage(tensor)] = wrote
        if is_sharding and line not in self.sharding:
            self.sharding.append(line)


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; memory that was freed has the line of its last owner."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _is_in_fully_shard() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_name == "fully_shard" and "torch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
