"""Memory model of FSDP1, with which FSDP2's memory is compared: peaks of a rank in forward and backward.

A walk as in `memory_walk`, through torch/distributed/fsdp/_runtime_utils.py and _flat_param.py, in a world without
streams to wait for. Buffers of a group, of n elements and s = n / ranks in each shard:

    U  n of the compute dtype   unsharded parameters, of which the output of the all-gather is the memory: there is no A
                                of FSDP2. Those of the root, norm and output, from the start of forward to the end of
                                backward; others until they are resharded, in backward from when the group after is used
    C  s of the compute dtype   a shard in the dtype of computation, while it is gathered
    F  n of the compute dtype   gradients as one vector: at first in addition to those of each parameter, until they are
                                reduced. Those of the root wait for the end of backward
    I  n of the reduce dtype    F in that dtype, if it is another, until it is reduced: FSDP2 keeps its I until the next
                                group's backward is over
    G  s of the reduce dtype    reduced gradients
"""

import math
from collections.abc import Sequence

from conformance.memory_segment import MemorySegment
from conformance.oracles.memory_walk import Usage, Walk
from conformance.oracles.schedule import Shapes, group_of
from conformance.oracles.torch_versions import UP_TO_2_14
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_ROOT = "output"
_ALIGNMENT_BYTES = 16
"""Alignment of each parameter in the vector of its group (`_get_aligned_numel` of FlatParamHandle)."""


def predict_fsdp1(
    config: TrainerConfig, dims: ParallelDims, shapes: Shapes, profile: Sequence[MemorySegment]
) -> dict[str, Usage]:
    """Predict the memory of `forward` and `backward` as `memory_model.predict` does for FSDP2."""
    walk = _Fsdp1Walk(config, dims, shapes)
    walk.micro_batches(profile)
    return walk.phases


class _Fsdp1Walk(Walk):
    def __init__(self, config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> None:
        super().__init__(config, dims, shapes, UP_TO_2_14)
        alignment, numels = _ALIGNMENT_BYTES // self._compute, dict.fromkeys(self._parameters, 0)
        for name, shape in shapes.items():
            numels[group_of(name, config)] += -(-math.prod(shape) // alignment) * alignment
        self._shard = {group: -(-numel // dims.dp_shard) for group, numel in numels.items()}

    def _unshard(self, group: str) -> None:
        if f"U {group}" in self._held:
            return
        self._hold("C", self._shard[group] * self._compute if self._compute != self._master else 0)
        self._hold(f"U {group}", self._padded(group) * self._compute)
        self._free("C")

    def _forward(self, group: str) -> None:
        self._unshard(_ROOT)
        self._unshard(group)

    def _after_forward(self, group: str) -> None:
        self._roots[0].leave(group)
        if self._config.reshard != "never" and group != _ROOT:
            self._free(f"U {group}")

    def _backward(self, group: str) -> None:
        self._unshard(group)
        left = self._roots[0].order.left
        previous = left.index(group) - 1
        if previous >= 0:
            self._unshard(left[previous])

    def _after_backward(self, group: str) -> None:
        self._hold("B", self._gradients_bytes)
        if group == _ROOT:
            self._held["gradients of the root"] = self._held.pop("B")
            return
        self._note(self._padded(group) * self._compute)
        self._free(f"U {group}")
        self._free("B")
        self._reduce_vector(group)

    def _reduce_vector(self, group: str) -> None:
        self._hold("F", self._padded(group) * self._compute)
        self._hold("I", self._padded(group) * self._reduce if self._reduce != self._compute else 0)
        self._hold(f"G {group}", self._shard[group] * self._reduce)
        self._free("I")
        self._free("F")

    def _end_of_backward(self) -> None:
        self._note(self._padded(_ROOT) * self._compute)
        self._free(f"U {_ROOT}")
        self._free("gradients of the root")
        self._reduce_vector(_ROOT)

    def _padded(self, group: str) -> int:
        """Elements of a group's unsharded parameters, with padding."""
        return self._shard[group] * self._ranks[group]
