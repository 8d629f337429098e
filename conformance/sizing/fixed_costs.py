"""Memory of a CUDA device that no tensor of the step has, each cost as a range with its source.

The figures are reports of others, on their devices; none was measured here.
"""

import re
from typing import Literal, NamedTuple

import msgspec

from conformance.oracles.memory_model import parameter_bytes
from conformance.oracles.schedule import Shapes
from conformance.sizing.decoder import Workload
from reference_trainer.checks import require

_UNITS_BYTES = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


class FixedCost(msgspec.Struct, frozen=True):
    """Memory beside that of the prediction."""

    name: str
    least_bytes: int
    most_bytes: int
    phase: Literal["all", "optimizer"]
    source: str

    def most_in(self, phase: str) -> int:
        """Return the upper end of the range in a phase."""
        return self.most_bytes if self.phase in ("all", phase) else 0


class _Report(NamedTuple):
    least_bytes: int
    most_bytes: int
    source: str


_CONTEXT = _Report(287_047_680, 666_632_192, "https://github.com/pytorch/pytorch/pull/86509")
"""Kernels loaded when they are first needed, and all at once."""
_COMMUNICATOR = _Report(544 * 10**6, 1600 * 10**6, "https://github.com/NVIDIA/nccl/issues/964 and 864")
"""Two A100 that are linked, and the largest figure in the two threads; both may have the context as well."""
_WORKSPACE = _Report(8_519_680, 2 * 32 * 2**20, "aten/src/ATen/cuda/CublasHandlePool.cpp")
"""One workspace before Hopper; on Hopper one for the thread of forward and one for that of backward."""


def fixed_costs(workload: Workload, shapes: Shapes, *, given: str | None) -> list[FixedCost]:
    """Return the fixed costs of a rank that holds parameters of these shapes; `given` replaces all of them.

    Raises UsageError for a size that cannot be read.
    """
    if given is not None:
        nbytes = parse_bytes(given, name="fixed costs", zero=True)
        return [FixedCost("given", nbytes, nbytes, "all", "--fixed-costs")]
    roots_bytes = parameter_bytes(workload.config, workload.dims, shapes) if workload.config.offload == "none" else 0
    dims = workload.dims
    groups = [*dims.mesh_shape().values(), *(dims.ep > 1) * [dims.dp_shard // dims.ep, dims.ep], dims.cp]
    meshes = sum(ranks > 1 for ranks in groups)
    communicators = _Report(meshes * _COMMUNICATOR.least_bytes, (meshes + 1) * _COMMUNICATOR.most_bytes, "")
    return [
        FixedCost("CUDA context", *_CONTEXT[:2], "all", _CONTEXT.source),
        FixedCost(f"NCCL, {meshes} to {meshes + 1} groups", *communicators[:2], "all", _COMMUNICATOR.source),
        FixedCost("cuBLAS workspaces", *_WORKSPACE[:2], "all", _WORKSPACE.source),
        FixedCost("AdamW, fused to foreach", 0, roots_bytes, "optimizer", "_multi_tensor_adam in torch/optim/adam.py"),
    ]


def parse_bytes(size: str, *, name: str = "device memory", zero: bool = False) -> int:
    """Return the bytes of a size such as `80GiB`. Raises UsageError for any other text, and for 0 unless allowed."""
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS_BYTES)})", size)
    nbytes = int(float(match[1]) * _UNITS_BYTES[match[2]]) if match else -1
    least, units = ("a number" if zero else "a number above 0"), ", ".join(_UNITS_BYTES)
    require(nbytes >= (0 if zero else 1), f"{name} {size}: write {least} and a unit, one of {units}: 80GiB")
    return nbytes
